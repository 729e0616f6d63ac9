"""A generation, as every room names it: what is asked, what comes back, how it ends.

``SamplingParams.validate`` is the only place that knows which sampling values are allowed; the engine's
door, the clients and the gateway all call it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from contract.errors import InvalidArgument

INT32_MAX = 2**31 - 1
UINT64_MAX = 2**64 - 1


class FinishReason(str, Enum):
    """Why a stream ended. The wire form is the value; a running stream has the empty string."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. Defaults are greedy-free neutral values; None means "engine's own".

    temperature: 0 or top_k == 1 is greedy. top_k: 0 keeps all. top_p in (0, 1], min_p in [0, 1).
    Penalties follow the usual definitions (repetition multiplicative, presence and frequency additive).
    seed: equal seeds and parameters give equal text on one machine.
    min_tokens: no end before so many generated tokens. ignore_eos: the model's end tokens do not end it.
    log_probs: return the log probability of every generated token. top_log_probs: and of so many likeliest ids.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    log_probs: bool = False
    top_log_probs: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    def validate(self) -> SamplingParams:
        """Returns self, or raises InvalidArgument that names the field and what is allowed."""
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, 0, INT32_MAX)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0, open_high=True)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _integer("min_tokens", self.min_tokens, 0, INT32_MAX)
        _integer("top_log_probs", self.top_log_probs, 0, 20)
        if self.seed is not None:
            _integer("seed", self.seed, 0, UINT64_MAX)
        return self


@dataclass(frozen=True)
class GenerationRequest:
    """One valid request in text form: what a client or the gateway sends to an ensemble.

    Exactly one of ``text_input`` and ``messages`` (a chat, oldest first, ``{"role", "content"}``) is set.
    ``stop``: strings matched on text; ``stop_token_ids``: ids; neither appears in the output.
    ``timeout_s``: total time allowed, queueing included; None for no deadline.
    """

    text_input: str | None = None
    messages: tuple[dict, ...] | None = None
    max_tokens: int = 128
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stream: bool = True
    echo: bool = False
    skip_special_tokens: bool = True
    timeout_s: float | None = None
    request_id: str = ""
    json_schema: str | None = None

    def validate(self) -> GenerationRequest:
        """Returns self, or raises InvalidArgument that names the field and what is allowed."""
        if (self.text_input is None) == (self.messages is None):
            raise InvalidArgument("text_input", "set exactly one of text_input and messages")
        if self.text_input == "":
            raise InvalidArgument("text_input", "the prompt is empty; send at least one character")
        _integer("max_tokens", self.max_tokens, 1, INT32_MAX)
        if self.timeout_s is not None:
            _number("timeout_s", self.timeout_s, 0.0, 86_400.0, open_low=True)
        self.sampling.validate()
        return self


@dataclass(frozen=True)
class Usage:
    """Tokens of one request; ``cached_tokens`` of the prompt came from the prefix cache."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class Timings:
    """Instants of one request in a replica, in nanoseconds of the replica's monotonic clock.

    arrival_ns: the tokenizer starts. first_scheduled_ns to last_token_ns: the engine's. tokenized_ns: ids ready.
    received_ns: the detokenizer has the last ids. detokenized_ns: their text is ready. The last three are 0 where the
    replica does not say them.
    """

    arrival_ns: int
    first_scheduled_ns: int
    first_token_ns: int
    last_token_ns: int
    tokenized_ns: int = 0
    received_ns: int = 0
    detokenized_ns: int = 0


@dataclass(frozen=True)
class TokenDelta:
    """What one streamed response adds.

    text: new text, possibly empty. token_ids: the new ids. log_probs: one per id, or empty if not asked.
    finish_reason is set on the last delta only, together with usage; stop_reason says which stop string
    or id matched; error holds the in-band error text when finish_reason is ERROR. top_log_probs: for each new id
    the likeliest (id, log probability), likeliest first, or empty if not asked.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str = ""
    usage: Usage | None = None
    timings: Timings | None = None
    error: str = ""
    top_log_probs: tuple[tuple[tuple[int, float], ...], ...] = ()


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgument(name, f"got {value!r}; allowed is an integer from {low} to {high}")


def _number(
    name: str, value: object, low: float, high: float, *, open_low: bool = False, open_high: bool = False
) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < low or value > high or (open_low and value == low) or (open_high and value == high):
        interval = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
        raise InvalidArgument(name, f"got {value!r}; allowed is a finite number in {interval}")

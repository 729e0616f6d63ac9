"""A generation: the request, the increments of its output, and how it ends.

Only ``SamplingParams.validate`` defines which sampling values are allowed; the engine, the clients and the gateway call
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from contract.errors import InvalidArgument

_Record = TypeVar("_Record")
INT32_MAX = 2**31 - 1
# A softmax at a lower temperature has one token with all of the probability, or overflows.
GREEDY_BELOW = 1e-5
UINT64_MAX = 2**64 - 1


class FinishReason(str, Enum):
    """Why a stream ended. The value is sent on the wire; a running stream sends an empty string."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. The defaults sample from the model's unchanged distribution.

    temperature: below GREEDY_BELOW is greedy.
    top_k: 1 is greedy, 0 keeps all tokens.
    top_p: (0, 1].
    min_p: [0, 1).
    repetition_penalty: multiplicative, (0, 100].
    presence_penalty, frequency_penalty: additive, [-2, 2].
    seed: equal seeds and parameters give equal text on one machine; None for a random one.
    min_tokens: the output does not end before so many tokens.
    ignore_eos: the model's end tokens do not end the output.
    log_probs: return the log probability of every generated token.
    top_log_probs: return so many likeliest ids per position with their log probabilities, 0 to 20.
    prompt_log_probs: return both for the ids of an echoed prompt as well. The first id has none: 0, and ids of -1.
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
    prompt_log_probs: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    def validate(self) -> SamplingParams:
        """Return self. Raises InvalidArgument: a field holds a value that is not allowed."""
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


GUIDE_KINDS = ("json", "json_schema", "regex", "ebnf_grammar", "structural_tag", "choice")
MAX_GUIDE_BYTES = 128 * 1024


@dataclass(frozen=True)
class Guide:
    """What the output must match; docs/structured-output.md has the forms and their limits.

    kind: one of GUIDE_KINDS, TensorRT-LLM's names and ``choice``.
    text: a JSON schema, a regular expression, an EBNF grammar with a rule ``root``, a structural tag as JSON, or a
        JSON list of strings, by kind; empty for ``json``, which is any JSON object.
    """

    kind: str
    text: str = ""

    def validate(self) -> Guide:
        """Return self. Raises InvalidArgument: the kind is unknown, or the text is missing or too long."""
        if self.kind not in GUIDE_KINDS:
            problem = f"must be one of {', '.join(GUIDE_KINDS)}, got {self.kind!r:.100}"
            raise InvalidArgument("guided_decoding_guide_type", problem)
        if not isinstance(self.text, str):
            raise InvalidArgument("guided_decoding_guide", f"must be text, got {self.text!r:.100}")
        size = len(self.text.encode(errors="replace"))
        if size > MAX_GUIDE_BYTES:
            raise InvalidArgument("guided_decoding_guide", f"must have at most {MAX_GUIDE_BYTES} bytes, got {size}")
        if bool(self.text) == (self.kind == "json"):
            allowed = "left out" if self.text else "sent"
            raise InvalidArgument("guided_decoding_guide", f"must be {allowed} with the type {self.kind}")
        return self


@dataclass(frozen=True)
class GenerationRequest:
    """One request in text form, as a client or the gateway sends it to an ensemble.

    text_input: the prompt; exactly one of text_input, messages and input_ids is set.
    messages: a chat, oldest message first, each ``{"role", "content"}``.
    tools: JSON list of the functions that the chat's template shows to the model, as OpenAI describes them.
    tool_choice: whether the model may or must call one, as OpenAI has it; an ensemble gets the guide that says so.
    parallel_tool_calls: whether it may call several, likewise.
    chat_template_kwargs: JSON object of variables of the chat template.
    input_ids: the prompt as token ids.
    truncate_prompt_tokens: keep the prompt's last so many tokens; -1 for as many as fit, None to refuse a long prompt.
    adapter: name of the LoRA adapter; empty for the model alone.
    continue_ids: ids of the output that were generated already; what follows them is returned, as if the stream had
        never been cut. They count as output, in ``max_tokens`` too.
    max_tokens: longest output; 0 with echo returns the prompt alone.
    stop: strings that end the output and are not part of it.
    stop_token_ids: ids that end the output; its last id is one of them then, without a text.
    bad_words: strings whose ids, in this order, are not generated; an engine that cannot promise it refuses them.
    stream: send increments, else the whole output at its end.
    echo: the output begins with the prompt.
    timeout_s: total time allowed, queueing included; None for no deadline.
    guide: what the output must match; None for free text.
    """

    text_input: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    tools: str | None = None
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: str | None = None
    input_ids: tuple[int, ...] | None = None
    truncate_prompt_tokens: int | None = None
    adapter: str = ""
    continue_ids: tuple[int, ...] = ()
    max_tokens: int = 128
    sampling: SamplingParams = SamplingParams()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    stream: bool = True
    echo: bool = False
    skip_special_tokens: bool = True
    timeout_s: float | None = None
    request_id: str = ""
    guide: Guide | None = None

    def validate(self) -> GenerationRequest:
        """Return self. Raises InvalidArgument: a field holds a value that is not allowed."""
        if sum(prompt is not None for prompt in (self.text_input, self.messages, self.input_ids)) != 1:
            raise InvalidArgument("text_input", "must be set if neither messages nor input_ids is, else left out")
        if self.text_input == "":
            raise InvalidArgument("text_input", "must have at least one character, got an empty string")
        for name in ("tools", "chat_template_kwargs"):
            if getattr(self, name) is not None and self.messages is None:
                raise InvalidArgument(name, "must be left out without messages")
        if self.input_ids is not None and not self.input_ids:
            raise InvalidArgument("input_ids", "must hold at least one token id, got none")
        for name, ids in (("input_ids", self.input_ids or ()), ("continue_ids", self.continue_ids)):
            for token in ids:
                _integer(name, token, 0, INT32_MAX)
        kept = self.truncate_prompt_tokens
        whole = isinstance(kept, int) and not isinstance(kept, bool)
        if kept is not None and not (whole and (kept == -1 or 1 <= kept <= INT32_MAX)):
            problem = f"must be an integer from 1 to {INT32_MAX}, or -1 for what fits, got {kept!r}"
            raise InvalidArgument("truncate_prompt_tokens", problem)
        _integer("max_tokens", self.max_tokens, 0 if self.echo else 1, INT32_MAX)
        if self.timeout_s is not None:
            _number("timeout_s", self.timeout_s, 0.0, 86_400.0, open_low=True)
        sampling = self.sampling.validate()
        if sampling.prompt_log_probs and not (self.echo and (sampling.log_probs or sampling.top_log_probs)):
            raise InvalidArgument("prompt_log_probs", "must be false without echo and log_probs, got true")
        if self.guide is not None:
            self.guide.validate()
        return self


def changed(record: _Record, **fields: Any) -> _Record:
    """Return a copy of a data class without slots, with other values in ``fields``, whose names must be its own.

    It takes 0.7 µs of a GenerationRequest; ``dataclasses.replace`` sets every field again, which takes 14.
    """
    copy = object.__new__(type(record))
    vars(copy).update(vars(record), **fields)
    return copy


@dataclass(frozen=True)
class Usage:
    """Tokens of one request. cached_tokens: of the prompt, by the prefix cache. reasoning_tokens: of the output."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True)
class Timings:
    """Instants of one request in a replica, in nanoseconds of the replica's monotonic clock.

    arrival_ns: the tokenizer has the request.
    first_scheduled_ns: the engine's first step with it starts.
    first_token_ns, last_token_ns: the engine has the token.
    tokenized_ns: the prompt's ids are ready; 0 if the replica does not send it.
    received_ns: the detokenizer has the last ids; 0 if the replica does not send it.
    detokenized_ns: their text is ready; 0 if the replica does not send it.
    """

    arrival_ns: int
    first_scheduled_ns: int
    first_token_ns: int
    last_token_ns: int
    tokenized_ns: int = 0
    received_ns: int = 0
    detokenized_ns: int = 0


@dataclass(frozen=True)
class ToolCallDelta:
    """What is added to call number ``index``: at first its id and name, then parts of a JSON text."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Sections(NamedTuple):
    """The parts of an output that are no plain text.

    reasoning: text of reasoning sections.
    tool_calls: in order.
    parts: all that a delta adds as it was generated, its plain text too: kind (text, reasoning or call) and part.
        Empty where the order is not known.
    """

    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    parts: tuple[tuple[str, str | ToolCallDelta], ...] = ()


# Not frozen: one is made for every token, and the assignments of a frozen class take five times as long.
@dataclass(slots=True)
class TokenDelta:
    """What one streamed response adds. Never changed once it is made: several readers may share it.

    text: new text, possibly empty.
    token_ids: new ids.
    log_probs: one per new id, or empty if not requested.
    finish_reason: on the last delta only, together with usage.
    stop_reason: the stop string or id that matched.
    error: ``errors.to_text`` of the failure when finish_reason is ERROR.
    top_log_probs: for each new id the likeliest (id, log probability), likeliest first, or empty if not requested.
    sections: what was separated from the text; None where nothing was. An ensemble sends text only.
    prompt_ids: how many of ``token_ids`` are an echoed prompt's, where a response is the first and not the last.
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
    sections: Sections | None = None
    prompt_ids: int = 0

    @property
    def parts(self) -> Sequence[tuple[str, str | ToolCallDelta]]:
        """All that it adds, in order: kind (text, reasoning or call) and part."""
        sections = self.sections
        if sections is None:
            return (("text", self.text),)
        if sections.parts:
            return sections.parts
        calls = (("call", call) for call in sections.tool_calls)
        return (("reasoning", sections.reasoning), ("text", self.text), *calls)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgument(name, f"must be an integer from {low} to {high}, got {value!r}")


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False, open_high: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high or (open_low and value == low) or (open_high and value == high):
        interval = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
        raise InvalidArgument(name, f"must be a finite number in {interval}, got {value!r}")

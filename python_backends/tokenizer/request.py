"""Validation of an ensemble request, before its text is encoded."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from contract import priority
from contract.errors import InvalidArgument, PromptTooLong
from contract.generation import Guide
from contract.tensors import ENSEMBLE_INPUTS
from python_backends.adapters import NO_ADAPTERS, AdapterIds
from python_backends.ensemble.request_tensors import StreamOptions, read_guide
from python_backends.limits import EngineLimits, check_end_id, check_ids
from python_backends.triton_io import Inputs

DEFAULT_MAX_TOKENS = 128
_MAX_STOPS = 100
_MAX_STOP_CHARACTERS = 1000
_MAX_STOPS_CHARACTERS = 4096  # of all: the detokenizer's one thread builds an automaton of them

# An unknown request parameter is usually a misspelt or misplaced input (generate_stream turns every JSON key that is no
# input into one), so it is refused. Forwarded headers arrive as parameters too.
_KNOWN_PARAMETERS = {"traceparent", "tracestate", priority.PARAMETER}
_KNOWN_PARAMETER_PREFIXES = ("x-", "triton_", "sequence_")


@dataclass(frozen=True)
class PromptRequest:
    """One validated request.

    prompt: text to encode; exactly one of prompt, messages and input_ids is set.
    messages, tools, chat_template_kwargs: a chat and what its template gets besides, as JSON; None when not sent.
    input_ids: int32[n], the prompt's ids, all in the vocabulary.
    truncate: keep the prompt's last so many tokens; -1 for as many as fit, None for all.
    continue_ids: int32[m], ids of the output that were generated already.
    max_tokens: longest output, None for the default.
    stop_token_ids: ids that end the output, beside the model's own.
    end_id: None for the model's own, -1 for none.
    seed, min_tokens: None when not sent.
    lora_task_id: number of the LoRA adapter; None when neither it nor a name was sent.
    bad_words, bias_words, bias_weights: supported by the C++ backend only.
    guide: what the output must match; other engines than the C++ backend get it without the tokenizer.
    """

    prompt: str | None
    messages: str | None
    tools: str | None
    chat_template_kwargs: str | None
    input_ids: np.ndarray | None
    truncate: int | None
    continue_ids: np.ndarray
    max_tokens: int | None
    stop_token_ids: tuple[int, ...]
    end_id: int | None
    seed: int | None
    min_tokens: int | None
    lora_task_id: int | None
    min_p: float
    num_top_log_probs: int
    prompt_log_probs: bool
    bad_words: tuple[str, ...]
    bias_words: tuple[str, ...]
    bias_weights: tuple[float, ...]
    guide: Guide | None
    options: StreamOptions

    @property
    def source(self) -> str:
        """The input that holds the prompt."""
        if self.input_ids is not None:
            return "input_ids"
        return "text_input" if self.messages is None else "messages"


def parse(
    inputs: Inputs,
    parameters: dict[str, Any],
    limits: EngineLimits,
    max_prompt_bytes: int,
    adapters: AdapterIds = NO_ADAPTERS,
) -> PromptRequest:
    """Read and validate the input tensors.
    Raises InvalidArgument: an input or parameter holds a value that is not allowed.
    Raises PromptTooLong: the prompt has more than ``max_prompt_bytes``.
    """
    check_parameters(parameters)
    priority.read(parameters)
    prompt, messages = inputs.text("text_input"), inputs.text("messages")
    input_ids = _prompt_ids(inputs, limits.vocab_size, max_prompt_bytes)
    continued = inputs.array("continue_ids")
    continue_ids = np.zeros(0, np.int32) if continued is None else continued.reshape(-1)
    check_ids("continue_ids", continue_ids, limits.vocab_size)
    prompts = {"text_input": prompt, "messages": messages, "input_ids": input_ids}
    sent = [name for name, value in prompts.items() if value is not None]
    if not sent:
        raise InvalidArgument("text_input", "must be sent if neither messages nor input_ids is, got none of them")
    if len(sent) > 1:
        raise InvalidArgument(sent[1], f"must be left out if {sent[0]} is sent, got both")
    if prompt == "":
        raise InvalidArgument("text_input", "must have at least one character, got an empty string")
    chat = {name: inputs.text(name) for name in ("tools", "chat_template_kwargs")}
    for name, text in chat.items():
        if text is not None and messages is None:
            raise InvalidArgument(name, "must be left out without messages")
    for name, text in (("text_input", prompt), ("messages", messages), *chat.items()):
        if text is not None and len(text.encode()) > max_prompt_bytes:
            raise PromptTooLong(name, f"must have at most {max_prompt_bytes} bytes, got {len(text.encode())}")
    truncate = inputs.scalar("truncate_prompt_tokens")
    if truncate is not None and truncate != -1 and truncate < 1:
        raise InvalidArgument("truncate_prompt_tokens", f"must be 1 or more, or -1 for what fits, got {truncate}")
    max_tokens, echo = inputs.scalar("max_tokens"), not inputs.scalar("exclude_input_in_output", True)
    if max_tokens is not None and not (max_tokens == 0 and echo) and not 1 <= max_tokens <= limits.max_seq_len:
        echoed = ", or 0 with exclude_input_in_output=false" if max_tokens < 1 else ""
        allowed = f"1 to {limits.max_seq_len}{echoed}"
        raise InvalidArgument("max_tokens", f"must be {allowed}, got {max_tokens}")
    min_tokens = _alias(inputs, "min_tokens", "min_length")
    if min_tokens is not None and not 0 <= min_tokens <= limits.max_seq_len:
        name = "min_tokens" if inputs.scalar("min_length") is None else "min_length"
        raise InvalidArgument(name, f"must be 0 to {limits.max_seq_len}, got {min_tokens}")
    bias_words, bias_weights = inputs.texts("embedding_bias_words"), inputs.values("embedding_bias_weights")
    if len(bias_words) != len(bias_weights):
        problem = f"must have a value per word, got {len(bias_weights)} for {len(bias_words)}"
        raise InvalidArgument("embedding_bias_weights", problem)
    if not all(map(math.isfinite, bias_weights)):
        raise InvalidArgument("embedding_bias_weights", f"must be finite numbers, got {bias_weights}")
    stop_ids = inputs.values("stop_token_ids")
    if len(stop_ids) > _MAX_STOPS:
        raise InvalidArgument("stop_token_ids", f"must hold at most {_MAX_STOPS} ids, got {len(stop_ids)}")
    check_ids("stop_token_ids", stop_ids, limits.vocab_size)
    stop_token_ids = tuple(dict.fromkeys(stop_ids))
    if ended := set(stop_token_ids).intersection(continue_ids.tolist()):
        raise InvalidArgument("continue_ids", f"must hold none of stop_token_ids, got {min(ended)}")
    end_id = -1 if inputs.scalar("ignore_eos", False) else inputs.scalar("end_id")
    if end_id is not None:
        check_end_id(end_id, limits.vocab_size)
    return PromptRequest(
        prompt=prompt,
        messages=messages,
        **chat,
        input_ids=input_ids,
        truncate=truncate,
        continue_ids=continue_ids,
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        end_id=end_id,
        seed=_alias(inputs, "seed", "random_seed"),
        min_tokens=min_tokens,
        lora_task_id=_adapter(inputs, adapters),
        min_p=inputs.scalar("min_p", 0.0),
        num_top_log_probs=inputs.scalar("num_top_log_probs", 0),
        prompt_log_probs=inputs.scalar("return_prompt_log_probs", False),
        bad_words=tuple(word for word in inputs.texts("bad_words") if word),
        bias_words=tuple(bias_words),
        bias_weights=tuple(bias_weights),
        guide=read_guide(inputs, min_tokens or 0, end_id != -1),
        options=StreamOptions(
            stream=inputs.scalar("stream", False),
            echo=echo,
            stop=_stop_words(inputs),
            include_stop=inputs.scalar("include_stop_in_output", False),
            hidden_ids=stop_token_ids,
            skip_special_tokens=inputs.scalar("skip_special_tokens", True),
            min_tokens=min_tokens or 0,
            timings=inputs.scalar("return_perf_metrics", False),
        ),
    )


def _adapter(inputs: Inputs, adapters: AdapterIds) -> int | None:
    name, number = inputs.text("lora_name"), inputs.scalar("lora_task_id")
    if number is not None and adapters.names:
        adapters.check(number)
    if not name:
        return number
    named = adapters.number(name)
    if number not in (None, named):
        raise InvalidArgument("lora_task_id", f"must be {named} or left out beside lora_name {name!r}, got {number}")
    return named


def check_parameters(parameters: dict[str, Any]) -> None:
    """Check the names of the request parameters. Raises InvalidArgument: one is not known."""
    for name in parameters:
        lowered = name.lower()
        if lowered in _KNOWN_PARAMETERS or lowered.startswith(_KNOWN_PARAMETER_PREFIXES):
            continue
        names = [tensor.name for tensor in ENSEMBLE_INPUTS]
        if name in names:
            raise InvalidArgument(name, "must be sent as an input tensor, got a request parameter")
        near = difflib.get_close_matches(name, names, 1)
        hint = f"; did you mean the input {near[0]}?" if near else "; see the inputs of the model ensemble"
        raise InvalidArgument(name, f"must be an input or a known request parameter{hint}")


def _alias(inputs: Inputs, name: str, older_name: str) -> Any:
    """Return the value sent under either name. Raises InvalidArgument: both were sent and differ."""
    value, older = inputs.scalar(name), inputs.scalar(older_name)
    if value is not None and older is not None and value != older:
        raise InvalidArgument(older_name, f"must equal {name}, its other name, got {older} and {value}")
    return older if value is None else value


def _prompt_ids(inputs: Inputs, vocab_size: int, max_bytes: int) -> np.ndarray | None:
    array = inputs.array("input_ids")
    if array is None:
        return None
    if array.nbytes > max_bytes:
        raise PromptTooLong("input_ids", f"must hold at most {max_bytes // array.itemsize} ids, got {array.size}")
    if not array.size:
        raise InvalidArgument("input_ids", "must hold at least one token id, got none")
    check_ids("input_ids", array, vocab_size)
    return array.reshape(-1)


def _stop_words(inputs: Inputs) -> tuple[str, ...]:
    array = inputs.array("stop_words")
    if array is not None and array.size > _MAX_STOPS:
        raise InvalidArgument("stop_words", f"must hold at most {_MAX_STOPS} strings, got {array.size}")
    # Common clients send an empty string for "none".
    words = tuple(dict.fromkeys(word for word in inputs.texts("stop_words") if word))
    for word in words:
        if len(word) > _MAX_STOP_CHARACTERS:
            problem = f"must hold strings of at most {_MAX_STOP_CHARACTERS} characters, got {len(word)}"
            raise InvalidArgument("stop_words", problem)
    if (characters := sum(map(len, words))) > _MAX_STOPS_CHARACTERS:
        raise InvalidArgument("stop_words", f"must have at most {_MAX_STOPS_CHARACTERS} characters, got {characters}")
    return words

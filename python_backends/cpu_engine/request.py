"""Validation of an engine request: TensorRT-LLM's tensors in, one frozen request out, or an error naming the tensor."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from contract.errors import InvalidArgument
from contract.generation import UINT64_MAX, Guide, SamplingParams
from contract.priority import NORMAL
from python_backends.adapters import NO_ADAPTERS, AdapterIds
from python_backends.ensemble.request_tensors import StreamOptions, decode_word_list, read_guide
from python_backends.limits import EngineLimits, check_end_id, check_fits, check_ids
from python_backends.triton_io import Inputs

# Tensors of the contract that the Python engines do not support yet, with their neutral values. These are accepted,
# because common clients always send them; any other value is refused by name.
_UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "beam_width": (1, "beam search"),
    "num_return_sequences": (1, "several sequences for one request"),
    "len_penalty": (1.0, "a length penalty (it only affects beam search)"),
    "return_context_logits": (False, "logits of the prompt"),
    "return_generation_logits": (False, "logits of the output"),
}

# Tensors that callers know by another name, that of the ensemble's input.
_SHOWN = {
    "len_penalty": "len_penalty (length_penalty)",
    "top_k": "runtime_top_k (top_k)",
    "top_p": "runtime_top_p (top_p)",
    "top_log_probs": "num_top_log_probs",
}
# Tensors of the fields of SamplingParams, where they have another name.
_SAMPLING = {
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "log_probs": "return_log_probs",
    "top_log_probs": "num_top_log_probs",
    "prompt_log_probs": "return_prompt_log_probs",
}
_MAX_STOP_WORDS = 256  # those of several ids are matched by the engine at every token, under its lock


@dataclass(frozen=True)
class EngineRequest:
    """One sequence to generate.

    input_ids: int64[n], the prompt, and behind it the ids that were generated already.
    continued: how many these are.
    max_tokens: ids to generate still.
    replay: the sequence starts at the prompt again, and what it generates first must be the continued ids.
    ended_by: an end id at the end of the continued ids, else -1.
    gathered: the client gets a single response, although ids are sent while it runs.
    stop_ids, stop_sequences: ids, and sequences of two or more of them, that end it.
    streaming: send responses while it runs, else one at its end.
    echo: send the prompt's ids first.
    stream_options: opaque text for the detokenizer.
    arrival_ns, tokenized_ns: CLOCK_MONOTONIC.
    timeout_ns: total time allowed from arrival, 0 for no limit.
    priority: 0 (last) to 1 (first).
    guide: what the output must match; None for free text.
    adapter: name of the LoRA adapter, empty for none.
    marked_ids: input_ids as the worker reads them under the adapter, None without one.
    """

    request_id: str
    input_ids: np.ndarray
    max_tokens: int
    sampling: SamplingParams
    stop_ids: frozenset[int]
    stop_sequences: tuple[tuple[int, ...], ...]
    streaming: bool
    echo: bool
    stream_options: str
    arrival_ns: int
    tokenized_ns: int
    timeout_ns: int
    priority: float = NORMAL
    guide: Guide | None = None
    adapter: str = ""
    marked_ids: np.ndarray | None = None
    continued: int = 0
    replay: bool = False
    ended_by: int = -1
    gathered: bool = False

    @property
    def answers_once(self) -> bool:
        """Whether the client gets a single response."""
        return self.gathered or not self.streaming

    @property
    def prompt_ids(self) -> np.ndarray:
        return self.input_ids[: self.input_ids.size - self.continued]

    @property
    def worker_ids(self) -> np.ndarray:
        """int64[n], read before it generates; they key the prefix cache too, so adapters never share blocks."""
        ids = self.input_ids if self.marked_ids is None else self.marked_ids
        return ids[: ids.size - self.continued] if self.replay else ids

    @property
    def continued_ids(self) -> np.ndarray:
        return self.input_ids[self.input_ids.size - self.continued :]

    @property
    def deadline_ns(self) -> int | None:
        """CLOCK_MONOTONIC; None without a timeout."""
        return self.arrival_ns + self.timeout_ns if self.timeout_ns else None


def parse(
    inputs: Inputs,
    limits: EngineLimits,
    request_id: str,
    timeout_ns: int,
    now_ns: int,
    priority: float = NORMAL,
    adapters: AdapterIds = NO_ADAPTERS,
) -> EngineRequest:
    """Read and validate a request's tensors.

    request_id, timeout_ns, priority: of the Triton request. now_ns: CLOCK_MONOTONIC.
    Raises InvalidArgument: a tensor holds a value that is not allowed or not supported.
    Raises PromptTooLong: prompt and output exceed the engine's limits.
    """
    _refuse_unsupported(inputs)
    tensor = inputs.array("input_ids")
    if tensor is None or tensor.size == 0:
        raise InvalidArgument("input_ids", "must hold at least one token id, got none")
    input_ids = tensor.reshape(-1).astype(np.int64)
    check_ids("input_ids", input_ids, limits.vocab_size)
    declared = inputs.scalar("input_lengths")
    if declared != input_ids.size:
        problem = f"must be {input_ids.size}, the number of input_ids, got {declared}"
        raise InvalidArgument("input_lengths", problem)
    max_tokens, echo = inputs.scalar("request_output_len"), not inputs.scalar("exclude_input_in_output", True)
    if max_tokens is None or max_tokens < (0 if echo else 1):
        allowed = "1 or more, or 0 with exclude_input_in_output=false"
        raise InvalidArgument("request_output_len", f"must be {allowed}, got {max_tokens}")
    sampling = _sampling(inputs)
    if sampling.prompt_log_probs and not (echo and (sampling.log_probs or sampling.top_log_probs)):
        allowed = "false without exclude_input_in_output=false and return_log_probs"
        raise InvalidArgument("return_prompt_log_probs", f"must be {allowed}, got true")
    continued = inputs.scalar("num_continued_tokens", 0)
    if not 0 <= continued <= min(input_ids.size - 1, max_tokens):
        allowed = "0 to request_output_len, and less than input_ids"
        raise InvalidArgument("num_continued_tokens", f"must be {allowed}, got {continued}")
    check_fits(input_ids.size - continued, max_tokens, limits, "input_ids", "request_output_len")
    stop_ids, stop_sequences = _stops(inputs, limits)
    guide = read_guide(inputs, sampling.min_tokens, bool(stop_ids))
    replay, ended_by = False, -1
    if continued:
        replay, ended_by = _continuation(input_ids[-continued:], max_tokens, sampling, stop_ids, guide)
        if not replay:
            max_tokens = 0 if ended_by >= 0 else max_tokens - continued
            sampling = _continued(sampling, continued)
    arrival_ns, tokenized_ns = _times(inputs, now_ns)
    adapter = adapters.check(inputs.scalar("lora_task_id", 0))
    usual = adapters.first_token_id in (-1, input_ids[0])  # -1: the LLM API, which is told of adapters by name
    if adapter and sampling.repetition_penalty != 1 and not usual:
        # The pipeline looks the prompt's ids up in the logits, which lack those of such prompts (adapters.py).
        problem = f"must be 1 under a LoRA adapter for a prompt that does not begin with id {adapters.first_token_id}"
        raise InvalidArgument("repetition_penalty", f"{problem}, as chats do, got {sampling.repetition_penalty:g}")
    return EngineRequest(
        request_id=request_id,
        input_ids=input_ids,
        max_tokens=max_tokens,
        sampling=sampling,
        stop_ids=stop_ids,
        stop_sequences=stop_sequences,
        streaming=inputs.scalar("streaming", False),
        echo=echo and not continued,
        stream_options=inputs.text("stream_options") or "",
        arrival_ns=arrival_ns,
        tokenized_ns=tokenized_ns,
        timeout_ns=timeout_ns,
        priority=priority,
        guide=guide,
        adapter=adapters.name(adapter),
        marked_ids=adapters.mark(input_ids, adapter) if adapter else None,
        continued=continued,
        replay=replay,
        ended_by=ended_by,
        gathered=gathered(inputs),
    )


def gathered(inputs: Inputs) -> bool:
    """Whether the client gets a single response. The engine may stream to the detokenizer nevertheless."""
    try:
        return not StreamOptions.from_json(inputs.text("stream_options") or "-").stream
    except (ValueError, TypeError, AttributeError):  # not written by our tokenizer
        return not inputs.scalar("streaming", False)


def _continuation(
    ids: np.ndarray, max_tokens: int, sampling: SamplingParams, stop_ids: frozenset[int], guide: Guide | None
) -> tuple[bool, int]:
    """Return whether the ids that were generated already must be generated again, and the end id at their end or -1.

    OpenVINO GenAI counts a presence and a frequency penalty, and follows a guide, over the ids that it generated
    itself; for all else it makes no difference whether an id was generated or is part of the prompt.
    Raises InvalidArgument: the sequence could not go on as if it had never been cut.
    """
    ends = np.flatnonzero(np.isin(ids, list(stop_ids)))
    if ends.size and ends[0] < ids.size - 1:
        raise InvalidArgument("continue_ids", f"must hold an id that ends the output only last, got {ids[ends[0]]}")
    if sampling.prompt_log_probs:
        raise InvalidArgument("return_prompt_log_probs", "must be false with continue_ids, got true")
    penalised = bool(sampling.presence_penalty or sampling.frequency_penalty)
    replay = not ends.size and ids.size < max_tokens and (penalised or guide is not None)
    if replay and not sampling.greedy and sampling.seed is None:
        if guide is not None:
            problem = "must be left out with continue_ids, unless the request is greedy or has a seed"
            raise InvalidArgument("guided_decoding_guide", problem)
        name = "presence_penalty" if sampling.presence_penalty else "frequency_penalty"
        raise InvalidArgument(name, "must be 0 with continue_ids, unless the request is greedy or has a seed")
    return replay, int(ids[-1]) if ends.size else -1


def _continued(sampling: SamplingParams, ids: int) -> SamplingParams:
    """Return the parameters of the rest of a sequence of which so many ids were generated already.

    A seed's random numbers start anew with every sequence, so the rest gets others, always the same for its place. The
    log probabilities of the ids so far, which ``cum_log_probs`` includes, are read with the prompt.
    """
    seed = None if sampling.seed is None else (sampling.seed + ids * 0x9E3779B97F4A7C15) & UINT64_MAX
    needs_sum = sampling.log_probs or sampling.top_log_probs > 0
    return replace(sampling, min_tokens=max(0, sampling.min_tokens - ids), seed=seed, prompt_log_probs=needs_sum)


def _times(inputs: Inputs, now_ns: int) -> tuple[int, int]:
    times = inputs.array("tokenizer_time_ns")
    if times is None:
        return now_ns, now_ns
    times = times.reshape(-1).tolist()
    if len(times) != 2 or not 0 <= times[0] <= times[1] <= now_ns:
        allowed = f"two instants of CLOCK_MONOTONIC in order, not after {now_ns}"
        raise InvalidArgument("tokenizer_time_ns", f"must be {allowed}, got {times}")
    return times[0], times[1]


def _refuse_unsupported(inputs: Inputs) -> None:
    for name, (neutral, what) in _UNSUPPORTED.items():
        value = inputs.scalar(name, neutral)
        if value != neutral:
            problem = f"must be {neutral}, got {value}; {what}: not supported by this engine yet"
            raise InvalidArgument(_SHOWN.get(name, name), problem)
    for name, what in (("bad_words_list", "bad words"), ("embedding_bias", "a bias on token ids")):
        array = inputs.array(name)
        if array is not None and array.size:
            raise InvalidArgument(name, f"must be left out; {what}: not supported by this engine yet")


def _sampling(inputs: Inputs) -> SamplingParams:
    given = {field.name: inputs.scalar(_SAMPLING.get(field.name, field.name)) for field in fields(SamplingParams)}
    given["top_p"] = given["top_p"] or None  # TensorRT-LLM's clients send 0 for "not set"
    if given["top_k"] is None and given["temperature"] is None and not given["top_p"] and not given["min_p"]:
        given["top_k"] = 1  # as in TensorRT-LLM, which samples greedily unless the request says otherwise
    try:
        return SamplingParams(**{field: value for field, value in given.items() if value is not None}).validate()
    except InvalidArgument as exc:
        if exc.field == "top_p":
            problem = f"must be a finite number in [0, 1], where 0 means not set, got {given['top_p']!r}"
            raise InvalidArgument(_SHOWN[exc.field], problem) from exc
        raise InvalidArgument(_SHOWN.get(exc.field, exc.field), exc.problem) from exc


def _stops(inputs: Inputs, limits: EngineLimits) -> tuple[frozenset[int], tuple[tuple[int, ...], ...]]:
    end_id = inputs.scalar("end_id", -1)
    check_end_id(end_id, limits.vocab_size)
    words = decode_word_list("stop_words_list", inputs.array("stop_words_list"))
    if len(words) > _MAX_STOP_WORDS:
        raise InvalidArgument("stop_words_list", f"must hold at most {_MAX_STOP_WORDS} words, got {len(words)}")
    for word in words:
        if len(word) > limits.max_seq_len:
            problem = f"must hold words of at most {limits.max_seq_len} ids, got one of {len(word)}"
            raise InvalidArgument("stop_words_list", problem)
        check_ids("stop_words_list", word, limits.vocab_size)
    singles = {word[0] for word in words if len(word) == 1}
    return frozenset(singles | ({end_id} - {-1})), tuple(dict.fromkeys(word for word in words if len(word) > 1))

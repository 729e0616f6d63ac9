"""The Triton model ``tokenizer``: a batch of requests in, the engine's input tensors of each, or its error, out."""

from __future__ import annotations

import copy
import dataclasses
import json
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import numpy as np

from contract import manifest as manifests
from contract import priority
from contract.backend_settings import Settings
from contract.errors import InvalidArgument, Overloaded, TridentError, Unavailable, of_ours
from contract.generation import GUIDE_KINDS, Guide
from python_backends.adapters import AdapterIds, adapter_tensors
from python_backends.ensemble.metadata_channel import MetadataSender, StreamMetadata
from python_backends.ensemble.request_tensors import encode_word_list
from python_backends.grammar.checker import NO_VOCABULARY, GrammarChecker
from python_backends.heartbeat import Heartbeat
from python_backends.limits import EngineLimits, check_fits
from python_backends.metrics import Metrics
from python_backends.tokenizer.chat_template import ChatTemplate
from python_backends.tokenizer.encoding import Encoding
from python_backends.tokenizer.request import DEFAULT_MAX_TOKENS, PromptRequest, parse
from python_backends.triton_io import (
    Inputs,
    Request,
    error_response,
    metric_family,
    parameters,
    response,
    row,
    texts,
)

_Checked = Future[Guide | TridentError]
_Prompt = tuple[PromptRequest, str, bool]  # the text to encode, whether to add special tokens; "" for ids


class TritonPythonModel:
    """Triton's interface of a Python model."""

    def initialize(self, args: dict[str, str]) -> None:
        settings = Settings.from_env()
        manifest = manifests.load(settings.engine_dir)
        self._engine_dir = settings.engine_dir
        self._limits = EngineLimits.from_manifest(manifest)
        self._adapters = AdapterIds.from_manifest(manifest)
        self._max_prompt_bytes = settings.max_prompt_bytes
        self._drain_file = settings.drain_file
        self._eos_token_ids = tuple(manifest.eos_token_ids)
        self._kind = manifest.kind
        self._cpp_backend = manifest.kind == "trtllm"
        # Only a Python engine passes options on; for the C++ backend they take the metadata channel.
        self._metadata_channel = MetadataSender(settings.metadata_socket) if self._cpp_backend else None
        self._grammars = GrammarChecker.open(settings, manifest) if self._cpp_backend else None
        self._longest_check_s = settings.grammar_stall_s
        if self._grammars is not None:
            self._begin_check(Guide("json"))  # starts its process, which takes long
        self._encoding = Encoding(settings.engine_dir / "tokenizer.json", self._limits.max_seq_len)
        self._chat_template = ChatTemplate(settings.engine_dir)
        self._metrics = Metrics(metric_family)
        self._refused = self._metrics.errors(model="tokenizer")
        self._heartbeat = Heartbeat(settings.supervisor_socket)

    def execute(self, requests: list[Request]) -> list[Any]:
        with self._heartbeat:
            return self._execute(requests)

    def _execute(self, requests: list[Request]) -> list[Any]:
        arrival_ns = time.monotonic_ns()
        if self._drain_file is not None and self._drain_file.exists():
            parsed: list[_Prompt | TridentError] = [Unavailable("the server is shutting down") for _ in requests]
        else:
            parsed = [self._parse(request) for request in requests]
        guides = {item[0].guide for item in parsed if isinstance(item, tuple)}
        checks = {guide: self._begin_check(guide) for guide in guides if guide is not None}
        until_s = time.monotonic() + self._longest_check_s
        ids = iter(self._encode([item for item in parsed if isinstance(item, tuple)]))
        responses = []
        for request, item in zip(requests, parsed, strict=True):
            try:
                if isinstance(item, TridentError):
                    raise item
                prompt, token_ids = item[0], next(ids)
                guided = self._checked(checks[prompt.guide], until_s) if prompt.guide is not None else {}
                outputs = self._outputs(request.request_id(), prompt, token_ids, arrival_ns)
                responses.append(response(outputs | guided))
            except Exception as exc:  # the outer edge: one request's defect must not fail its batch
                error = of_ours(exc, "the tokenizer failed")
                self._refused(error)
                responses.append(error_response(error))
        self._metrics.flush()
        return responses

    def _begin_check(self, guide: Guide) -> _Checked:
        """Return where the result of the guide's check will be."""
        result: _Checked = Future()
        try:
            if self._grammars is None:
                raise InvalidArgument("guided_decoding_guide_type", NO_VOCABULARY)
            self._grammars.check(guide, result.set_result)
        except TridentError as exc:
            result.set_result(exc)
        return result

    def _checked(self, result: _Checked, until_s: float) -> dict[str, np.ndarray]:
        """Return the engine's tensors for a guide. Raises TridentError: the guide was refused, or is not checked yet:
        other requests may not wait longer for it."""
        try:
            guide = result.result(timeout=max(0.0, until_s - time.monotonic()))
        except FutureTimeout:
            raise Overloaded("the grammar is being compiled; send the request again") from None
        if isinstance(guide, TridentError):
            raise copy.copy(guide)  # the checker keeps this one, and its traceback would keep requests
        return {"guided_decoding_guide_type": texts(guide.kind), "guided_decoding_guide": texts(guide.text)}

    def _parse(self, request: Request) -> _Prompt | TridentError:
        """Return the request, the text to encode and whether to add special tokens; or the error."""
        try:
            sent = parameters(request)
            prompt = parse(Inputs(request), sent, self._limits, self._max_prompt_bytes, self._adapters)
            self._refuse_unsupported(prompt)
            if self._cpp_backend and priority.read(sent) != priority.NORMAL:
                given = sent[priority.PARAMETER]
                problem = f"must be left out, the TensorRT-LLM engine has no priorities; got {given!r}"
                raise InvalidArgument(priority.PARAMETER, problem)
            text = prompt.prompt or ""
            if prompt.messages is not None:
                text = self._chat_template.render(prompt.messages, prompt.tools, prompt.chat_template_kwargs)
            if prompt.truncate is None:
                self._encoding.check_length(prompt.source, text)
            # A chat template writes the special tokens itself.
            return prompt, text, prompt.messages is None
        except Exception as exc:  # the outer edge: a defect becomes a well-formed response
            return of_ours(exc, "the tokenizer could not read the request")

    def _encode(self, items: list[_Prompt]) -> list[list[int]]:
        """Return the ids of every item, in order, with one call to the tokenizer per kind of prompt."""
        ids: list[list[int]] = [[]] * len(items)
        whole: dict[bool, list[int]] = {True: [], False: []}  # indices by whether to add special tokens
        for index, (prompt, text, add_special_tokens) in enumerate(items):
            if prompt.input_ids is not None:
                ids[index] = prompt.input_ids[-self._kept(prompt) :].tolist()
            elif prompt.truncate is not None:
                ids[index] = self._encoding.encode_end(text, add_special_tokens, self._kept(prompt))
            else:
                whole[add_special_tokens].append(index)
        for add_special_tokens, chosen in whole.items():
            encoded = self._encoding.encode([items[index][1] for index in chosen], add_special_tokens)
            for index, token_ids in zip(chosen, encoded, strict=True):
                ids[index] = token_ids
        return ids

    def _kept(self, prompt: PromptRequest) -> int:
        """Return how many of the prompt's last tokens to keep; 0 for all."""
        if prompt.truncate != -1:
            return prompt.truncate or 0
        longest = min(self._limits.max_seq_len, self._limits.kv_cache_tokens)
        output = min(DEFAULT_MAX_TOKENS, longest // 2) if prompt.max_tokens is None else prompt.max_tokens
        return max(1, longest - output)

    def _refuse_unsupported(self, prompt: PromptRequest) -> None:
        """Refuse inputs by their public names that the engine would refuse by another, or ignore."""
        cpp, cpu = self._cpp_backend, self._kind == "cpu"
        if cpp:
            self._adapters.check(prompt.lora_task_id or 0)
            if prompt.guide is not None and prompt.guide.kind == "structural_tag":
                allowed = ", ".join(kind for kind in GUIDE_KINDS if kind != "structural_tag")
                problem = f"must be one of {allowed} with this engine, got 'structural_tag'"
                raise InvalidArgument("guided_decoding_guide_type", problem)
        reason = "not supported by this engine yet"
        if cpu:
            reason = "OpenVINO GenAI has no mask or bias for the token ids of one request"
        for name, value, neutral in (
            ("min_p", cpp and prompt.min_p, "0"),
            ("num_top_log_probs", cpp and prompt.num_top_log_probs, "0"),
            ("bad_words", not cpp and prompt.bad_words and json.dumps(prompt.bad_words)[:100], "left out"),
            ("embedding_bias_words", not cpp and prompt.bias_words and json.dumps(prompt.bias_words)[:100], "left out"),
            ("return_prompt_log_probs", not cpu and prompt.prompt_log_probs, "false"),
            ("max_tokens", not cpu and prompt.max_tokens == 0 and "0", "1 or more"),
            ("continue_ids", not cpu and prompt.continue_ids.size and f"{prompt.continue_ids.size} ids", "left out"),
            # The C++ backend's streams never begin with the prompt.
            ("exclude_input_in_output", cpp and prompt.options.echo and "false", "true"),
        ):
            if value:
                raise InvalidArgument(name, f"must be {neutral}, got {value}; {reason}")

    def _outputs(
        self, request_id: str, prompt: PromptRequest, ids: list[int], arrival_ns: int
    ) -> dict[str, np.ndarray]:
        name = prompt.source
        if not ids:
            raise InvalidArgument(name, "must encode to at least one token, got none")
        self._check_vocabulary(name, ids)
        max_tokens = prompt.max_tokens
        if max_tokens is None:
            max_tokens = max(1, min(DEFAULT_MAX_TOKENS, self._limits.max_seq_len - len(ids)))
        check_fits(len(ids), max_tokens, self._limits, name)
        continued = prompt.continue_ids.tolist()
        if len(continued) > max_tokens:
            raise InvalidArgument("continue_ids", f"must hold at most max_tokens, {max_tokens}, got {len(continued)}")
        end_ids = self._eos_token_ids  # unless the request has its own or none
        if prompt.end_id is not None:
            end_ids = () if prompt.end_id == -1 else (prompt.end_id,)
        outputs = {
            "input_ids": row(ids + continued),
            "input_lengths": row([len(ids) + len(continued)]),
            "max_tokens": row([max_tokens]),
            # An engine takes one end id; the other ids that end the output are sent as stop words of one id.
            "end_id": row([end_ids[0] if end_ids else -1]),
            "stop_words_list": encode_word_list([(token,) for token in (*end_ids[1:], *prompt.stop_token_ids)]),
            "streaming": row([self._engine_streams(prompt)], np.bool_),
        }
        if prompt.bad_words:
            outputs["bad_words_list"] = encode_word_list([self._ids("bad_words", word) for word in prompt.bad_words])
        if prompt.bias_words:
            outputs["embedding_bias"] = self._bias(prompt)
        if prompt.seed is not None:
            outputs["seed"] = row([prompt.seed], np.uint64)
        if prompt.min_tokens is not None:
            outputs["min_tokens"] = row([prompt.min_tokens])
        adapter = prompt.lora_task_id or 0
        if adapter:
            outputs["lora_task_id"] = row([adapter], np.uint64)
        tokenized_ns = time.monotonic_ns()
        outputs["tokenizer_time_ns"] = row([arrival_ns, tokenized_ns], np.int64)
        stream_options = prompt.options
        if stream_options.timings:
            stream_options = dataclasses.replace(stream_options, tokenized_ns=tokenized_ns)
        if continued:
            outputs["num_continued_tokens"] = row([len(continued)])
            replayed = (*(ids if stream_options.echo else ()), *continued)
            stream_options = dataclasses.replace(stream_options, replayed_ids=replayed)
        options = stream_options.to_json()
        outputs["stream_options"] = texts(options)
        if self._metadata_channel is not None:  # last, because the request id is in use from here on
            ends = (*end_ids, *prompt.stop_token_ids)
            if self._metadata_channel.post(StreamMetadata(request_id, options, max_tokens, len(ids), ends, adapter)):
                outputs |= adapter_tensors(self._engine_dir, adapter)
        return outputs

    def _engine_streams(self, prompt: PromptRequest) -> bool:
        """Whether the engine sends ids as they are generated.

        Without ``stream`` the detokenizer gathers the text. It needs the ids early nevertheless to stop the engine at a
        stop string, and, with the C++ backend, which sends no probes, to detect a disconnected client.
        """
        return prompt.options.stream or bool(prompt.options.stop) or self._cpp_backend

    def _bias(self, prompt: PromptRequest) -> np.ndarray:
        bias = np.zeros((1, self._limits.vocab_size), dtype=np.float32)
        for word, weight in zip(prompt.bias_words, prompt.bias_weights, strict=True):
            bias[0, list(self._ids("embedding_bias_words", word))] += weight
        return bias

    def _ids(self, name: str, word: str) -> tuple[int, ...]:
        ids = self._encoding.encode_word(word)
        if not ids:
            raise InvalidArgument(name, f"must hold words that encode to tokens, got {word!r}")
        self._check_vocabulary(name, ids)
        return ids

    def _check_vocabulary(self, name: str, ids: Sequence[int]) -> None:
        """A tokenizer may have added tokens for which the model has no row. Raises InvalidArgument: the input holds
        such a token."""
        highest = max(ids)
        if highest >= self._limits.vocab_size:
            got = f"{self._encoding.token(highest)!r}, which is token {highest}"
            raise InvalidArgument(name, f"must hold tokens 0 to {self._limits.vocab_size - 1}, got {got}")

    def finalize(self) -> None:
        if self._grammars is not None:
            self._grammars.close()
        self._heartbeat.close()

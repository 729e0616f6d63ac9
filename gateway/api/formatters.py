"""Format the responses of POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from clients.wire.completion import Completion
from contract.generation import FinishReason, Sections, TokenDelta, ToolCallDelta
from gateway.api.schemas import ChatRequest, CompletionRequest, is_whole
from gateway.api.sse import Formatter
from gateway.tools.vocabulary import Vocabulary


class ChatFormatter(Formatter):
    operation = "chat"
    schema = ChatRequest
    prefix = "chatcmpl"
    objects = ("chat.completion", "chat.completion.chunk")

    def __init__(self, request: ChatRequest, request_id: str, created_s: int, vocabulary: Vocabulary) -> None:
        super().__init__(request, request_id, created_s, vocabulary)
        self._calls: dict[int, dict[int, list[str]]] = {}  # the parts of each call's arguments, by choice and call

    def first_chunk(self, choice: int) -> dict[str, Any] | None:
        return self._delta(choice, {"role": "assistant", "content": ""}, None, None)

    def chunk(self, choice: int, delta: TokenDelta) -> dict[str, Any] | None:
        reason = self._reason(choice, delta)
        added: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.sections is not None:
            added |= self._parts(delta.sections)
        if not added and not reason and not delta.log_probs:
            return None
        return self._delta(choice, added, self.logprobs(delta), reason)

    def _choice(self, choice: int, completion: Completion) -> dict[str, Any]:
        message, reason = self._message(completion), self._reason(choice, completion)
        return {"index": choice, "message": message, "logprobs": self.logprobs(completion), "finish_reason": reason}

    def _message(self, completion: Completion) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
        if completion.sections is not None:
            message |= self._parts(completion.sections)
            for call in message.get("tool_calls", ()):
                del call["index"]
            message["content"] = completion.text or None
        return message

    def _parts(self, sections: Sections) -> dict[str, Any]:
        """Return the fields of what is no content."""
        parts: dict[str, Any] = {}
        if sections.reasoning and self.request.include_reasoning is not False:
            parts["reasoning_content"] = sections.reasoning
        if sections.tool_calls:
            parts["tool_calls"] = [_tool_call(call) for call in sections.tool_calls]
        return parts

    def _reason(self, choice: int, output: TokenDelta | Completion) -> str | None:
        for call in output.sections.tool_calls if output.sections is not None else ():
            self._calls.setdefault(choice, {}).setdefault(call.index, []).append(call.arguments)
        calls = self._calls.get(choice, {}).values()
        if output.finish_reason is FinishReason.STOP and calls and all(is_whole("".join(parts)) for parts in calls):
            return "tool_calls"
        return output.finish_reason.value if output.finish_reason else None

    def _delta(self, choice: int, delta: dict, logprobs: dict | None, reason: str | None) -> dict[str, Any]:
        return self._chunk({"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason})

    def logprobs(self, output: TokenDelta | Completion) -> dict[str, Any] | None:
        """Return the log probabilities of an output, None if they are not requested."""
        if not self.request.logprobs:
            return None
        content = []
        for index, token_id in enumerate(output.token_ids[: len(output.log_probs)]):
            top = output.top_log_probs[index] if index < len(output.top_log_probs) else ()
            candidates = [self._token(other, log_prob) for other, log_prob in top]
            content.append({**self._token(token_id, output.log_probs[index]), "top_logprobs": candidates})
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, log_prob: float) -> dict[str, Any]:
        text, data = self._vocabulary.token(token_id)
        return {"token": text, "logprob": log_prob, "bytes": data}


def _tool_call(call: ToolCallDelta) -> dict[str, Any]:
    """Return a call, or what is added to one, as OpenAI writes it."""
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


class CompletionFormatter(Formatter):
    operation = "text_completion"
    schema = CompletionRequest
    prefix = "cmpl"
    objects = ("text_completion", "text_completion")

    def __init__(self, request: CompletionRequest, request_id: str, created_s: int, vocabulary: Vocabulary) -> None:
        super().__init__(request, request_id, created_s, vocabulary)
        self._offsets: dict[int, int] = defaultdict(int)  # characters that have begun in the text of a choice so far

    def chunk(self, choice: int, delta: TokenDelta) -> dict[str, Any] | None:
        if not delta.text and not delta.finish_reason and not delta.log_probs:
            return None
        return self._chunk(self._choice(choice, delta))

    def _choice(self, choice: int, output: TokenDelta | Completion) -> dict[str, Any]:
        logprobs = None if self.request.logprobs is None else self._logprobs(choice, output)
        reason = output.finish_reason.value if output.finish_reason else None
        return {"text": output.text, "index": choice, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, choice: int, output: TokenDelta | Completion) -> dict[str, Any]:
        ids = output.token_ids[: len(output.log_probs)]
        tokens = [self._vocabulary.token(token_id)[0] for token_id in ids]
        log_probs: list[float | None] = list(output.log_probs)
        candidates = [self._candidates(top) for top in output.top_log_probs]
        if self.request.echo and tokens and choice not in self._offsets:
            log_probs[0] = None  # nothing precedes the prompt's first token
        offsets = [self._offset(choice, token_id) for token_id in ids]
        return {
            "tokens": tokens,
            "token_logprobs": log_probs,
            "top_logprobs": candidates or None,
            "text_offset": offsets,
        }

    def _offset(self, choice: int, token_id: int) -> int:
        """Return the place in the text where a token begins, which for a part of a character is that character's."""
        text, data = self._vocabulary.token(token_id)
        begun = self._offsets[choice]
        if data is None:
            self._offsets[choice] += len(text)
        elif self.request.skip_special_tokens is False or token_id not in self._vocabulary.special:
            begins = [byte & 0xC0 != 0x80 for byte in data]  # UTF-8: the others continue a character
            self._offsets[choice] += sum(begins)
            if begins and not begins[0]:
                return max(0, begun - 1)
        return begun

    def _candidates(self, top: Sequence[tuple[int, float]]) -> dict[str, float] | None:
        """Return a token's alternatives, of equal texts the likeliest; None for ids of -1, before the prompt."""
        return {self._vocabulary.token(other)[0]: log_prob for other, log_prob in reversed(top) if other >= 0} or None

"""Format the responses of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from clients.wire.completion import Completion
from contract.generation import FinishReason, Sections, TokenDelta, ToolCallDelta
from gateway.api.schemas import ChatRequest
from gateway.api.sse import Formatter
from gateway.api.tool_schemas import is_whole
from gateway.api.vocabulary import Vocabulary


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
        if sections.reasoning and self._request.include_reasoning is not False:
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
        if not self._request.logprobs:
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

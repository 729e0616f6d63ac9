"""Format the responses of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clients.wire.completion import Completion
from contract.generation import FinishReason, Sections, TokenDelta, ToolCallDelta
from gateway.api.schemas import ChatRequest
from gateway.api.tool_schemas import is_whole
from gateway.api.vocabulary import Vocabulary


class ChatFormatter:
    """Format one response. ``choice`` is the index of a generation among those of the request."""

    operation = "chat"
    schema = ChatRequest

    def __init__(self, request: ChatRequest, request_id: str, created_s: int, vocabulary: Vocabulary) -> None:
        self._request, self._vocabulary = request, vocabulary
        self._head = {"id": f"chatcmpl-{request_id}", "created": created_s, "model": request.model}
        self._calls: dict[int, dict[int, list[str]]] = {}  # the parts of each call's arguments, by choice and call

    def first_chunk(self, choice: int) -> dict[str, Any] | None:
        """Return the chunk that precedes the first text, if there is one."""
        return self._chunk(choice, {"role": "assistant", "content": ""}, None, None)

    def chunk(self, choice: int, delta: TokenDelta) -> dict[str, Any] | None:
        """Return what a delta adds; None if it adds nothing visible."""
        reason = self._reason(choice, delta)
        added: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.sections is not None:
            added |= self._parts(delta.sections)
        if not added and not reason and not delta.log_probs:
            return None
        return self._chunk(choice, added, self.logprobs(delta), reason)

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage}

    def response(self, completions: Sequence[Completion], usage: dict[str, Any]) -> dict[str, Any]:
        choices = [
            {
                "index": choice,
                "message": self._message(completion),
                "logprobs": self.logprobs(completion),
                "finish_reason": self._reason(choice, completion),
            }
            for choice, completion in enumerate(completions)
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage}

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

    def _chunk(self, choice: int, delta: dict, logprobs: dict | None, reason: str | None) -> dict[str, Any]:
        choices = [{"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}]
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        return {**chunk, "usage": None} if self._request.include_usage else chunk

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

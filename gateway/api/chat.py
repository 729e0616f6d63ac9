"""POST /v1/chat/completions: what its answers look like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clients.wire.completion import Completion
from contract.generation import TokenDelta
from gateway.api.schemas import ChatRequest
from gateway.api.vocabulary import Vocabulary


class Chat:
    """The form of one answer. ``choice`` is the place of a generation among those of the request."""

    operation = "chat"
    schema = ChatRequest

    def __init__(self, asked: ChatRequest, request_id: str, created_s: int, vocabulary: Vocabulary) -> None:
        self._asked, self._vocabulary = asked, vocabulary
        self._head = {"id": f"chatcmpl-{request_id}", "created": created_s, "model": asked.model}

    def first_chunk(self, choice: int) -> dict[str, Any] | None:
        """What is sent before the first text."""
        return self._chunk(choice, {"role": "assistant", "content": ""}, None, None)

    def chunk(self, choice: int, delta: TokenDelta) -> dict[str, Any] | None:
        """What a delta adds, None for one that adds nothing to be seen."""
        reason = delta.finish_reason.value if delta.finish_reason else None
        if not delta.text and not reason and not delta.log_probs:
            return None
        return self._chunk(choice, {"content": delta.text} if delta.text else {}, self._logprobs(delta), reason)

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage}

    def whole(self, answers: Sequence[Completion], usage: dict[str, Any]) -> dict[str, Any]:
        choices = [
            {
                "index": choice,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": self._logprobs(answer),
                "finish_reason": answer.finish_reason.value if answer.finish_reason else None,
            }
            for choice, answer in enumerate(answers)
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage}

    def _chunk(self, choice: int, delta: dict, logprobs: dict | None, reason: str | None) -> dict[str, Any]:
        choices = [{"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}]
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        return {**chunk, "usage": None} if self._asked.include_usage else chunk

    def _logprobs(self, seen: TokenDelta | Completion) -> dict[str, Any] | None:
        if not self._asked.logprobs:
            return None
        content = []
        for place, token_id in enumerate(seen.token_ids[: len(seen.log_probs)]):
            likeliest = seen.top_log_probs[place] if place < len(seen.top_log_probs) else ()
            top = [self._token(other, log_prob) for other, log_prob in likeliest]
            content.append({**self._token(token_id, seen.log_probs[place]), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, log_prob: float) -> dict[str, Any]:
        text, data = self._vocabulary.token(token_id)
        return {"token": text, "logprob": log_prob, "bytes": data}

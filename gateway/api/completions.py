"""Format the responses of POST /v1/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from clients.wire.completion import Completion
from contract.generation import TokenDelta
from gateway.api.schemas import CompletionRequest
from gateway.api.sse import Formatter
from gateway.api.vocabulary import Vocabulary


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
        logprobs = None if self._request.logprobs is None else self._logprobs(choice, output)
        reason = output.finish_reason.value if output.finish_reason else None
        return {"text": output.text, "index": choice, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, choice: int, output: TokenDelta | Completion) -> dict[str, Any]:
        ids = output.token_ids[: len(output.log_probs)]
        tokens = [self._vocabulary.token(token_id)[0] for token_id in ids]
        log_probs: list[float | None] = list(output.log_probs)
        candidates = [self._candidates(top) for top in output.top_log_probs]
        if self._request.echo and tokens and choice not in self._offsets:
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
        elif self._request.skip_special_tokens is False or token_id not in self._vocabulary.special:
            begins = [byte & 0xC0 != 0x80 for byte in data]  # UTF-8: the others continue a character
            self._offsets[choice] += sum(begins)
            if begins and not begins[0]:
                return max(0, begun - 1)
        return begun

    def _candidates(self, top: Sequence[tuple[int, float]]) -> dict[str, float] | None:
        """Return the alternatives of a token; None for the prompt's first one, whose ids are -1.

        Of alternatives with the same text the likeliest, which comes first, is returned.
        """
        return {self._vocabulary.token(other)[0]: log_prob for other, log_prob in reversed(top) if other >= 0} or None

"""How many tokens a prompt has, before an engine counts them: what budgets reserve and the fair queue charges.

With the served model's tokenizer prompts are counted. Without it, and for prompts beyond ``MOST_COUNTED`` bytes, tokens
are estimated from the bytes by their kind, times a factor that is learned for each tenant from settled requests: it
rises at once with a prompt that has more tokens than estimated, and falls slowly.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cachetools import LRUCache

from contract.errors import InvalidArgument
from contract.generation import GenerationRequest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_LOG = logging.getLogger(__name__)
TEMPLATE_TOKENS = 16  # what a chat template may add to a message, and to the whole
COUNTED_AT_ONCE = 512  # bytes that are tokenized on the event loop; longer prompts go to a thread
MOST_COUNTED = 256 * 1024  # bytes; a longer prompt is estimated
COUNTING_S = 0.5  # a count that is not there by then is an estimate
_THREADS = 2
_PART = 16 * 1024
_START = 1.15  # the factor before anything was settled
_MARGIN = 1.1
_LEAST_LEARNED = 64.0  # estimated tokens; of shorter prompts the chat template is too large a part
_TENANTS = 4096
_MISMATCHES = 3

# Tokens per byte by kind, on the high side for today's vocabularies. Words that never end (base64, hex, random letters)
# are not in any vocabulary.
_LOWER = b"abcdefghijklmnopqrstuvwxyz \n\t\r"
_UPPER = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_HIGH = bytes(range(128, 256))
_SPACES = b" \n\t\r"
_LONGEST_WORDS = 12.0


class PromptCount(NamedTuple):
    """tokens: to reserve. least: no fewer, whatever the chat template does. likely: the best guess. size: of the text
    in tokens, counted if ``exact``, else by its bytes before the factor. extra: part of ``tokens`` that was learned."""

    tokens: int
    least: int
    likely: int
    size: float
    exact: bool
    extra: float = 0.0


class Need(NamedTuple):
    """What the choices of one caller may use together, each prompt once. counts: by request."""

    tokens: int
    least: int
    counts: tuple[PromptCount, ...]


def prompt_of(request: GenerationRequest) -> object:
    """Return the object that all choices of one prompt share: identity tells prompts apart."""
    if request.input_ids is not None:
        return request.input_ids
    return request.text_input if request.messages is None else request.messages


def texts_of(request: GenerationRequest) -> list[str]:
    """Return the texts of a prompt, without what a chat template adds."""
    if request.messages is None:
        return [request.text_input or ""]
    # Templates trim what stands around a message.
    texts = [str(message.get("content") or "").strip() for message in request.messages]
    texts += [str(message["tool_calls"]) for message in request.messages if message.get("tool_calls")]
    return [request.tools, *texts] if request.tools else texts


def size_by_bytes(texts: Sequence[str]) -> tuple[float, int]:
    """Return (tokens by the kinds of bytes, bytes)."""
    size, length = 0.0, 0
    # In parts, so that another thread gets its turn in between.
    for part in (text[start : start + _PART] for text in texts for start in range(0, len(text), _PART)):
        data = part.encode(errors="surrogatepass")
        length += len(data)
        high = 0 if part.isascii() else len(data) - len(data.translate(None, _HIGH))
        lower = len(data) - len(data.translate(None, _LOWER))
        upper = len(data) - len(data.translate(None, _UPPER))
        spaces = len(data) - len(data.translate(None, _SPACES))
        endless = lower - spaces > _LONGEST_WORDS * (spaces + 1)
        size += lower * (0.5 if endless else 0.25) + upper + 0.5 * high + 0.75 * (len(data) - lower - upper - high)
    return size, length


@lru_cache(maxsize=64)  # models
def load_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer.json without its truncation and padding. Raises InvalidArgument."""
    from tokenizers import Tokenizer  # 30 MB of memory, only where a tokenizer is configured

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as exc:  # the library raises nothing more specific
        raise InvalidArgument("TRIDENT_GATEWAY_TOKENIZER", f"must be a tokenizer.json, got {path}: {exc}") from exc
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class PromptTokens:
    """tokenizer: the served model's, or None. ``need`` on one event loop; ``close`` ends its threads."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(_THREADS, "prompt-tokens") if tokenizer is not None else None
        self._factors: LRUCache[str, float] = LRUCache(_TENANTS)
        self._mean = 0.0  # tokens per estimated token over all tenants, 0 until something was settled
        self._template_extra = 0.0  # beyond TEMPLATE_TOKENS, as a default system prompt is
        self._mismatches = 0
        self._late: list[Future[int]] = []  # counts whose callers gave up and that still take a thread

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def need(self, requests: Sequence[GenerationRequest], tenant: str) -> Need:
        """Return what ``requests`` may use: each prompt once, and ``max_tokens`` of every choice."""
        counts: dict[int, PromptCount] = {}
        for request in requests:
            if id(prompt_of(request)) not in counts:
                counts[id(prompt_of(request))] = await self._count(request, tenant)
        most = sum(request.max_tokens for request in requests)
        each = counts.values()
        return Need(
            sum(count.tokens for count in each) + most,
            sum(count.least for count in each) + most,
            tuple(counts[id(prompt_of(request))] for request in requests),
        )

    def estimate(self, request: GenerationRequest, tenant: str = "") -> PromptCount:
        """Estimate a prompt without the tokenizer."""
        if request.input_ids is not None:
            count = len(request.input_ids)
            return _truncated(request, count, count, count, count, True)
        texts, overhead = texts_of(request), _overhead(request)
        size, length = size_by_bytes(texts)
        factor = self._factor(tenant)
        # No token is shorter than a byte.
        tokens = math.ceil(min(factor * size, length) + overhead + self._template_extra)
        likely = math.ceil(min(factor / _MARGIN * size, length))
        return _truncated(request, tokens, min(1, length), likely, size, False)

    def learn(self, tenant: str, count: PromptCount, input_tokens: int) -> None:
        """Correct later estimates: the engine counted ``input_tokens`` where ``count`` was expected."""
        if count.exact:
            if count.tokens > count.size:  # else there is no template, or the prompt was truncated
                self._compare(count, input_tokens)
            return
        if count.size < _LEAST_LEARNED:
            return
        ratio, pace = input_tokens / count.size, min(0.2, count.size / 5000)
        known, seen = self._factor(tenant), ratio * _MARGIN
        self._factors[tenant] = max(seen, known + pace * (seen - known))
        self._mean += (pace if self._mean else 1.0) * (ratio - self._mean)

    def _compare(self, count: PromptCount, input_tokens: int) -> None:
        """Learn what the template adds, and whether the tokenizer is the engine's at all."""
        if count.size >= 256 and not 0.7 * count.size <= input_tokens <= 1.3 * count.size + 1024:
            self._mismatches += 1
            if self._mismatches == _MISMATCHES:
                problem = "prompt tokens are estimated from now on: the tokenizer is not the served model's"
                _LOG.warning("%s; counted %d, the engine %d", problem, count.size, input_tokens)
            return
        if self._mismatches < _MISMATCHES:
            self._mismatches = 0
        extra = max(0.0, input_tokens - (count.tokens - count.extra))
        self._template_extra = max(extra, 0.98 * self._template_extra + 0.02 * extra)

    async def _count(self, request: GenerationRequest, tenant: str) -> PromptCount:
        texts = texts_of(request)
        length = sum(map(len, texts))
        if request.input_ids is not None:
            return self.estimate(request)
        if length > MOST_COUNTED:
            return await asyncio.to_thread(self.estimate, request, tenant)
        if self._threads is None or self._mismatches >= _MISMATCHES:
            return self.estimate(request, tenant)
        if length <= COUNTED_AT_ONCE:
            size = self._tokens(texts)
        else:
            self._late = [counting for counting in self._late if not counting.done()]
            if len(self._late) >= _THREADS:
                return self.estimate(request, tenant)
            counting = self._threads.submit(self._tokens, texts)
            try:
                size = await asyncio.wait_for(asyncio.wrap_future(counting), COUNTING_S)
            except asyncio.TimeoutError:
                if not counting.cancelled():
                    self._late.append(counting)
                return self.estimate(request, tenant)
        tokens = math.ceil(size + _overhead(request) + self._template_extra)
        return _truncated(request, tokens, size, size, size, True)._replace(extra=self._template_extra)

    def _tokens(self, texts: Sequence[str]) -> int:
        assert self._tokenizer is not None
        # JSON can hold lone surrogates, which a tokenizer does not take; the replica refuses them.
        whole = (text.encode(errors="replace").decode() for text in texts)
        # Of all its methods only those for batches let other threads run meanwhile.
        return sum(len(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]) for text in whole)

    def _factor(self, tenant: str) -> float:
        return self._factors.get(tenant) or (self._mean * _MARGIN or _START)


def _truncated(
    request: GenerationRequest, tokens: int, least: int, likely: int, size: float, exact: bool
) -> PromptCount:
    """Return the count of a prompt of which the replica keeps ``truncate_prompt_tokens``; -1: as many as fit."""
    most = request.truncate_prompt_tokens
    if most is None or most < 1:
        return PromptCount(tokens, least if most is None else min(1, least), likely, size, exact)
    return PromptCount(min(tokens, most), min(least, most), min(likely, most), size, exact)


def _overhead(request: GenerationRequest) -> int:
    return TEMPLATE_TOKENS * (1 + len(request.messages or ()))

"""Answers to prompts that were asked in other words. Off unless an embedding model is configured.

Only the last user turn of a chat is matched by its meaning; the rest of the request, the tenant and the engine are
the same (request_key). A match needs three things: the sentences are alike to the embedding model, the wording allows
it (paraphrase), and words that stand for each other are alike to the model as well. Which requests take part is said
by ``exclusion``: deterministic ones, whose caller has not opted out by header and which no rule keeps away.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from cachetools import LRUCache
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from contract.errors import InvalidArgument
from contract.generation import GenerationRequest
from gateway.cache import paraphrase
from gateway.cache.embedding import EmbeddingThread, NoResult, model_folder
from gateway.cache.paraphrase import Gist
from gateway.cache.request_key import deterministic, request_key
from gateway.cache.response_cache import Answer, answer_bytes, whole
from gateway.config.settings import Settings, variable

if TYPE_CHECKING:
    from gateway.cache.sentence_encoder import SentenceEncoder

HEADER = "x-trident-cache"
WORD_THRESHOLD = 0.85  # of two words that stand for each other; see docs/decisions/0014
MAX_CHARACTERS = 1000  # of a last turn; longer ones are documents, of which a vector knows too little
MAX_CANDIDATES = 32  # whose wording is compared, some 5 µs each
MAX_REMEMBERED = 1024  # texts that were looked up and may be put
LOOKUP_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)
_MAX_AGE = re.compile(r"(?:^|[,\s])max-age=(\d{1,9})(?:$|[,\s])")


@dataclass(frozen=True)
class Hit:
    """An answer that was given to another wording. headers: what the response says of it."""

    answer: Answer
    similarity: float
    age_s: float

    @property
    def headers(self) -> dict[str, str]:
        return {HEADER: "semantic", f"{HEADER}-similarity": f"{self.similarity:.4f}", "age": str(int(self.age_s))}


@dataclass(frozen=True)
class Understood:
    """A prompt's meaning. vector: f32[dimensions], of length 1."""

    gist: Gist
    vector: np.ndarray


@dataclass(eq=False)
class Entry:
    scope: str
    text: str
    understood: Understood
    answer: Answer
    kept_s: float
    used_s: float

    @property
    def bytes(self) -> int:
        return answer_bytes(self.answer) + self.understood.vector.nbytes + 4 * len(self.text) + 1000


class Shelf:
    """One tenant's entries: at most so many and so many bytes, the least recently used leave first."""

    def __init__(self, max_entries: int, max_bytes: int, dimensions: int) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._entries: list[Entry] = []
        self._vectors = np.empty((min(16, max_entries), dimensions), np.float32)
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def alike(self, scope: str, vector: np.ndarray, threshold: float) -> list[tuple[float, Entry]]:
        """(similarity, entry) of ``scope``, the most alike first."""
        scores = self._vectors[: len(self._entries)] @ vector
        near = np.flatnonzero(scores >= threshold)
        near = near[np.argsort(-scores[near], kind="stable")]
        return [(float(scores[row]), self._entries[row]) for row in near if self._entries[row].scope == scope]

    def add(self, entry: Entry, expired_before_s: float) -> bool:
        """Takes the place of an entry of the same text. False for what is larger than all there is room for."""
        for row in range(len(self._entries) - 1, -1, -1):
            old = self._entries[row]
            if old.kept_s < expired_before_s or (old.scope == entry.scope and old.text == entry.text):
                self._remove(row)
        if entry.bytes > self._max_bytes:
            return False
        while len(self._entries) >= self._max_entries or self.bytes + entry.bytes > self._max_bytes:
            self._remove(min(range(len(self._entries)), key=lambda row: self._entries[row].used_s))
        if len(self._entries) == len(self._vectors):
            more = min(self._max_entries, 2 * len(self._vectors)) - len(self._vectors)
            self._vectors = np.concatenate([self._vectors, np.empty((more, self._vectors.shape[1]), np.float32)])
        self._vectors[len(self._entries)] = entry.understood.vector
        self._entries.append(entry)
        self.bytes += entry.bytes
        return True

    def _remove(self, row: int) -> None:
        self.bytes -= self._entries[row].bytes
        last = self._entries.pop()
        if row < len(self._entries):
            self._entries[row], self._vectors[row] = last, self._vectors[len(self._entries)]


class SemanticCache:
    """``get`` before the engine is asked, ``put`` with what it said; never with what ``get`` gave, so that answers do
    not wander from wording to wording.

    threshold: cosine, of the sentences. ttl_s: how old an answer may be. max_entries, max_bytes: of one tenant.
    timeout_s: a lookup that takes longer is a miss. exclude: a regular expression; prompts in which it is found take
    no part. clock: seconds. Neither method raises.
    """

    def __init__(
        self,
        thread: EmbeddingThread,
        *,
        threshold: float,
        ttl_s: float,
        max_entries: int,
        max_bytes: int,
        timeout_s: float,
        exclude: str,
        clock: Callable[[], float],
        registry: CollectorRegistry,
    ) -> None:
        if not 0.0 < threshold <= 1.0:
            raise InvalidArgument("threshold", f"got {threshold!r}; allowed is a number in (0, 1]")
        for name, value in (("ttl_s", ttl_s), ("max_entries", max_entries), ("max_bytes", max_bytes)):
            if not value > 0:
                raise InvalidArgument(name, f"got {value!r}; allowed is more than 0")
        self._thread, self._clock = thread, clock
        self._threshold, self._ttl_s, self._timeout_s = threshold, ttl_s, timeout_s
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._exclude = rule(exclude)
        self._shelves: dict[str, Shelf] = {}
        self._remembered: LRUCache[tuple[str, str], Understood] = LRUCache(MAX_REMEMBERED)
        prefix = "trident_gateway_semantic_cache"
        self._lookups = Counter(f"{prefix}_lookups", "hit, miss, late or excluded", ("result",), registry=registry)
        self._excluded = Counter(f"{prefix}_excluded", "Took no part, by reason", ("reason",), registry=registry)
        self._seconds = Histogram(f"{prefix}_lookup_seconds", "Of a lookup", buckets=LOOKUP_S, registry=registry)
        entries = Gauge(f"{prefix}_entries", "Answers that are kept", registry=registry)
        entries.set_function(lambda: sum(map(len, self._shelves.values())))
        size = Gauge(f"{prefix}_bytes", "What they take", registry=registry)
        size.set_function(lambda: sum(shelf.bytes for shelf in self._shelves.values()))

    async def get(self, request: GenerationRequest, tenant: str, engine: str, carrier: Mapping[str, str]) -> Hit | None:
        """carrier: the caller's headers or metadata, keys in lower case."""
        wishes = Wishes.read(carrier)
        reason = exclusion(request, wishes, self._exclude) or ("" if wishes.read_age_s > 0 else "header")
        if reason:
            self._excluded.labels(reason).inc()
            self._lookups.labels("excluded").inc()
            return None
        with self._seconds.time():
            try:
                max_age_s = min(self._ttl_s, wishes.read_age_s)
                result, hit = await asyncio.wait_for(self._found(request, tenant, engine, max_age_s), self._timeout_s)
            except (NoResult, asyncio.TimeoutError):
                result, hit = "late", None
        self._lookups.labels(result).inc()
        return hit

    async def put(
        self, request: GenerationRequest, tenant: str, engine: str, answer: Answer, carrier: Mapping[str, str]
    ) -> bool:
        """Keeps a whole answer of the engine; False for others and for what takes no part."""
        if not whole(answer) or exclusion(request, Wishes.read(carrier), self._exclude):
            return False
        scope, text = place(request, tenant, engine)
        try:
            understood = await asyncio.wait_for(self._understood(scope, text), self._timeout_s)
        except (NoResult, asyncio.TimeoutError):
            return False
        if understood is None:
            return False
        shelf = self._shelves.get(tenant)
        if shelf is None:
            dimensions = self._thread.encoder.dimensions
            shelf = self._shelves[tenant] = Shelf(self._max_entries, self._max_bytes, dimensions)
        now_s = self._clock()
        return shelf.add(Entry(scope, text, understood, answer, now_s, now_s), now_s - self._ttl_s)

    def close(self) -> None:
        self._thread.close()

    async def _found(
        self, request: GenerationRequest, tenant: str, engine: str, max_age_s: float
    ) -> tuple[str, Hit | None]:
        scope, text = place(request, tenant, engine)
        understood = await self._understood(scope, text)
        if understood is None:
            self._excluded.labels("unreadable").inc()
            return "excluded", None
        shelf, now_s = self._shelves.get(tenant), self._clock()
        if shelf is None:
            return "miss", None
        for similarity, entry in shelf.alike(scope, understood.vector, self._threshold)[:MAX_CANDIDATES]:
            if now_s - entry.kept_s >= max_age_s:
                continue
            pairs = paraphrase.exchanged(understood.gist, entry.understood.gist)
            if pairs is not None and (not pairs or await self._thread.run(_Alike(pairs))):
                entry.used_s = now_s
                return "hit", Hit(entry.answer, similarity, now_s - entry.kept_s)
        return "miss", None

    async def _understood(self, scope: str, text: str) -> Understood | None:
        """None if the model cannot read the text. Remembered by scope, so that how long it takes tells a tenant
        nothing about another one's texts. Raises NoResult."""
        known = self._remembered.get((scope, text))
        if known is None:
            known = await self._thread.run(_Understand(text))
            if known is not None:
                self._remembered[scope, text] = known
        return known


def configured(settings: Settings, clock: Callable[[], float], registry: CollectorRegistry) -> SemanticCache | None:
    """The cache that the settings ask for, its model loaded; None without a model.

    Raises InvalidArgument that names the variable.
    """
    if not settings.semantic_model:
        return None
    from gateway.cache.sentence_encoder import SentenceEncoder  # OpenVINO and what it brings, for those who ask for it

    try:
        return SemanticCache(
            EmbeddingThread(SentenceEncoder(model_folder(settings.semantic_model))),
            threshold=settings.semantic_threshold,
            ttl_s=settings.semantic_ttl_s,
            max_entries=settings.semantic_max_entries,
            max_bytes=settings.semantic_max_bytes,
            timeout_s=settings.semantic_timeout_s,
            exclude=settings.semantic_exclude,
            clock=clock,
            registry=registry,
        )
    except InvalidArgument as exc:
        raise InvalidArgument(variable(f"semantic_{exc.field}"), exc.problem) from exc


@dataclass(frozen=True)
class _Understand:
    text: str

    def __call__(self, encoder: SentenceEncoder) -> Understood | None:
        token_ids = encoder.token_ids(self.text)
        return Understood(paraphrase.gist(self.text), encoder.embed(token_ids)) if token_ids else None


@dataclass(frozen=True)
class _Alike:
    """Whether the words of every pair mean the same."""

    pairs: tuple[tuple[str, str], ...]

    def __call__(self, encoder: SentenceEncoder) -> bool:
        for pair in self.pairs:
            ids = [encoder.token_ids(word) for word in pair]
            if not all(ids) or float(encoder.embed(ids[0]) @ encoder.embed(ids[1])) < WORD_THRESHOLD:
                return False
        return True


@dataclass(frozen=True)
class Wishes:
    """What the caller's headers say: ``x-trident-cache: off`` and ``cache-control: no-store`` take no part,
    ``no-cache`` takes no answer but may leave one, ``max-age=N`` takes none older than N seconds."""

    part: bool = True
    read_age_s: float = float("inf")

    @classmethod
    def read(cls, carrier: Mapping[str, str]) -> Wishes:
        control = carrier.get("cache-control", "").lower()
        words = {word.strip() for word in control.split(",")}
        part = carrier.get(HEADER, "").strip().lower() not in ("off", "false", "no", "0") and "no-store" not in words
        found = _MAX_AGE.search(control)
        age_s = float(found[1]) if found else float("inf")
        return cls(part, 0.0 if "no-cache" in words else age_s)


def exclusion(request: GenerationRequest, wishes: Wishes, rule: re.Pattern | None) -> str:
    """Why a request takes no part, one of a few words; empty if it does."""
    if not wishes.part:
        return "header"
    if not deterministic(request):
        return "sampled"
    if not request.messages:
        return "completion"  # it goes on from the very words
    if request.sampling.log_probs or request.echo:
        return "prompt_in_answer"
    last = request.messages[-1]
    text = last.get("content")
    if last.get("role") != "user" or not isinstance(text, str) or not text.strip():
        return "last_turn"
    if len(text) > MAX_CHARACTERS:
        return "long"
    if rule is not None and rule.search(text):
        return "rule"
    if paraphrase.of_the_moment(text):
        return "of_the_moment"
    return ""


def place(request: GenerationRequest, tenant: str, engine: str) -> tuple[str, str]:
    """(everything that must be equal, as a key; the text that is matched by its meaning)."""
    assert request.messages
    *earlier, last = request.messages
    rest = dataclasses.replace(request, messages=(*earlier, {**last, "content": ""}))
    return request_key(rest, tenant, engine), last["content"]


def rule(pattern: str) -> re.Pattern | None:
    """Raises InvalidArgument ``exclude`` for what is no regular expression."""
    try:
        return re.compile(pattern, re.IGNORECASE) if pattern else None
    except re.error as exc:
        raise InvalidArgument("exclude", f"got {pattern!r}; it is no regular expression: {exc}") from exc

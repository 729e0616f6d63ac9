"""Record requests for samples and checks: gathered on the event loop; checked, redacted and written by a thread."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from clients.wire.connection import new_request_id
from contract.errors import Cancelled, NotFound, Overloaded, TridentError, Unavailable
from contract.generation import GenerationRequest, Guide, TokenDelta
from contract.redaction import PATTERNS, redact
from gateway.config.samples import REFUSALS, CheckRules, SampleRules
from gateway.config.settings import Settings
from gateway.request_context import RequestContext
from gateway.samples import checks
from gateway.samples.store import HELD, KEPT, SampleStore

NO_STORE = "x-trident-no-store"  # header of a caller whose request is neither kept nor checked
FLUSH_S, ROUND_S = 0.25, 30.0
QUEUE_CHARACTERS, QUEUE_LENGTH = 16 * 1024 * 1024, 10_000
MAX_RATING = 64  # feedback that is being stored
RATINGS, LOSSES = ("up", "down"), ("queue", "rate", "size", "disk", "deleted", "failed")
_LOG = logging.getLogger(__name__)


@dataclass
class Recording:
    """What one generation adds."""

    samples: Samples
    context: RequestContext
    request: Mapping[str, Any]  # what of it a sample holds; empty if none is kept
    guide: Guide | None
    checked: bool  # whether its answer is
    arrived_s: float  # wall clock
    choice: int = 0
    parts: list[str] = field(default_factory=list)
    size: int = 0  # of the parts, in characters
    end: Mapping[str, Any] = field(default_factory=dict)  # pool, reason, times and tokens; empty for a refused request
    error: TridentError | None = None
    pair: Mapping[str, str] | None = None

    def observe(self, delta: TokenDelta) -> None:
        """Take over a response. What is larger than a sample may be is cut here, and not kept."""
        if self.size <= self.samples.rules.sample_characters:
            self.parts.append(delta.text)
            self.size += len(delta.text)

    def put(self, pool: str = "", output: str | None = None) -> None:
        """Hand the ended generation to the thread. output: of its copy at ``pool``; None where there is none."""
        if output is not None:
            self.pair = {"pool": pool, "output": output}
            self.size += len(output)
        self.samples.put(self)


class Samples:
    """The samples and checks of one process, once ``change`` gives rules. Raises: InvalidArgument (folder, keys)."""

    def __init__(self, settings: Settings, registry: CollectorRegistry, rng: random.Random | None = None) -> None:
        folder = settings.samples
        self.store = SampleStore(folder, settings.samples_keys) if folder is not None else None
        self.rules = SampleRules()
        self._active, self._keyless = False, False
        self._given: tuple[SampleRules | None, bool, str] = (None, False, "")
        self._rng = rng or random.Random()
        self._drift, self._drifted = checks.Drift(CheckRules()), set[tuple[str, str]]()
        self._queued: list[Recording] = []
        self._queued_size, self._rating = 0, 0
        self._minutes: dict[str, tuple[int, int]] = {}  # by tenant, the minute and its samples
        self._queue_lock, self._flushing = threading.Lock(), threading.Lock()
        self._closing, self._scored = threading.Event(), set[tuple[str, str, str]]()
        self._thread: threading.Thread | None = None
        self._registry, own = registry, CollectorRegistry()
        text = "Samples by what became of them: kept, held for a rating, none of the rules matched"
        self._samples = Counter("trident_gateway_samples", text, ("result",), registry=own)
        text = f"Samples that were lost: {', '.join(LOSSES)}"
        self._lost = Counter("trident_gateway_samples_lost", text, ("reason",), registry=own)
        self._feedback = Counter("trident_gateway_feedback", "Ratings of requests", ("rating",), registry=own)
        text, place = f"Checked answers by what was found: {', '.join(checks.FINDINGS)}", ("model", "pool")
        self._findings = Counter("trident_gateway_quality_answers", text, (*place, "finding"), registry=own)
        text = "Checked answers by language or script"
        self._languages = Counter("trident_gateway_quality_languages", text, (*place, "language"), registry=own)
        text, buckets = "Tokens of checked answers", tuple(2**power for power in range(15))
        self._lengths = Histogram("trident_gateway_quality_length", text, place, buckets=buckets, registry=own)
        text = "How far a window's answers are from those before it: population stability index of a feature"
        self._index = Gauge("trident_gateway_quality_drift", text, (*place, "feature"), registry=own)
        self._metrics = own

    def change(self, rules: SampleRules | None, keyless: bool, opted_in: Iterable[str]) -> None:
        """Apply rules to later requests, and log what is kept. opted_in: the tenants whose requests may be."""
        tenants = ", ".join(["all callers"] * rules.keyless if keyless and rules else sorted(opted_in))
        if (given := (rules, keyless, tenants)) == self._given:
            return
        self._given = given
        self._active, self.rules, self._keyless = rules is not None, rules or SampleRules(), keyless
        if rules is None:
            _LOG.info("samples: nothing is kept or checked any more")
            return
        if self.store is not None and rules.keeps and tenants:
            secret = "encrypted" if self.store.encrypted else "NOT ENCRYPTED"
            text = f"prompts and answers of {tenants} are kept in {self.store.folder}, redacted and {secret}"
            _LOG.info("samples: %s, for %g days", text, rules.days)
        else:
            _LOG.info("samples: no text is kept; answers are %s", "checked" if rules.checks else "not checked")
        if rules.checks is not None:
            self._drift.rules = rules.checks
        if self._thread is None:
            self._registry.register(self._metrics)
            for name in RATINGS:  # rates need the series before its first increment
                self._feedback.labels(name)
            for name in LOSSES:
                self._lost.labels(name)
            self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
            self._thread.start()

    def begin(self, request: GenerationRequest, context: RequestContext, began_s: float) -> Recording | None:
        """Return what records a generation, None if it is neither kept nor checked. began_s: ``time.monotonic()``."""
        if not self._active or context.carrier.get(NO_STORE, "false").strip().lower() not in ("false", "0"):
            return None
        rules, tenant = self.rules, context.tenant
        opted_in = rules.keyless if self._keyless else tenant.samples
        kept = _kept(request) if self.store is not None and rules.keeps and opted_in else {}
        checked = rules.checks is not None and self._rng.random() < rules.checks.fraction
        if not (kept or checked):
            return None
        arrived_s = time.time() - (time.monotonic() - began_s)
        return Recording(self, context, kept, request.guide, checked, arrived_s)

    def refused(
        self, requests: Sequence[GenerationRequest], context: RequestContext, error: TridentError, began_s: float
    ) -> None:
        """Record requests that were refused before generation. began_s: as of ``begin``."""
        reason = "failure" if error.http_status > Cancelled.http_status else "refused"
        for choice, request in enumerate(requests if reason in self.rules.keep else ()):
            recording = self.begin(request, context, began_s)
            if recording is not None:
                recording.choice, recording.error = choice, error
                recording.put()

    def put(self, recording: Recording) -> None:
        """Queue a recording for the thread; never blocks."""
        size = recording.size + _characters(recording.request)
        if recording.request and size > self.rules.sample_characters:
            self._lost.labels("size").inc()
            recording.request, size = {}, recording.size
        with self._queue_lock:
            full = self._queued_size + size > QUEUE_CHARACTERS or len(self._queued) >= QUEUE_LENGTH
            if not full:
                self._queued.append(recording)
                self._queued_size += size
        if full:
            self._lost.labels("queue").inc()

    async def rate(self, tenant: str, feedback: dict[str, Any]) -> dict[str, Any]:
        """Store feedback; return it as stored. Raises: NotFound (of a sample), Overloaded, InvalidArgument."""
        if self.store is None or not self._active:
            raise NotFound("this gateway keeps no samples that could be rated")
        if self._rating >= MAX_RATING:
            raise Overloaded("too much feedback at once", 1.0)
        self._rating += 1
        try:
            stored = await asyncio.to_thread(self._rate, self.store, tenant, feedback)
            if stored is None:  # another process may not have written it yet
                await asyncio.sleep(2 * FLUSH_S)
                stored = await asyncio.to_thread(self._rate, self.store, tenant, feedback)
        finally:
            self._rating -= 1
        if stored is None:
            choice = "" if feedback["choice"] is None else f" and the choice {feedback['choice']}"
            raise NotFound(f"no sample of yours has the id {feedback['request_id']:.200}{choice}")
        if stored["time"] == feedback["time"]:
            self._feedback.labels(stored["rating"]).inc()
        return stored

    def _rate(self, store: SampleStore, tenant: str, feedback: dict[str, Any]) -> dict[str, Any] | None:
        self.flush()
        return store.rate(tenant, feedback | {"comment": self._redacted(feedback["comment"])}, self.rules)

    async def close(self) -> None:
        """Write what is queued and end the thread."""
        self._closing.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        round_s = 0.0
        while not self._closing.wait(FLUSH_S):
            if self._queued:
                self.flush()
            if time.monotonic() >= round_s:
                round_s = time.monotonic() + min(ROUND_S, self._drift.rules.window_s / 4)
                self._round()
        self.flush()

    def _round(self) -> None:
        """Remove what is too old, and say how far answers have drifted."""
        try:
            if self.store is not None and self._active:
                self.store.purge(self.rules, time.time())
        except Unavailable as exc:
            _LOG.error("samples: what is too old was not removed: %s", exc)
        with self._flushing:
            scores = list(self._drift.scores()) if self.rules.checks is not None else []
        for model, pool, feature, score in scores:
            self._index.labels(model, pool, feature).set(score)
        self._drifted = {(model, pool) for model, pool, _, score in scores if score >= self._drift.rules.drift}
        scored = {(model, pool, feature) for model, pool, feature, _ in scores}
        for gone in self._scored - scored:
            self._index.remove(*gone)
        self._scored = scored

    def flush(self) -> None:
        """Check, redact and write what is queued."""
        with self._flushing:
            with self._queue_lock:
                taken, self._queued, self._queued_size = self._queued, [], 0
            written: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
            for recording in taken:
                try:
                    kind, sample = self._sample(recording)
                    if kind:
                        written[recording.context.tenant.name, kind].append(sample)
                except Exception:  # an operator's function or pattern, and no other sample may suffer
                    self._lost.labels("failed").inc()
                    _LOG.error("samples: a sample could not be made", exc_info=True)
            for (tenant, kind), samples in written.items():
                assert self.store is not None, "nothing is kept without it"
                try:
                    deleted = self.store.append(tenant, kind, samples, self.rules)
                except Unavailable as exc:
                    self._lost.labels("disk").inc(len(samples))
                    _LOG.error("samples: %d could not be written: %s", len(samples), exc)
                    continue
                self._lost.labels("deleted").inc(deleted)
                self._samples.labels(kind).inc(len(samples) - deleted)

    def _sample(self, recording: Recording) -> tuple[str, dict[str, Any]]:
        """Check an answer, and return where its sample goes, "" for nowhere, and the sample."""
        rules, context, end = self.rules, recording.context, recording.end
        output, language, found = "".join(recording.parts), "", ""
        if end.get("finish_reason"):
            refusals = rules.checks.refusals if rules.checks is not None else REFUSALS
            guide = recording.guide if len(output) <= rules.sample_characters else None  # it was cut
            found, language = checks.finding(output, guide, refusals), checks.language(output)
            if recording.checked:
                model, pool = context.model.name, end["pool"]
                for one in checks.FINDINGS:
                    self._findings.labels(model, pool, one).inc(one == found)
                self._languages.labels(model, pool, language).inc()
                self._lengths.labels(model, pool).observe(end["output_tokens"])
                self._drift.add(model, pool, end["output_tokens"], language, found)
        if not recording.request:
            return "", {}
        reasons = self._reasons(recording, found)
        kind = KEPT if reasons else HELD if {*RATINGS}.intersection(rules.keep) and end.get("finish_reason") else ""
        if not kind:
            self._samples.labels("none").inc()
            return "", {}
        if kind == KEPT and not self._within_rate(context.tenant.name):
            self._lost.labels("rate").inc()
            return "", {}
        pair = {"pair": recording.pair} if recording.pair else {}
        return kind, {
            "id": new_request_id(),
            "time": recording.arrived_s,
            "request_id": context.request_id,
            "choice": recording.choice,
            "tenant": context.tenant.name,
            "operation": context.operation,
            "model": context.model.name,
            "error": type(recording.error).__name__ if recording.error else "",
            **end,
            **self._redacted({**recording.request, "output": output, **pair}),
            "language": language,
            "finding": found,
            "reasons": reasons,
        }

    def _reasons(self, recording: Recording, found: str) -> list[str]:
        """Return why the rules keep a request; none for one that they do not keep."""
        rules, end, error = self.rules, recording.end, recording.error
        drifted = (recording.context.model.name, end.get("pool", "")) in self._drifted
        status = error.http_status if error is not None else Cancelled.http_status  # the caller left: no fault
        holds = {
            "failure": status > Cancelled.http_status,
            "refused": status < Cancelled.http_status,
            "length": end.get("finish_reason") == "length",
            "drift": drifted and bool(found),
            "pair": recording.pair is not None,
            found: bool(found),
        }
        limits = {"ttft_s": rules.ttft_s, "duration_s": rules.duration_s}
        slow = any(limit is not None and (end.get(name) or 0.0) > limit for name, limit in limits.items())
        reasons = [name for name, held in holds.items() if held and name in rules.keep] + ["slow"] * slow
        return reasons or ["fraction"] * (self._rng.random() < rules.fraction)

    def _within_rate(self, tenant: str) -> bool:
        minute = int(time.monotonic() / 60)
        latest, count = self._minutes.get(tenant, (minute, 0))
        self._minutes[tenant] = (minute, count + 1 if latest == minute else 1)
        return self._minutes[tenant][1] <= self.rules.per_minute

    def _redacted(self, value: Any) -> Any:
        """Return a value with all texts in it redacted."""
        if isinstance(value, str):
            text = redact(value, {**PATTERNS, **self.rules.patterns})
            return self.rules.redact(text) if self.rules.redact is not None else text
        if isinstance(value, Mapping):
            return {key: self._redacted(inner) for key, inner in value.items()}
        return [self._redacted(inner) for inner in value] if isinstance(value, list | tuple) else value


def _kept(request: GenerationRequest) -> dict[str, Any]:
    """Return what a sample holds of a request; None is left out, and so are token ids, which cannot be redacted."""
    sampling = request.sampling
    fields = {name: getattr(request, name) for name in ("text_input", "messages", "tools", "max_tokens")}
    fields |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
    fields["guide"] = vars(request.guide) if request.guide is not None else None
    return {name: value for name, value in fields.items() if value is not None}


def _characters(value: Any) -> int:
    """Return the characters of all texts in a value, and a few for each number."""
    if isinstance(value, str):
        return len(value)
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else None
    return sum(map(_characters, inner)) if inner is not None else 8

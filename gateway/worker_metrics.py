"""One metrics page of the pages of several workers.

Samples are added up by the text of their names and labels, which all workers write alike: prometheus_client's parser
takes 25 times as long, on the event loop that admits requests, and contract/prometheus.py drops HELP and TYPE.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client.utils import floatToGoString

_PREFIX = "trident_gateway_"
# What all workers see alike; everything else is added up.
_OF_REPLICAS = ("healthy", "waiting", "kv_usage_ratio", "slots", "tokens_per_second", "seconds")
_OTHERS = ("breaker_state", "pool_", "quality_drift", "queue_depth", "cost_total", "release_", "budget_used_ratio")
_SAME = tuple(_PREFIX + name for name in (*(f"replica_{name}" for name in _OF_REPLICAS), *_OTHERS))
_EACH = tuple(f"{_PREFIX}pool_{name}_total" for name in ("calls", "refusals", "tokens"))
_PER_TOKEN = f"{_PREFIX}cost_per_1000_tokens"


@dataclass
class _Family:
    """Lines of one metric. comments: HELP and TYPE. samples: values by name and labels, as they are written."""

    comments: list[str] = field(default_factory=list)
    samples: dict[str, float] = field(default_factory=dict)

    @property
    def counts(self) -> bool:
        """Whether it is a counter or a histogram."""
        return any(line.startswith("# TYPE ") and line.endswith((" counter", " histogram")) for line in self.comments)


_Page = dict[str, _Family]


class WorkerMetrics:
    """Add up pages. Counters of workers that have ended stay in the sum, or it would look like a restart."""

    def __init__(self) -> None:
        self._ended: _Page = {}
        self._latest: dict[int, _Page] = {}
        self._up: dict[int, bool] = {}

    def read(self, worker: int, page: str | None) -> None:
        """Take over the latest page of a worker; None: it does not answer, and its page before stands."""
        self._up[worker] = page is not None
        if page is not None:
            self._latest[worker] = _parsed(page)

    def end(self, worker: int) -> None:
        """Keep the counters of a worker that has ended."""
        self._up[worker] = False
        summed = _sum((self._ended, self._latest.pop(worker, {})))
        self._ended = {name: family for name, family in summed.items() if family.counts}

    def page(self) -> bytes:
        """Return the page of all workers."""
        up = f"{_PREFIX}worker_up"
        lines = [f"# HELP {up} 1 if the worker answers; else its figures are old.", f"# TYPE {up} gauge"]
        lines += [f'{up}{{worker="{worker}"}} {float(answers)}' for worker, answers in sorted(self._up.items())]
        for family in _sum((self._ended, *self._latest.values())).values():
            lines += family.comments
            lines += [f"{series} {floatToGoString(value)}" for series, value in family.samples.items()]
        return "\n".join([*lines, ""]).encode()


def _parsed(page: str) -> _Page:
    """Return the families of a page in prometheus_client's text format, by name."""
    families: _Page = {}
    family = _Family()
    for line in page.split("\n"):  # not splitlines: a label may have other line ends
        if line.startswith("#"):
            family = families.setdefault(line.split(" ", 3)[2], _Family())
            family.comments.append(line)
        elif line:
            series, _, value = line.rpartition(" ")
            family.samples[series] = float(value)
    return families


def _sum(pages: Iterable[_Page]) -> _Page:
    merged: _Page = {}
    for page in pages:
        for name, family in page.items():
            samples = merged.setdefault(name, _Family(family.comments)).samples
            for series, value in family.samples.items():
                known = samples.get(series)
                samples[series] = value if known is None else _together(series.partition("{")[0], known, value)
    return merged


def _together(name: str, one: float, other: float) -> float:
    if name == _PER_TOKEN:  # the same cost by the tokens of each
        return 1 / (1 / one + 1 / other) if one and other else one or other
    if name.endswith("_created"):
        return min(one, other)
    if name.startswith(_SAME) and not name.startswith(_EACH):
        return max(one, other)
    return one + other

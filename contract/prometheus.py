"""Read the Prometheus text format: what every server and gateway here reports, and what their readers parse."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_SAMPLE = re.compile(r'([A-Za-z_:][\w:]*)(?:\{((?:\s*\w+="(?:[^"\\]|\\.)*"\s*,?)*)\})?\s+(\S+)(?:\s+-?\d+)?\s*')
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")


@dataclass(frozen=True)
class Metrics:
    """The samples of one scrape: by metric name, in the order of the text, (labels, value)."""

    samples: Mapping[str, list[tuple[dict[str, str], float]]] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.samples

    def matching(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        """Yield the samples of ``name`` that have all of ``labels``."""
        required = labels.items()
        return ((found, value) for found, value in self.samples.get(name, ()) if required <= found.items())

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the matching samples; 0 if there is none."""
        return sum(value for _, value in self.matching(name, **labels))

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Return the sums of the samples of ``name`` by the value of one label, "" where it is missing."""
        sums: dict[str, float] = {}
        for labels, value in self.matching(name):
            key = labels.get(label, "")
            sums[key] = sums.get(key, 0.0) + value
        return sums


def parse(text: str, prefixes: tuple[str, ...] = ("",)) -> Metrics:
    """Parse a scrape, or what of it begins with ``prefixes``; the rest costs little. Raises ValueError: no sample."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in text.split("\n"):  # a label may hold other line ends
        if not line.startswith(prefixes) or not line.strip() or line.startswith("#"):
            continue
        found = _SAMPLE.fullmatch(line)
        if found is None:
            raise ValueError(f"not a Prometheus sample: {line[:200]!r}")
        name, labels, value = found.groups()
        pairs = {label: _unescaped(raw) for label, raw in _LABEL.findall(labels or "")}
        samples.setdefault(name, []).append((pairs, float(value)))
    return Metrics(samples)


def _unescaped(value: str) -> str:
    if "\\" not in value:
        return value
    return _ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], value)

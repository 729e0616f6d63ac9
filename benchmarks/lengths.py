"""Distributions of prompt and answer lengths in tokens: fixed, log-normal, or a recorded histogram."""

from __future__ import annotations

import csv
import json
import math
import random
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from contract.errors import InvalidArgument

MOST, MOST_SIGMA = 1_000_000, 10.0
# What reading numbers of a malformed file raises: OverflowError for 1e400, RecursionError for JSON nested too deeply.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, csv.Error)
FORMS = "N, lognormal:MEDIAN,SIGMA[,MAX] or histogram:FILE"


class Lengths(Protocol):
    @property
    def most(self) -> int:
        """The longest that may be drawn."""

    def draw(self, rng: random.Random) -> int:
        """Return a number of tokens, at least 1."""


@dataclass(frozen=True)
class Fixed:
    tokens: int

    @property
    def most(self) -> int:
        return self.tokens

    def draw(self, rng: random.Random) -> int:
        return self.tokens

    def __str__(self) -> str:
        return f"{self.tokens} tokens"


@dataclass(frozen=True)
class LogNormal:
    """exp of a normal with mean ln(median) and deviation sigma, clipped to 1 … most."""

    median: float
    sigma: float
    most: int = MOST

    def draw(self, rng: random.Random) -> int:
        return min(self.most, max(1, round(rng.lognormvariate(math.log(self.median), self.sigma))))

    def __str__(self) -> str:
        return f"log-normal, median {self.median:g} tokens, sigma {self.sigma:g}"


@dataclass(frozen=True)
class Histogram:
    """Draw each length as often as it was counted."""

    lengths: tuple[int, ...]
    counts: tuple[float, ...]

    @property
    def most(self) -> int:
        return max(self.lengths)

    def draw(self, rng: random.Random) -> int:
        return rng.choices(self.lengths, self.counts)[0]

    def __str__(self) -> str:
        return f"histogram of {len(self.lengths)} lengths, {min(self.lengths)} to {max(self.lengths)} tokens"


def parse(text: str, field: str) -> Lengths:
    """Parse the command line's form. Raises InvalidArgument for ``field``."""
    kind, _, rest = text.partition(":")
    if kind.isdecimal() and not rest and len(kind) <= 9 and 1 <= int(kind) <= MOST:
        return Fixed(int(kind))
    if kind == "lognormal" and rest.count(",") in (1, 2):
        with suppress(ValueError):
            median, sigma, most, *_ = (*map(float, rest.split(",")), MOST)
            if 1 <= median <= MOST and 0 <= sigma <= MOST_SIGMA and 1 <= most <= MOST:
                return LogNormal(median, sigma, int(most))
    if kind == "histogram" and rest:
        return read_histogram(Path(rest), field)
    bounds = f"lengths from 1 to {MOST:,}, SIGMA from 0 to {MOST_SIGMA:g}"
    raise InvalidArgument(field, f"must be {FORMS}, {bounds}, got {text!r}")


def read_histogram(path: Path, field: str) -> Histogram:
    """Read JSON ``{"lengths": […], "counts": […]}`` or CSV lines ``tokens,count`` (a header is skipped). Raises
    InvalidArgument for ``field``."""
    text = read_text(path, field)
    try:
        if path.suffix == ".json":
            table = json.loads(text)
            lengths, counts = table["lengths"], table["counts"]
        else:
            rows = [row for row in csv.reader(text.splitlines()) if row]
            if rows and rows[0][0].strip().isalpha():
                rows = rows[1:]
            lengths, counts = [int(row[0]) for row in rows], [float(row[1]) for row in rows]
        if len(lengths) != len(counts) or not lengths:
            raise ValueError(f"{len(lengths)} lengths and {len(counts)} counts")
        whole = all(isinstance(n, int) and 1 <= n <= MOST for n in lengths)
        if not whole or not all(c >= 0 for c in counts) or not 0 < sum(counts) < math.inf:
            allowed = f"lengths must be whole numbers from 1 to {MOST:,}"
            raise ValueError(f"{allowed}; counts must be finite, not negative and not all 0")
        return Histogram(tuple(lengths), tuple(map(float, counts)))
    except MALFORMED as exc:
        form = 'JSON {"lengths": [...], "counts": [...]} or CSV lines tokens,count'
        raise InvalidArgument(field, f"must have {form}, got {path}: {exc}") from exc


def read_text(path: Path, field: str) -> str:
    """Read a file. Raises InvalidArgument for ``field``."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as exc:
        raise InvalidArgument(field, f"must name a file that can be read, got {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise InvalidArgument(field, f"must name a file of UTF-8 text, got {path}: {exc}") from exc

"""Byte n-gram models with interpolated smoothing: what a language model has to beat before it may say it learnt much.

Order k means that a byte is predicted from the k bytes before it, so order 5 counts 6-byte strings. Two smoothings:
interpolated Kneser-Ney (Chen and Goodman 1999, one discount per order, lower orders from continuation counts) and
Witten-Bell (Bell, Cleary and Witten 1990, method C). A document is its bytes and one NUL that ends it; before its
first byte stand k NULs. Strings of up to 8 bytes are held as big-endian integers in sorted arrays.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

KNESER_NEY, WITTEN_BELL = "kneser_ney", "witten_bell"
SMOOTHINGS = (KNESER_NEY, WITTEN_BELL)
MAX_ORDER = 6  # order + 1 bytes must fit an int64 with its sign bit unused


def grams(document: bytes, order: int) -> np.ndarray:
    """i64[len(document) + 1]: for each byte of the document and its final NUL, the byte and the `order` before it."""
    padded = np.frombuffer(bytes(order) + document + b"\0", dtype=np.uint8).astype(np.int64)
    length = len(document) + 1
    codes = np.zeros(length, dtype=np.int64)
    for offset in range(order + 1):
        codes = (codes << 8) | padded[offset : offset + length]
    return codes


@dataclass(frozen=True)
class Level:
    """The counts of one order. `codes` are strings of order + 1 bytes, `contexts` the same without the last byte."""

    codes: np.ndarray  # i64[n], sorted
    counts: np.ndarray  # i64[n]
    contexts: np.ndarray  # i64[m], sorted
    totals: np.ndarray  # i64[m], sum of the counts under each context
    successors: np.ndarray  # i64[m], number of distinct bytes seen after each context
    discount: float

    @classmethod
    def of(cls, codes: np.ndarray, counts: np.ndarray) -> "Level":
        contexts, first = np.unique(codes >> 8, return_index=True)
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        discount = once / (once + 2 * twice) if once and twice else 0.5  # a tiny text may lack either
        successors = np.diff(np.append(first, len(codes)))
        return cls(codes, counts, contexts, np.add.reduceat(counts, first), successors, discount)


def looked_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """values[i] where keys[i] == wanted, else 0; keys are sorted."""
    index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[index] == wanted, values[index], 0)


class ByteNgram:
    """A model of bytes trained on documents; raises ValueError for an order or smoothing it does not have."""

    def __init__(self, documents: Iterable[bytes], order: int, smoothing: str = KNESER_NEY) -> None:
        if not 0 <= order <= MAX_ORDER:
            raise ValueError(f"order: {order}, allowed are 0 to {MAX_ORDER}")
        if smoothing not in SMOOTHINGS:
            raise ValueError(f"smoothing: {smoothing!r}, allowed are {', '.join(SMOOTHINGS)}")
        self.order = order
        self.smoothing = smoothing
        strings = np.concatenate([grams(document, order) for document in documents])
        codes, counts = np.unique(strings, return_counts=True)
        levels = [Level.of(codes, counts)]
        for lower in range(order - 1, -1, -1):
            suffixes = codes & ((1 << (8 * (lower + 1))) - 1)
            # Kneser-Ney counts in how many contexts a string was seen, Witten-Bell how often.
            weights = np.ones_like(counts) if smoothing == KNESER_NEY else counts
            codes, inverse = np.unique(suffixes, return_inverse=True)
            counts = np.bincount(inverse, weights=weights).astype(np.int64)
            levels.insert(0, Level.of(codes, counts))
        self.levels = tuple(levels)  # by order, from 0

    def probabilities(self, codes: np.ndarray) -> np.ndarray:
        """f64[n]: for i64[n] strings of order + 1 bytes, the probability of the last given the others."""
        probability = np.full(len(codes), 1 / 256)
        for lower, level in enumerate(self.levels):
            string = codes & ((1 << (8 * (lower + 1))) - 1)
            count = looked_up(level.codes, level.counts, string)
            total = looked_up(level.contexts, level.totals, string >> 8)
            successors = looked_up(level.contexts, level.successors, string >> 8)
            if self.smoothing == KNESER_NEY:
                numerator = np.maximum(count - level.discount, 0) + level.discount * successors * probability
                denominator = total
            else:
                numerator, denominator = count + successors * probability, total + successors
            probability = np.where(total > 0, numerator / np.maximum(denominator, 1), probability)
        return probability

    def bits(self, document: bytes) -> float:
        """Bits needed to code the document and its end."""
        return float(-np.log2(self.probabilities(grams(document, self.order))).sum())

"""Measure detokenizing: microseconds per token and chunks per second, by tokenizer family.

    python -m benchmarks.detokenizer [--tokenizer PATH] [--tokens N]

For every family (or the given tokenizer) a text of N tokens is decoded one token at a time, as an engine streams it,
eight at a time, and one at a time with four stop strings that do not occur. The fourth column is the library's
``decode`` of all tokens at once, the fifth what a token costs if all text so far is decoded anew for it, measured
from the 500th to the 1,000th. CPU time of one thread, the best of five runs, which a busy machine disturbs little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.tokenizer_families import FAMILIES, TEXTS
from python_backends.detokenizer.decoding import Decoding
from python_backends.detokenizer.stop import StopStrings
from python_backends.detokenizer.stream import TextStream

STOPS = ("</answer>", "\nUser:", "\n\n\n\n\n", "<|end|>")
PREFIXES = range(500, 1000)


def best_s(work: Callable[[], object], runs: int = 5) -> float:
    times = []
    for _ in range(runs):
        started = time.thread_time()
        work()
        times.append(time.thread_time() - started)
    return min(times)


def decode(decoding: Decoding, ids: Sequence[int], chunk: int, stops: StopStrings) -> None:
    stream = TextStream(decoding, stops)
    for start in range(0, len(ids), chunk):
        stream.feed(ids[start : start + chunk])
    stream.finish()


def decode_every_prefix(tokenizer: Tokenizer, ids: Sequence[int]) -> None:
    for end in PREFIXES:
        tokenizer.decode(ids[:end])


def row(name: str, tokenizer: Tokenizer, tokens: int) -> str:
    text_ids = tokenizer.encode("\n".join(TEXTS), add_special_tokens=False).ids
    ids = (text_ids * (tokens // len(text_ids) + 1))[:tokens]
    decoding = Decoding.from_tokenizer(tokenizer)
    no_stops, stops = StopStrings(), StopStrings(STOPS)
    one = best_s(lambda: decode(decoding, ids, 1, no_stops))
    eight = best_s(lambda: decode(decoding, ids, 8, no_stops))
    stopping = best_s(lambda: decode(decoding, ids, 1, stops))
    whole = best_s(lambda: tokenizer.decode(ids))
    prefixes = best_s(lambda: decode_every_prefix(tokenizer, ids), runs=1)
    per_token = [1e6 * seconds / tokens for seconds in (one, eight, stopping, whole)]
    columns = [f"{cost:9.2f}" for cost in per_token] + [f"{1e6 * prefixes / len(PREFIXES):11.1f}"]
    return f"{name:34}" + "".join(columns) + f"{tokens / one:12,.0f}{tokens / 8 / eight:12,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="measure detokenizing by tokenizer family")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json instead of the families")
    parser.add_argument("--tokens", type=int, default=20_000)
    options = parser.parse_args()
    print(f"{'':34}{'µs per token':>36}{'':11}{'chunks per s':>24}")
    print(f"{'family':34}{'by 1':>9}{'by 8':>9}{'stops':>9}{'decode':>9}{'prefixes':>11}{'by 1':>12}{'by 8':>12}")
    if options.tokenizer is not None:
        print(row(options.tokenizer.stem, Tokenizer.from_file(str(options.tokenizer)), options.tokens))
        return
    for name, build in FAMILIES.items():
        print(row(name, build(), options.tokens))


if __name__ == "__main__":
    main()

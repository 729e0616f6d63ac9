"""Measure prompt encoding: microseconds per token and prompts per second, by tokenizer family.

    python -m benchmarks.tokenizer [--tokenizer PATH] [--tokens N]

For every family (or the given tokenizer) a short prompt, one of N tokens and one of ten times N are encoded as the
ensemble's tokenizer does it. CPU time of one thread, the best of five runs, which a busy machine disturbs little.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.tokenizer_families import FAMILIES, TEXTS

SHORT = 16
RUNS = 5


def best_s(tokenizer: Tokenizer, text: str) -> float:
    """Return the CPU seconds of one encoding."""
    times = []
    for _ in range(RUNS):
        repeats = max(1, 20_000 // max(1, len(text)))
        started = time.thread_time()
        for _ in range(repeats):
            tokenizer.encode(text)
        times.append((time.thread_time() - started) / repeats)
    return min(times)


def text_of(tokenizer: Tokenizer, tokens: int) -> str:
    """Return about ``tokens`` tokens of the families' texts."""
    text = "\n".join(TEXTS)
    per_token = len(text) / max(1, len(tokenizer.encode(text).ids))
    length = max(1, round(tokens * per_token))
    return (text * (length // len(text) + 1))[:length]


def row(name: str, tokenizer: Tokenizer, tokens: int) -> str:
    cells = []
    for size in (SHORT, tokens, 10 * tokens):
        text = text_of(tokenizer, size)
        spent = best_s(tokenizer, text)
        cells.append(f"{1e6 * spent / max(1, len(tokenizer.encode(text).ids)):10.2f}{1 / spent:12,.0f}")
    return f"{name:34}" + "".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description="measure prompt encoding by tokenizer family")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json instead of the families")
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    sizes = (SHORT, options.tokens, 10 * options.tokens)
    print(f"{'':34}" + "".join(f"{f'{size} tokens':>22}" for size in sizes))
    print(f"{'family':34}" + f"{'µs/token':>10}{'prompts/s':>12}" * len(sizes))
    if options.tokenizer is not None:
        print(row(options.tokenizer.stem, Tokenizer.from_file(str(options.tokenizer)), options.tokens))
        return
    for name, build in FAMILIES.items():
        print(row(name, build(), options.tokens))


if __name__ == "__main__":
    main()

"""Rows of token ids through the compiled model, rows of similar length together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import openvino as ov

from python_backends.encoder.tokens import Row

STEP = 8  # lengths are padded to a multiple of it, so that few different shapes occur
MOST_PADDING = 0.15  # of a batch's tokens, beside PASS_TOKENS
PASS_TOKENS = 32  # what a forward pass costs beside its tokens, in tokens


class Forward:
    """One compiled model; ``run`` blocks and is not safe for threads."""

    def __init__(
        self, folder: Path, properties: Mapping[str, str], max_rows: int, max_tokens: int, max_seq_len: int
    ) -> None:
        """max_rows, max_tokens: of one forward pass, padding included. max_seq_len: of a row."""
        compiled = ov.Core().compile_model(folder / "openvino_model.xml", "CPU", dict(properties))
        self._request = compiled.create_infer_request()
        self._token_types = any("token_type_ids" in port.names for port in compiled.inputs)
        self._max_rows, self._max_tokens, self._max_seq_len = max_rows, max_tokens, max_seq_len

    def run(self, rows: Sequence[Row], on_batch: Callable[[int, int], None] = lambda rows, tokens: None) -> np.ndarray:
        """Return f32[n, d], or f32[n] of a reranker, in the order of ``rows``, which are not empty. on_batch: called
        after each forward pass with its rows and tokens, padding included."""
        result: np.ndarray | None = None
        for batch in packed([len(row.ids) for row in rows], self._max_rows, self._max_tokens):
            length = min(-(-len(rows[batch[-1]].ids) // STEP) * STEP, max(self._max_seq_len, len(rows[batch[-1]].ids)))
            ids, mask, types = (np.zeros((len(batch), length), np.int64) for _ in range(3))
            for place, number in enumerate(batch):
                row = rows[number]
                ids[place, : len(row.ids)], mask[place, : len(row.ids)] = row.ids, 1
                types[place, : len(row.ids)] = row.types
            inputs = {"input_ids": ids, "attention_mask": mask}
            outputs = self._request.infer(inputs | ({"token_type_ids": types} if self._token_types else {}))
            made = next(iter(outputs.values()))
            if result is None:
                result = np.empty((len(rows), *made.shape[1:]), np.float32)
            result[batch] = made
            on_batch(len(batch), length * len(batch))
        assert result is not None, "no rows"
        return result


def packed(lengths: Sequence[int], max_rows: int, max_tokens: int) -> list[list[int]]:
    """Return the indices of all lengths in batches, shortest first.

    A batch has at most ``max_rows`` rows and, padded to its longest, ``max_tokens`` tokens, or is one row. Its padding
    is at most a part of its tokens: on a CPU a computed token costs as much in a large batch as in a small one.
    """
    batches: list[list[int]] = []
    tokens = 0  # of the last batch, without padding
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[index]
        padded = -(-length // STEP) * STEP
        if batches and len(batches[-1]) < max_rows:
            computed = (len(batches[-1]) + 1) * padded
            if computed <= max_tokens and computed - tokens - length <= PASS_TOKENS + (tokens + length) * MOST_PADDING:
                batches[-1].append(index)
                tokens += length
                continue
        batches.append([index])
        tokens = length
    return batches

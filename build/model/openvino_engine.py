"""A CPU engine's logits at every position, in the arithmetic it will serve with: what the quality gate measures.

The compiled graph is the one the server loads, opened with the properties of the manifest. A text is fed in pieces, so
that later tokens attend to keys and values read back from the cache in its own precision, as they will when serving.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import openvino as ov

from contract.errors import EngineFailed

PIECE_TOKENS = 128
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


def save(model: ov.Model, folder: Path) -> None:
    """Write openvino_model.xml and openvino_model.bin. Raises EngineFailed where the disk is full."""
    try:
        ov.save_model(model, str(folder / "openvino_model.xml"), compress_to_fp16=False)
    except RuntimeError as exc:  # iostream's words for a disk that is full are no help
        free = shutil.disk_usage(folder).free
        problem = f"{folder}: the model could not be written ({exc}); {free / 1e6:,.1f} MB of disk are free there"
        raise EngineFailed(problem) from exc


class OpenVinoEngine:
    """properties: OpenVINO's names and values. vocab_size: of the model; with adapters the graph has more logits."""

    def __init__(self, folder: Path, properties: Mapping[str, str], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        compiled = ov.Core().compile_model(folder / "openvino_model.xml", "CPU", dict(properties))
        self._inputs = {port.any_name for port in compiled.inputs}
        self._request = compiled.create_infer_request()
        self._read: list[int] = []

    def logits(self, blocks: np.ndarray) -> Iterator[np.ndarray]:
        """i64[n, t] token ids -> n times f32[t, vocab]: the logits after each position."""
        for ids in np.asarray(blocks):
            self._forget()
            pieces = range(0, len(ids), PIECE_TOKENS)
            yield np.concatenate([self._feed(ids[start : start + PIECE_TOKENS].tolist()) for start in pieces])

    def next_logits(self, ids: Sequence[int]) -> np.ndarray:
        """f32[vocab] after ``ids``; ids that go on where the last call ended are not read again."""
        known = len(self._read)
        if list(ids[:known]) != self._read or known == len(ids):
            self._forget()
            known = 0
        return self._feed(list(ids[known:]))[-1]

    def _feed(self, ids: list[int]) -> np.ndarray:
        """f32[len(ids), vocab]."""
        past, total = len(self._read), len(self._read) + len(ids)
        inputs = {
            "input_ids": np.asarray([ids], dtype=np.int64),
            "attention_mask": np.ones((1, total), dtype=np.int64),
            "position_ids": np.arange(past, total, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        known = {name: value for name, value in inputs.items() if name in self._inputs}  # not all have positions
        logits = self._request.infer(known)["logits"][0]
        self._read += ids
        return logits[:, : self._vocab_size].copy()  # the request writes the next call's into the same memory

    def _forget(self) -> None:
        self._request.reset_state()
        self._read = []

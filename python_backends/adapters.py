"""The LoRA adapters of an engine: how it is told which one a prompt uses, and their weights for TensorRT-LLM.

The id of the prompt's first token tells it. With V tokens and N adapters (numbered from 1; 0 is none) the first token t
of a prompt under adapter n is

    V + n - 1          where t is the engine's ``first_token_id``, with which chats, or all prompts, begin
    n * (V + N) + t    otherwise

Both are ids that no token has, so the prefix cache never shares blocks between adapters. Ids of the first form are
below the logits' V + N entries, which penalties on the prompt's ids need.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from contract.errors import InvalidArgument
from contract.manifest import EngineManifest

WEIGHTS_FILE, CONFIG_FILE = "model.lora_weights.npy", "model.lora_config.npy"
BF16 = np.dtype("V2")  # as TensorRT-LLM stores bfloat16 in .npy files, since numpy has no such type


@dataclass(frozen=True)
class AdapterIds:
    """The adapters of an engine. names: in the order of their numbers, from 1. first_token_id: -1 for none."""

    names: tuple[str, ...]
    vocab_size: int
    first_token_id: int

    @classmethod
    def from_manifest(cls, manifest: EngineManifest) -> AdapterIds:
        names = tuple(adapter.name for adapter in manifest.adapters)
        first_token_id = manifest.adapter_first_token_id
        return cls(names, manifest.vocab_size, -1 if first_token_id is None else first_token_id)

    def check(self, number: int) -> int:
        """Return ``number``. Raises InvalidArgument: the engine has no such adapter."""
        if 0 <= number <= len(self.names):
            return number
        raise InvalidArgument("lora_task_id", f"must be {self._allowed(numbers=True)}, got {number}")

    def number(self, name: str) -> int:
        """Return the number of the adapter ``name``. Raises InvalidArgument: the engine has no such adapter."""
        if name in self.names:
            return self.names.index(name) + 1
        raise InvalidArgument("lora_name", f"must be {self._allowed(numbers=False)}, got {name[:128]!r}")

    def name(self, number: int) -> str:
        """Return the adapter's name, empty for none."""
        return self.names[number - 1] if number else ""

    def _allowed(self, numbers: bool) -> str:
        if not self.names:
            return "left out or 0: this engine has no LoRA adapters" if numbers else "left out: this engine has none"
        listed = (f"{number} ({name})" if numbers else name for number, name in enumerate(self.names, 1))
        return f"{'0 (none)' if numbers else 'left out'} or one of {', '.join(listed)}"

    def mark(self, ids: np.ndarray, number: int) -> np.ndarray:
        """Return a prompt's ids (int64[n], n > 0) as the engine reads them under an adapter."""
        if not number:
            return ids
        first = int(ids[0])
        usual = first == self.first_token_id
        marked = self.vocab_size + number - 1 if usual else number * (self.vocab_size + len(self.names)) + first
        return np.concatenate([np.array([marked], ids.dtype), ids[1:]])

    def unmark(self, ids: np.ndarray) -> tuple[int, np.ndarray]:
        """Return the adapter's number and the prompt, the inverse of ``mark``."""
        number, row = divmod(int(ids[0]), self.vocab_size + len(self.names))
        if row >= self.vocab_size:
            number, row = row - self.vocab_size + 1, self.first_token_id
        return number, np.concatenate([np.array([row], ids.dtype), ids[1:]])


NO_ADAPTERS = AdapterIds((), 1, 0)


def adapter_folder(engine_dir: Path, number: int) -> Path:
    """Return the folder of the adapter ``number``, from 1."""
    return engine_dir / "adapters" / str(number)


def adapter_tensors(engine_dir: Path, number: int) -> dict[str, np.ndarray]:
    """Return ``lora_weights``, f16 or BF16 [1, matrices, width], and ``lora_config``, int32[1, matrices, 3], which
    build/package/gpu_adapters.py wrote."""
    folder = adapter_folder(engine_dir, number)
    weights = np.load(folder / WEIGHTS_FILE, mmap_mode="c")  # DLPack takes nothing that is read-only
    return {"lora_weights": weights, "lora_config": np.load(folder / CONFIG_FILE)}

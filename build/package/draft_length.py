"""How many draft tokens a step of a CPU engine verifies at most, chosen by timing such steps on this machine.

Every step of prompt lookup computes as many positions as it may draft, found or not. Eight cost little on processors
with 8-bit or 16-bit matrix instructions; on others such a step takes up to twice as long as one with three.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai

from build.base.architecture import Architecture
from build.package.tuning import LEAST_PARAMETERS, MOST_PARAMETERS
from build.recipe.recipe import Recipe
from contract.scheduling import BLOCK_TOKENS, SHARED_DRAFT

# A step with eight drafts made 1.2 times the tokens of one with three on passages of prose, and 2.2 times where a text
# repeats itself.
LONGER = 1.25
ROUNDS, STEPS = 4, 6
_PROMPT_TOKENS = 64


def measure(
    folder: Path, recipe: Recipe, properties: Mapping[str, str], arch: Architecture, notify: Callable[[str], None]
) -> dict[str, object] | None:
    """For the manifest: the length and the milliseconds of a step by length; None where there is nothing to choose."""
    spec = recipe.speculative_decoding
    if spec is None or spec.mode != "prompt_lookup" or spec.max_draft_len <= SHARED_DRAFT:
        return None
    if not LEAST_PARAMETERS <= arch.num_parameters() <= MOST_PARAMETERS:
        return None
    lengths = SHARED_DRAFT, spec.max_draft_len
    steps = _Steps(folder, properties, spec.ngram_size or 0)
    steps.take(SHARED_DRAFT)  # the first ones take longer
    taken: dict[int, list[float]] = {length: [] for length in lengths}
    for _ in range(ROUNDS):
        for length in lengths:
            taken[length] += steps.take(length)
    milliseconds = {length: round(1e3 * min(found), 2) for length, found in taken.items()}
    length = chosen(milliseconds)
    told = ", ".join(f"{ms:.1f} ms with {drafts}" for drafts, ms in milliseconds.items())
    notify(f"a step with draft tokens: {told}: {length} at most")
    return {"chosen": length, "step_ms": {str(drafts): ms for drafts, ms in milliseconds.items()}}


def chosen(milliseconds: Mapping[int, float]) -> int:
    """Return the longer of two lengths, unless a step with it takes too much longer."""
    short, long = sorted(milliseconds)
    return long if milliseconds[long] <= LONGER * milliseconds[short] else short


class _Steps:
    """A pipeline that drafts, whose steps are timed for one sequence. The prompts are ids drawn at random."""

    def __init__(self, folder: Path, properties: Mapping[str, str], ngram_size: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = 16 * _PROMPT_TOKENS // BLOCK_TOKENS
        options = {**properties, "prompt_lookup": True}
        self._pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", options)
        self._random = np.random.default_rng(0)
        self._ngram_size, self._number = ngram_size, 0

    def take(self, length: int) -> list[float]:
        """Return the seconds of steps with drafts of a length."""
        config = genai.GenerationConfig(
            max_new_tokens=STEPS * (length + 1) + 2, num_assistant_tokens=length, max_ngram_size=self._ngram_size
        )
        config.ignore_eos = True
        self._number += 1
        ids = self._random.integers(0, 256, (1, _PROMPT_TOKENS))
        handle = self._pipeline.add_request(self._number, ov.Tensor(ids), config)
        while not handle.can_read():
            self._pipeline.step()
        taken = [self._step_s() for _ in range(STEPS)]
        handle.cancel()
        self._pipeline.step()  # frees its blocks
        return taken

    def _step_s(self) -> float:
        began_s = time.perf_counter()
        self._pipeline.step()
        return time.perf_counter() - began_s

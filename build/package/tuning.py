"""The run-time settings of a CPU engine, chosen by measuring its steps on this machine.

What the plugin computes the same weights in changes speed by up to two times, and in the other direction on another
CPU. Each setting is opened as the server opens it, all in one process, and they take turns. The fastest one that passes
the quality gate is served; the figures of all are in the manifest under ``evaluation.tuning``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai

from build.package import compile_cpu
from build.recipe.recipe import Recipe
from python_backends.limits import BLOCK_TOKENS

STREAMS = (1, 8, 32)
PROMPT_TOKENS, ANSWER_TOKENS = 128, 64  # of the load whose tokens per second decide
# Beside the plugin's own: bf16 where the CPU has it, activations quantised by rows where that is faster.
SETTINGS: tuple[dict[str, str], ...] = ({"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "64"},)
WORTH = 1.03  # a setting's gain over the plugin's own below which it is noise
LEAST_PARAMETERS = 20_000_000  # below, a step is too short to be told from the next
MOST_PARAMETERS = 2_000_000_000  # beyond, measuring takes a laptop minutes: the plugin's own choice is served
ROUNDS = 3
STEPS = 8  # of a round, at each number of streams
_READ_TOKENS = 512


@dataclass
class Measured:
    """A setting with the seconds of its steps by streams, and of reading _READ_TOKENS of a prompt; empty: unmeasured"""

    properties: Mapping[str, str]
    steps_s: dict[int, list[float]] = field(default_factory=dict)
    reads_s: list[float] = field(default_factory=list)

    def tokens_per_s(self) -> dict[int, float]:
        """By streams, of a load with prompts of PROMPT_TOKENS and answers of ANSWER_TOKENS.

        From the fastest steps: others were kept waiting by what else uses the machine.
        """
        prompt_s = min(self.reads_s) * PROMPT_TOKENS / _READ_TOKENS
        steps = {streams: min(taken) for streams, taken in self.steps_s.items()}
        return {n: n * ANSWER_TOKENS / (n * prompt_s + ANSWER_TOKENS * step_s) for n, step_s in steps.items()}

    def words(self) -> str:
        """``INFERENCE_PRECISION_HINT=f32 DYNAMIC_QUANTIZATION_GROUP_SIZE=64``."""
        changed = [f"{name}={value}" for name, value in self.properties.items() if name != "KV_CACHE_PRECISION"]
        return " ".join(changed) or "the plugin's own"

    def record(self) -> dict[str, object]:
        """For the manifest."""
        speeds = {str(streams): round(speed, 1) for streams, speed in self.tokens_per_s().items()}
        return {"properties": dict(self.properties), "tokens_per_s": speeds}


def measure(folder: Path, recipe: Recipe, parameters: int, notify: Callable[[str], None]) -> list[Measured]:
    """Every setting worth serving the engine in ``folder`` with, the fastest first and the plugin's own last.

    An engine whose arithmetic is exact or whose weights leave no choice, or one too small or large to be measured, has
    the plugin's own alone.
    """
    own = compile_cpu.properties(recipe)
    found = [Measured(own)]
    exact = own.get("INFERENCE_PRECISION_HINT") == "f32"
    if exact or recipe.precision not in ("int8", "int4") or not LEAST_PARAMETERS <= parameters <= MOST_PARAMETERS:
        return found
    found += [Measured(own | changed) for changed in SETTINGS]
    notify(f"measuring {len(found)} run-time settings on this machine")
    opened = [_Steps(folder, recipe, each) for each in found]
    for number in range(ROUNDS):
        for steps in opened[number % len(opened) :] + opened[: number % len(opened)]:
            steps.round()
    for each in found:
        at = " / ".join(f"{speed:,.0f}" for speed in each.tokens_per_s().values())
        notify(f"  {at} tokens/s at {' / '.join(map(str, each.steps_s))} streams: {each.words()}")
    return ranked(found)


def ranked(found: list[Measured]) -> list[Measured]:
    """Those faster than the first in the geometric mean over the streams, the fastest first; then the first."""
    first = found[0].tokens_per_s()
    gains = [statistics.geometric_mean([v / first[n] for n, v in each.tokens_per_s().items()]) for each in found]
    order = sorted(range(1, len(found)), key=lambda n: -gains[n])
    return [*(found[n] for n in order if gains[n] >= WORTH), found[0]]


class _Steps:
    """A pipeline whose steps are timed. The prompts are ids drawn at random; no cache holds them."""

    def __init__(self, folder: Path, recipe: Recipe, into: Measured) -> None:
        self._into, self._next = into, 0
        self._levels = [streams for streams in STREAMS if streams <= recipe.max_batch_size]
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = self._levels[-1] * 4 + 2 * _READ_TOKENS // BLOCK_TOKENS
        scheduler.max_num_batched_tokens = _READ_TOKENS
        self._pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", dict(into.properties))
        self._random = np.random.default_rng(0)
        self._read()  # the first steps take longer

    def round(self) -> None:
        self._into.reads_s.append(self._read())
        live: list[genai.GenerationHandle] = []
        for streams in self._levels:
            live += [self._add(BLOCK_TOKENS, 3 * BLOCK_TOKENS) for _ in range(streams - len(live))]
            while not all(handle.can_read() for handle in live):  # their first tokens
                self._step_s()
            self._into.steps_s.setdefault(streams, []).extend(self._step_s() for _ in range(STEPS))
        for handle in live:
            handle.cancel()
        self._step_s()

    def _read(self) -> float:
        self._add(_READ_TOKENS, 1)
        return self._step_s()

    def _add(self, tokens: int, most: int) -> genai.GenerationHandle:
        options = genai.GenerationConfig()
        options.max_new_tokens, options.ignore_eos, options.do_sample = most, True, False
        self._next += 1
        return self._pipeline.add_request(self._next, ov.Tensor(self._random.integers(0, 256, (1, tokens))), options)

    def _step_s(self) -> float:
        began_s = time.perf_counter()
        self._pipeline.step()
        return time.perf_counter() - began_s

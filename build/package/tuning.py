"""The run-time settings of a CPU engine, chosen by measuring its steps on this machine.

What the plugin computes the same weights in changes speed by up to two times, and in the other direction on another
CPU; keys and values in 16 bits are read without being widened, and take up to twice the memory. Each setting is opened
as the server opens it, all in one process, and they take turns. The fastest one that passes the quality gate is served;
the figures of all are in the manifest under ``evaluation.tuning``. So is, under ``evaluation.draft_length``, how many
tokens prompt lookup drafts at most.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai

from build.base import hardware
from build.base.architecture import Architecture
from build.base.program import Notify
from build.package import compile_cpu
from build.recipe import memory
from build.recipe.recipe import Recipe
from build.recipe.schema import MEASURED_KV
from contract.scheduling import BLOCK_TOKENS, SHARED_DRAFT

STREAMS = (1, 8, 32)
PROMPT_TOKENS, ANSWER_TOKENS = 256, 128  # of the load whose tokens per second decide
# Of int8 and int4 weights, beside the plugin's own: bf16 where the CPU has it, activations in 8-bit groups where not.
SETTINGS: tuple[dict[str, str], ...] = ({"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "64"},)
OWN = "the plugin's own"
WORTH = 1.03  # a setting's gain over the plugin's own below which it is noise
MEMORY_SHARE = 0.5  # of the machine's memory, that an engine with a wider KV cache than needed may take
LEAST_PARAMETERS = 20_000_000  # below, a step is too short to be told from the next
MOST_PARAMETERS = 2_000_000_000  # beyond, measuring takes a laptop minutes: the plugin's own choice is served
ROUNDS = 8
STEPS = 4  # of a round, at each number of streams
_READ_TOKENS = 512
_LONGEST = PROMPT_TOKENS + 4 * ROUNDS * STEPS  # tokens of a sequence, at most: none ends before end()
# A step with eight drafts made 1.2 times the tokens of one with three on prose, 2.2 times on text that repeats itself.
LONGER = 1.25
DRAFTING_ROUNDS, DRAFTING_STEPS = 4, 6
_DRAFTING_PROMPT = 64  # tokens


@dataclass
class Measured:
    """A setting with the seconds of its steps by streams, and of reading _READ_TOKENS of a prompt; empty: unmeasured"""

    properties: Mapping[str, str]
    steps_s: dict[int, list[float]] = field(default_factory=dict)
    reads_s: list[float] = field(default_factory=list)

    def tokens_per_s(self) -> dict[int, float]:
        """By streams, of a load with prompts of PROMPT_TOKENS and answers of ANSWER_TOKENS. From the fastest steps:
        others were kept waiting by what else uses the machine."""
        prompt_s = min(self.reads_s) * PROMPT_TOKENS / _READ_TOKENS
        steps = {streams: min(taken) for streams, taken in self.steps_s.items()}
        return {n: n * ANSWER_TOKENS / (n * prompt_s + ANSWER_TOKENS * step_s) for n, step_s in steps.items()}

    def words(self) -> str:
        """``INFERENCE_PRECISION_HINT=f32 DYNAMIC_QUANTIZATION_GROUP_SIZE=64, u8 KV``."""
        changed = [f"{name}={value}" for name, value in self.properties.items() if name != "KV_CACHE_PRECISION"]
        return f"{' '.join(changed) or OWN}, {self.properties['KV_CACHE_PRECISION']} KV"

    def record(self) -> dict[str, object]:
        """For the manifest."""
        speeds = {str(streams): round(speed, 1) for streams, speed in self.tokens_per_s().items()}
        return {"properties": dict(self.properties), "tokens_per_s": speeds}


def measure(folder: Path, recipe: Recipe, arch: Architecture, notify: Notify) -> list[Measured]:
    """Every setting worth serving the engine in ``folder`` with, the fastest first and the plugin's own last: it alone
    where the recipe leaves no choice, or the engine is too small or large to be measured."""
    found = [Measured(each) for each in properties(recipe, arch)]
    if len(found) == 1 or not LEAST_PARAMETERS <= arch.num_parameters() <= MOST_PARAMETERS:
        return found[:1]
    notify(f"measuring {len(found)} run-time settings on this machine")
    opened = [_Steps(folder, recipe, each) for each in found]
    turns = [opened[number % len(opened) :] + opened[: number % len(opened)] for number in range(ROUNDS)]
    for steps in itertools.chain(*turns):
        steps.read()
    for streams in (each for each in STREAMS if each <= recipe.max_batch_size):
        for steps in opened:
            steps.fill(streams)
        for steps in itertools.chain(*turns):
            steps.decode(streams)
    for steps in opened:
        steps.end()
    for each in found:
        at = " / ".join(f"{speed:,.0f}" for speed in each.tokens_per_s().values())
        notify(f"  {at} tokens/s at {' / '.join(map(str, each.steps_s))} streams: {each.words()}")
    return ranked(found)


def properties(recipe: Recipe, arch: Architecture) -> list[dict[str, str]]:
    """Of every setting to measure, the plugin's own first."""
    own = compile_cpu.properties(recipe)
    exact = own.get("INFERENCE_PRECISION_HINT") == "f32"
    changes: list[dict[str, str]] = [{}, *(SETTINGS if recipe.precision in ("int8", "int4") and not exact else ())]
    found = [own | changed for changed in changes]
    wider = recipe.changed(kv_cache_precision=MEASURED_KV[-1])
    at_hand = MEMORY_SHARE * (hardware.memory_bytes() or 0)
    if recipe.kv_cache_measured and memory.footprint(wider, arch).total_bytes <= at_hand:
        found += [each | {"KV_CACHE_PRECISION": wider.kv_cache_precision} for each in found]
    return found


def ranked(found: list[Measured]) -> list[Measured]:
    """Those faster than the first in the geometric mean over the streams, the fastest first; then the first.

    One with another KV cache than the first's, a wider one, comes before what it is clearly faster than.
    """
    first, narrow = found[0].tokens_per_s(), found[0].properties["KV_CACHE_PRECISION"]
    gains = [statistics.geometric_mean([v / first[n] for n, v in each.tokens_per_s().items()]) for each in found]
    price = [1.0 if each.properties["KV_CACHE_PRECISION"] == narrow else WORTH for each in found]
    order = sorted(range(1, len(found)), key=lambda n: -gains[n] / price[n])
    return [*(found[n] for n in order if gains[n] >= WORTH), found[0]]


def draft_length(
    folder: Path, recipe: Recipe, properties: Mapping[str, str], arch: Architecture, notify: Notify
) -> dict[str, object] | None:
    """The most draft tokens of a step of prompt lookup, with the milliseconds by length; None without a choice.

    Every such step computes as many positions as it may draft, found or not. Eight cost little on processors with 8-bit
    or 16-bit matrix instructions; on others such a step takes up to twice as long as one with three.
    """
    spec = recipe.speculative_decoding
    if spec is None or spec.mode != "prompt_lookup" or spec.max_draft_len <= SHARED_DRAFT:
        return None
    if not LEAST_PARAMETERS <= arch.num_parameters() <= MOST_PARAMETERS:
        return None
    pipeline = _Pipeline(folder, {**properties, "prompt_lookup": True}, 16 * _DRAFTING_PROMPT // BLOCK_TOKENS)

    def steps_s(length: int) -> list[float]:
        most = DRAFTING_STEPS * (length + 1) + 2
        options = {"num_assistant_tokens": length, "max_ngram_size": spec.ngram_size or 0}
        handle = pipeline.add(_DRAFTING_PROMPT, most, **options)
        while not handle.can_read():
            pipeline.step_s()
        taken = [pipeline.step_s() for _ in range(DRAFTING_STEPS)]
        pipeline.cancel(handle)
        return taken

    steps_s(SHARED_DRAFT)  # the first ones take longer
    taken: dict[int, list[float]] = {SHARED_DRAFT: [], spec.max_draft_len: []}
    for _ in range(DRAFTING_ROUNDS):
        for length in taken:
            taken[length] += steps_s(length)
    milliseconds = {length: round(1e3 * min(found), 2) for length, found in taken.items()}
    length = longer_if_cheap(milliseconds)
    told = ", ".join(f"{ms:.1f} ms with {drafts}" for drafts, ms in milliseconds.items())
    notify(f"a step with draft tokens: {told}: {length} at most")
    return {"chosen": length, "step_ms": {str(drafts): ms for drafts, ms in milliseconds.items()}}


def longer_if_cheap(milliseconds: Mapping[int, float]) -> int:
    """The longer of two lengths, unless a step with it takes too much longer."""
    short, long = sorted(milliseconds)
    return long if milliseconds[long] <= LONGER * milliseconds[short] else short


class _Pipeline:
    """A pipeline whose steps are timed. The prompts are ids drawn at random; no cache holds them."""

    def __init__(self, folder: Path, properties: Mapping[str, object], kv_blocks: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks, scheduler.max_num_batched_tokens = kv_blocks, _READ_TOKENS
        self._pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", dict(properties))
        self._random, self._numbers = np.random.default_rng(0), itertools.count()

    def add(self, tokens: int, most: int, **options: int) -> genai.GenerationHandle:
        """A sequence with a prompt of ``tokens`` and up to ``most`` new tokens; none ends before."""
        config = genai.GenerationConfig(max_new_tokens=most, do_sample=False, **options)
        config.ignore_eos = True
        ids = ov.Tensor(self._random.integers(0, 256, (1, tokens)))
        return self._pipeline.add_request(next(self._numbers), ids, config)

    def step_s(self) -> float:
        began_s = time.perf_counter()
        self._pipeline.step()
        return time.perf_counter() - began_s

    def cancel(self, *handles: genai.GenerationHandle) -> None:
        for handle in handles:
            handle.cancel()
        self._pipeline.step()  # frees their blocks


class _Steps:
    """The steps of a setting, timed at several numbers of streams."""

    def __init__(self, folder: Path, recipe: Recipe, into: Measured) -> None:
        self._into = into
        self._live: list[genai.GenerationHandle] = []
        streams = min(STREAMS[-1], recipe.max_batch_size)
        blocks = streams * (_LONGEST // BLOCK_TOKENS + 1) + 2 * _READ_TOKENS // BLOCK_TOKENS
        self._pipeline = _Pipeline(folder, into.properties, blocks)
        self.read()  # the first steps take longer
        into.reads_s.clear()

    def read(self) -> None:
        self._pipeline.add(_READ_TOKENS, 1)
        self._into.reads_s.append(self._pipeline.step_s())

    def fill(self, streams: int) -> None:
        """Let ``streams`` sequences run, each with its first token."""
        for _ in range(streams - len(self._live)):
            self._live.append(self._pipeline.add(PROMPT_TOKENS, _LONGEST - PROMPT_TOKENS))
        while not all(handle.can_read() for handle in self._live):
            self._pipeline.step_s()

    def decode(self, streams: int) -> None:
        self._into.steps_s.setdefault(streams, []).extend(self._pipeline.step_s() for _ in range(STEPS))

    def end(self) -> None:
        self._pipeline.cancel(*self._live)

"""The verify stage: an engine measured against its own checkpoint, judged by the recipe's budget, for the manifest.

Reference: the checkpoint's weights in f32 arithmetic (``decoder.py``). Text: modules of the CPython library that the
demo model never saw. Beside the averages, both continue a prompt for at most ten seconds. ``evaluate`` returns plain
JSON, the ``evaluation`` of ``contract/manifest.py``.

    python -m build.quality.evaluation --engine llama-3.1-8b-fp8-hopper

measures the quantised checkpoint of a GPU recipe in simulated numerics and writes engines/<engine>/evaluation.json.
Exit status 1 when it is beyond its budget and no --accept-quality says why that is acceptable.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Protocol

import numpy as np

from build.base import layout, program
from build.base import shape as shapes
from build.base.architecture import Architecture
from build.base.checkpoint import Checkpoint, open_checkpoint
from build.base.json_fields import CheckpointError
from build.base.program import Notify
from build.base.shape import local_folder
from build.model import decoder
from build.model.calibration import CPYTHON, open_tokenizer, read_blocks
from build.quality import comparison, sanity
from build.recipe import commands, provenance, schema
from build.recipe import recipe as recipes
from build.recipe.recipe import DEFAULT_QUALITY, QualityBudget, Recipe
from contract.errors import EngineFailed, InvalidArgument

BLOCK_TOKENS = 256
MOST_BLOCKS, FEWEST_BLOCKS = 8, 2
REFERENCE_FLOPS = 8e12  # two minutes of a laptop's numpy: how much text a large model is measured on
KEPT_PARAMETERS = 250_000_000  # a model up to this size stays in memory between the tokens of the sanity prompt
KEPT_LOGITS_BYTES = 1_000_000_000
PROGRESS_S = 2.0
# A model that predicts the text hardly better than guessing (random weights): its perplexity is at least this share of
# its vocabulary. A trained one is far below; random ones lie around 1, a little above or below by chance, or far above.
NOISE = 0.5
NOISE_TOP1 = 0.2
NOISE_KL_SHARE = 0.4
NOISE_NATS_SHARE = 0.1


class LogitsSource(Protocol):
    """What can be measured: a compiled CPU engine, or a checkpoint in simulated numerics."""

    def logits(self, blocks: np.ndarray) -> Iterator[np.ndarray]: ...

    def next_logits(self, ids: Sequence[int]) -> np.ndarray: ...


@dataclass(frozen=True)
class Simulated:
    """A ``decoder.Decoder`` as a LogitsSource that reports its progress. vocab_size: ids without padding."""

    model: decoder.Decoder
    vocab_size: int

    @classmethod
    def of(cls, model: decoder.Decoder, vocab_size: int, name: str, notify: Notify) -> Simulated:
        reported_s = time.monotonic()

        def announced(number: int) -> decoder.Layer:
            nonlocal reported_s
            if time.monotonic() - reported_s > PROGRESS_S:
                reported_s = time.monotonic()
                notify(f"verify: {name}, layer {number + 1} of {len(model.layers)}")
            return model.layers[number]()

        layers: list[Callable[[], decoder.Layer]] = [partial(announced, n) for n in range(len(model.layers))]
        if model.architecture.num_parameters() <= KEPT_PARAMETERS:
            layers = [cache(make) for make in layers]
        return cls(replace(model, layers=layers), vocab_size)

    def logits(self, blocks: np.ndarray) -> Iterator[np.ndarray]:
        return self.model.logits(blocks)

    def next_logits(self, ids: Sequence[int]) -> np.ndarray:
        return next(self.model.logits(np.asarray([ids])))[-1, : self.vocab_size]


def reference(checkpoint: Checkpoint, notify: Notify) -> LogitsSource:
    """The checkpoint itself, in f32 arithmetic. An exported graph has been compared with transformers' logits."""
    if checkpoint.graph is not None:
        from build.model.openvino_engine import EXACT, OpenVinoEngine

        return OpenVinoEngine(checkpoint.graph, EXACT, checkpoint.architecture.vocab_size)
    model = decoder.from_checkpoint(checkpoint)
    return Simulated.of(model, checkpoint.architecture.vocab_size, "reference", notify)


class ReferenceRun:
    """What the checkpoint itself says of the held-out text, computed once for however many engines are measured: logits
    up to KEPT_LOGITS_BYTES stay in memory, those of a larger model are computed again for every engine."""

    def __init__(self, checkpoint: Checkpoint, notify: Notify, longest: int | None = None) -> None:
        """longest: what the engines take at most, in tokens; None for what the model takes."""
        self.blocks = held_out(checkpoint, longest)
        self.checkpoint, self.notify, self._longest = checkpoint, notify, longest
        self._speaker = reference(checkpoint, notify)
        self._kept: list[np.ndarray] = []

    def logits(self) -> Iterator[np.ndarray]:
        """f32[t, vocab] of one block after the other. Raises CheckpointError where one is not a number."""
        if len(self._kept) == len(self.blocks):
            yield from self._kept
            return
        self._kept = []
        keeps = 4 * self.blocks.size * self.checkpoint.architecture.vocab_size <= KEPT_LOGITS_BYTES
        with np.errstate(all="ignore"):  # a damaged model may overflow; its logits are then not finite
            for number, logits in enumerate(self._speaker.logits(self.blocks), 1):
                if not np.isfinite(logits).all():
                    where = f"in sequence {number} of {len(self.blocks)} of the held-out text"
                    problem = f"{self.checkpoint.folder}: its own logits are not finite {where}; it is damaged"
                    raise CheckpointError(problem)
                if keeps:
                    self._kept.append(logits)
                yield logits

    @cached_property
    def reply(self) -> sanity.Reply:
        """What the checkpoint says to the sanity prompt."""
        return self.reply_of(self._speaker)

    def reply_of(self, engine: LogitsSource) -> sanity.Reply:
        """What ``engine`` says to the sanity prompt."""
        encode, _, _ = open_tokenizer(self.checkpoint)
        longest = self.checkpoint.architecture.max_positions
        limit = min(longest, self._longest or longest)
        prompt = encode(sanity.PROMPT)[: max(1, limit - 1)]
        ends, most = self.checkpoint.eos_token_ids, min(32, limit - len(prompt))
        return sanity.speak(engine.next_logits, prompt, max_tokens=most, eos_token_ids=ends)


def held_out(checkpoint: Checkpoint, longest: int | None = None) -> np.ndarray:
    """i64[n, t] tokens of held-out text; fewer of them for a larger model. longest: what the engine takes at most."""
    arch = checkpoint.architecture
    length = min(BLOCK_TOKENS, arch.max_positions, longest or BLOCK_TOKENS)
    return read_blocks(checkpoint, CPYTHON, "test", size=block_count(arch), max_seq_length=length).ids


def block_count(arch: Architecture) -> int:
    """Sequences of BLOCK_TOKENS whose reference costs REFERENCE_FLOPS at 2 operations per parameter and token."""
    fitting = int(REFERENCE_FLOPS / (2 * arch.num_parameters() * BLOCK_TOKENS))
    return max(FEWEST_BLOCKS, min(MOST_BLOCKS, fitting))


def evaluate(
    name: str,
    engine: LogitsSource,
    against: ReferenceRun,
    budget: QualityBudget,
    *,
    accept: str | None = None,
    spare: bool = False,
) -> dict:
    """The scores of ``engine``, for the manifest.

    accept: why it is used even beyond its budget. spare: as ``comparison.judge`` has it, but for random weights.
    Raises BeyondBudget without ``accept``, InvalidArgument for an empty one, and CheckpointError for a checkpoint whose
    own logits are not numbers.
    """
    started_s = time.monotonic()
    checkpoint, blocks, notify = against.checkpoint, against.blocks, against.notify
    scores = comparison.compare(against.logits(), {name: engine.logits(blocks)}, blocks)[name]
    notes = []
    noise = is_noise(scores.reference_perplexity, checkpoint.architecture)
    if noise and budget in DEFAULT_QUALITY.values():
        budget = noise_budget(scores)
        why = "random weights, or a tokenizer of another model"
        notes.append(f"the model itself predicts the text hardly better than chance ({why}): only damage is looked for")
        notify(f"verify: {notes[0]}")
    expected, reply = against.reply, against.reply_of(engine)
    # What noise says is chance too, so a reply that repeats itself tells nothing there.
    problem = reply.failure if noise else sanity.problem(reply, expected)
    verdict = comparison.gate(name, scores, budget, accept, problem, spare=spare and not noise)
    for doubt in comparison.doubts(scores, budget):
        notes.append(doubt)
        notify(f"verify: {doubt}")
    notify(
        f"verify: perplexity {scores.perplexity:.5g} ({scores.perplexity_ratio:.4f} of the reference's), "
        f"top-1 agreement {scores.top1_agreement:.2%}, KL {scores.kl:.5f} nats on {scores.tokens} tokens of "
        f"Python {platform.python_version()}'s library, {time.monotonic() - started_s:.1f} s: "
        f"{'passed' if verdict.passed else f'beyond the budget, accepted because {verdict.override}'}"
    )
    _, decode, _ = open_tokenizer(checkpoint)
    text = {"dataset": CPYTHON, "sequences": int(blocks.shape[0]), "tokens_per_sequence": int(blocks.shape[1])}
    text["python"] = platform.python_version()
    spoken = {"prompt": sanity.PROMPT, "reply": decode(reply.ids), "reference": decode(expected.ids)}
    return comparison.record(scores, budget, verdict) | {"text": text, "sanity": spoken, "notes": notes}


def noise_budget(scores: comparison.Quality) -> QualityBudget:
    """What random weights are held to, so that only damage counts: which of almost equally unlikely tokens is first is
    chance that any rounding changes. KL: a share of what there is to lose, of which 4-bit engines lose up to 0.24 and
    agree at 40 %; a misplaced matrix in one of two layers costs 0.4 to 3. Perplexity: twice, or a share of the nats
    the reference itself is wrong by.
    """
    nats = NOISE_NATS_SHARE * math.log(min(scores.reference_perplexity, 1e300))
    return QualityBudget(max(2.0, math.exp(nats)), NOISE_TOP1, NOISE_KL_SHARE * scores.conviction)


def is_noise(perplexity: float, arch: Architecture) -> bool:
    """Whether guessing all ids alike would predict the text about as well."""
    return perplexity >= NOISE * arch.vocab_size


def evaluate_checkpoint(recipe: Recipe, notify: Notify, accept: str | None = None) -> Path:
    """Measures ``engines/<recipe.name>/checkpoint``; the path of evaluation.json. Raises as ``evaluate``."""
    path = layout.evaluation(recipe.name)
    path.unlink(missing_ok=True)  # what another checkpoint scored says nothing of this one
    scores = unmeasured(recipe, accept)
    if scores is None:
        opened = open_checkpoint(local_folder(recipe.model) or layout.fetched_model(recipe.model, recipe.revision))
        quantised, _ = comparison.open_candidate(layout.checkpoint(recipe.name))
        engine = Simulated.of(quantised, opened.architecture.vocab_size, recipe.name, notify)
        against = ReferenceRun(opened, notify, recipe.max_seq_len)
        scores = evaluate(recipe.name, engine, against, recipe.quality, accept=accept)
    else:
        notify(f"verify: {scores['verdict']['problems'][0]}, accepted because {accept}")
    scores |= scored(recipe)
    layout.write_whole(path, json.dumps(scores, indent=2) + "\n")
    return path


def unmeasured(recipe: Recipe, accept: str | None) -> dict | None:
    """What stands in place of scores for a checkpoint that verify cannot read (rule Q4); None for any other. Raises
    InvalidArgument without a reason to accept it."""
    found = commands.unmeasured(recipe, shapes.find(recipe.model, revision=recipe.revision))
    if found is None:
        return None
    problem = f"verify cannot read the checkpoint of a recipe with {found}"
    if accept is None or not accept.strip():
        got = "none" if accept is None else "an empty one"
        must_be = f"must be a reason to package {recipe.name} unmeasured, because {problem} (rule Q4), got {got}"
        raise InvalidArgument("accept_quality", must_be)
    return {"verdict": {"passed": False, "override": accept, "problems": [f"not measured: {problem}"]}}


def accepted(recipe: Recipe) -> dict:
    """What the gate measured on the checkpoint that is there. Raises EngineFailed where that was not measured, not for
    this recipe's budget, or is beyond it without a reason."""
    again = f"run `{commands.line(commands.verify(recipe))}`"
    try:
        scores = json.loads(layout.evaluation(recipe.name).read_text(encoding="utf-8"))
        verdict, measured = scores["verdict"], {key: scores[key] for key in ("checkpoint_sha256", "budget_requested")}
        passed, reason, problems = bool(verdict["passed"]), verdict["override"], "; ".join(verdict["problems"])
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise EngineFailed(f"{recipe.name} has not been verified ({exc!r}); {again} first") from exc
    if measured != scored(recipe):
        raise EngineFailed(f"{recipe.name} was verified with another checkpoint or another budget; {again} again")
    if not (passed or reason):
        raise EngineFailed(f"{recipe.name} is beyond its quality budget: {problems}; {again} --accept-quality REASON")
    return scores


def scored(recipe: Recipe) -> dict[str, object]:
    """What scores belong to: the checkpoint that is there, and the budget the recipe asks for."""
    checkpoint = provenance.files_sha256(layout.checkpoint(recipe.name))
    return {"checkpoint_sha256": checkpoint, "budget_requested": asdict(recipe.quality)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", required=True, help="name of a GPU recipe in build/recipes")
    parser.add_argument("--accept-quality", metavar="REASON", help="accept it beyond its budget; recorded")
    options = parser.parse_args(arguments)
    recipe = recipes.named(options.engine)
    if recipe.kind == schema.CPU:
        raise InvalidArgument("engine", f"{recipe.name} is of kind 'cpu', which is verified while it is built")
    path = evaluate_checkpoint(recipe, lambda line: print(line, flush=True), options.accept_quality)
    print(f"scores in {layout.relative(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(program.run(main, "error"))

"""How long an engine's steps take now beside when it was calibrated: the same few trials, once more.

The cores and the memory of many machines are shared with others whom nothing here sees, and become slower or faster by
a quarter within an hour. A step model is as far off then, with all that is forecast by it.

Measurements within four minutes have a standard deviation of 7 %, and the slowest was up to 1.36 times the fastest. So
those who compare forecasts measure at several times and take the geometric mean.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.measurement import ServerUnderTest
from benchmarks.prompts import Prompts
from benchmarks.report import write_json
from benchmarks.step_trials import Experiment, Outcome, check_serves, reference
from benchmarks.target import EnsembleTarget
from contract import manifest as manifests
from contract import step_model
from contract.errors import EngineFailed, InvalidArgument
from contract.manifest import EngineManifest

ROUNDS = 3  # the first is slower: an engine meets these lengths for the first time; once it has, one will do
MOST_S = 120.0


def reference_s(server: ServerUnderTest, folder: Path, engine: EngineManifest, rounds: int = ROUNDS) -> float:
    """Return the geometric mean of the steps of the reference trials on a replica, in seconds.

    rounds: of the trials.
    Raises TridentError: the replica failed, EngineFailed: it was too slow.
    """
    trials = reference(engine)

    async def measured(kept: Path) -> list[Outcome]:
        async with EnsembleTarget(server.url) as target:
            experiment = Experiment(engine, {}, target, Prompts.for_engine(folder), kept)
            await experiment.run(trials, rounds, time.monotonic() + MOST_S)
            return experiment.outcomes

    with TemporaryDirectory() as kept:
        return middle_s(asyncio.run(measured(Path(kept) / "points.jsonl")))


def middle_s(outcomes: list[Outcome]) -> float:
    """Return the geometric mean of the trials' medians in seconds. Raises EngineFailed: there are none."""
    if not outcomes:
        raise EngineFailed(f"no step was measured within {MOST_S:g} s")
    by_trial = {one.trial: [other.point.seconds for other in outcomes if other.trial == one.trial] for one in outcomes}
    return statistics.geometric_mean(statistics.median(of) for of in by_trial.values())


def steps_take(server: ServerUnderTest, rounds: int = ROUNDS) -> float:
    """Return how many times as long as when the engine was calibrated steps take on a replica.

    rounds: of the trials.
    Raises InvalidArgument, NotFound: the engine is not known, was not calibrated. TridentError: the replica failed.
    """
    folder = server.engine_folder
    if folder is None:
        raise InvalidArgument("engine", "must name the replica's engine: --engine, or --tokenizer FOLDER")
    model, engine = step_model.of_engine(folder), manifests.load(folder)
    if not model.reference_s:
        raise InvalidArgument("engine", f"must have been measured; the step model of {engine.name} is an estimate")
    check_serves(server, engine.name, model.manifest_sha256)
    return reference_s(server, folder, engine, rounds) / model.reference_s


def run(server: ServerUnderTest, out: Path) -> int:
    """Print it, and write it to speed.json; return 0. Raises as ``steps_take``."""
    ratio = steps_take(server)
    print(f"  {step_model.described_drift(ratio)}")
    write_json({"steps_take": ratio}, out, "speed")
    return 0

"""Hold forecasts to the real bench: the same requests at the same instants, the forecast first.

    python -m cluster plan SCENARIO --check POOL

Three open loads at parts of the operating point, and one closed loop with as many clients as the operating point has
sequences, in turns. The requests of an open load are written as a trace, which the bench replays, without those that
the engine refuses; those of the closed loop are drawn by the bench, so that it is for one class, of no trace, all of
whose requests fit. The largest errors are kept beside the step model, and told with every plan that it makes, unless
other processes used the machine meanwhile or its speed is another than when the engine was calibrated: steps are
measured before each turn and after. The same loads are forecast once more at the speed measured meanwhile, which tells
what the machine's drift does apart from what the model lacks.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from cluster.plan.planner import CHECKED, Load, loads_of, operating_point
from cluster.plan.replica import Forecast, Replica, Request, closed_loop, figures, serve
from cluster.plan.scenario import Scenario, kind_of
from contract.errors import EngineFailed, InvalidArgument
from contract.step_model import described_drift, drifted

PARTS = (0.3, 0.6, 0.9)
SECONDS, WARMUP_S, MOST_S = 45.0, 4.0, 3600.0
ROUNDS = 3  # of the loads, in turns: a machine's speed drifts within minutes
QUIET = 0.1  # of the machine that others may use while what is kept is measured
ROOT = Path(__file__).resolve().parents[2]
FIGURES = ("tokens_per_s", "ttft_p50_s", "ttft_p95_s", "itl_mean_s", "e2e_p95_s")


@dataclass(frozen=True)
class Compared:
    """One load. forecast, measured: by FIGURES. others: part of the machine that other processes used meanwhile.
    at_pace: the forecast at the speed that the machine had meanwhile, {} where it was not made yet.
    steps_take: times what steps took when the engine was calibrated: the geometric mean of the measurements before each
        turn and after the last.
    """

    load: str
    forecast: dict[str, float]
    measured: dict[str, float]
    failed: int
    others: float
    at_pace: dict[str, float] = field(default_factory=dict)
    steps_take: float = 1.0


@dataclass(frozen=True)
class _BenchLoad:
    """A load that the bench can run. forecast: what a replica makes of it. options: of the bench's command."""

    name: str
    forecast: Callable[[Replica], Forecast]
    options: list[str]


def run(scenario: Scenario, pool: str, seconds: float = SECONDS) -> list[Compared]:
    """Forecast and measure every load of a pool with an engine of this machine.

    Raises InvalidArgument, EngineFailed: the pool has no engine, the bench failed.
    """
    if pool not in scenario.pools:
        raise InvalidArgument("check", f"must be one of {', '.join(scenario.pools)}, got {pool!r}")
    if not ROUNDS <= seconds <= MOST_S:
        raise InvalidArgument("seconds", f"must be from {ROUNDS} to {MOST_S:g}, got {seconds:g}")
    place, given = f"pools.{pool}", scenario.pools[pool]
    if not given.engine:
        raise InvalidArgument(f"{place}.engine", "must be an engine that runs here: an estimate cannot be checked")
    replica = kind_of(given, place)
    load = loads_of(given, replica, scenario.seed, place)[0]
    rate, most, _ = operating_point(replica, load, given.slo, place)
    os.environ["TRIDENT_ENGINES_DIR"] = str(Path(given.engine).absolute().parent)  # where the bench looks for it
    turn_s, clients = seconds / ROUNDS, max(1, round(most.sequences))
    timing = ["--duration", f"{turn_s}", "--engine", Path(given.engine).name]
    mixes = [replace(load, seed=scenario.seed + nth) for nth in range(ROUNDS)]
    for mix in mixes:
        for per_s, requests in _open_loads(mix, replica, rate, turn_s):
            if not any(one.at_s >= WARMUP_S for one in requests):
                problem = f"must be more: of {per_s:.3g} requests/s none comes in a turn of {turn_s:.3g} s, a third"
                raise InvalidArgument("seconds", f"{problem}; got {seconds:g}")
    turns: dict[str, list[tuple[_BenchLoad, Compared]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        ratios = [_steps_take(given.engine, folder)]
        for mix in mixes:
            for bench_load in _loads(mix, replica, rate, clients, turn_s, folder):
                compared = _compared(bench_load, replica, timing, folder)
                turns.setdefault(bench_load.name, []).append((bench_load, compared))
            ratios.append(_steps_take(given.engine, folder))
    steps_take = geometric_mean(ratios)
    now = replace(replica, step=replica.step.at_pace(steps_take))
    found = [
        _mean([replace(one, at_pace=_figures(bench_load.forecast(now))) for bench_load, one in each], steps_take)
        for each in turns.values()
    ]
    keep(Path(given.engine), replica.step.made, found)
    return found


def _open_loads(load: Load, replica: Replica, rate: float, seconds: float) -> Iterator[tuple[float, list[Request]]]:
    """Yield requests per second and, until the end of the turn, those requests that the engine takes."""
    end_s = WARMUP_S + seconds
    for per_s in (part * rate for part in PARTS):
        coming = (one for one in load.requests(per_s, round(2 * per_s * end_s) + 8) if one.at_s < end_s)
        yield per_s, [one for one in coming if one.input_tokens + one.output_tokens <= replica.longest]


def _loads(
    load: Load, replica: Replica, rate: float, clients: int, seconds: float, folder: str
) -> Iterator[_BenchLoad]:
    end_s, trace = WARMUP_S + seconds, Path(folder) / "trace.jsonl"
    for per_s, requests in _open_loads(load, replica, rate, seconds):
        trace.write_text("".join(f"{json.dumps(asdict(one))}\n" for one in requests))
        options = ["--arrivals", f"trace:{trace}", "--warmup", f"{WARMUP_S}"]
        yield _BenchLoad(f"{per_s:.3g} requests/s", partial(_open_loop, requests, end_s), options)
    if len(load.classes) == 1 and not load.classes[0].trace and not load.means(replica.longest, "")[2]:
        # All clients begin at once: until their second answers all of them read prompts, or none does.
        warmup_s = max(WARMUP_S, 2 * _closed_loop(load, clients, 0.0, end_s, replica).e2e_p95_s)
        forecast = partial(_closed_loop, load, clients, warmup_s, warmup_s + seconds)
        options = ["--concurrency", str(clients), "--warmup", f"{warmup_s}"]
        for name in ("input", "output"):
            size = getattr(load.classes[0], name)
            options += [f"--{name}", f"lognormal:{size.p50},{size.sigma},{size.most}"]
        yield _BenchLoad(f"{clients} clients", forecast, options)


def _open_loop(requests: list[Request], end_s: float, replica: Replica) -> Forecast:
    return figures(replica, serve(replica, [replace(one) for one in requests]), WARMUP_S, end_s)


def _closed_loop(load: Load, clients: int, from_s: float, end_s: float, replica: Replica) -> Forecast:
    rng = random.Random(load.seed)
    return closed_loop(replica, iter(lambda: load.lengths(rng), None), clients, end_s, from_s)


def _mean(turns: list[Compared], steps_take: float) -> Compared:
    """Return the means of the turns of one load."""
    forecast, measured, at_pace = (
        {name: fmean(getattr(turn, side)[name] for turn in turns) for name in FIGURES}
        for side in ("forecast", "measured", "at_pace")
    )
    failed, others = sum(turn.failed for turn in turns), fmean(turn.others for turn in turns)
    return Compared(turns[0].load, forecast, measured, failed, others, at_pace, steps_take)


def keep(folder: Path, made: str, found: list[Compared]) -> None:
    """Keep the largest error of each figure for the plans of a step model, if nothing disturbed. made: its instant."""
    if any(one.others > QUIET or one.failed or drifted(one.steps_take) for one in found):
        return
    errors = {}
    for name in FIGURES:
        if each := [one.forecast[name] / one.measured[name] - 1 for one in found if one.measured[name] > 0]:
            errors[name] = max(each, key=abs)
    unfinished = folder / f"{CHECKED}.partial"
    unfinished.write_text(json.dumps({"of": made, "errors": errors}) + "\n", "utf-8")
    os.replace(unfinished, folder / CHECKED)


def _compared(bench_load: _BenchLoad, replica: Replica, timing: list[str], folder: str) -> Compared:
    expected = bench_load.forecast(replica)
    [result] = _bench(["run", *bench_load.options, *timing], folder)
    got, host = result["figures"], result["host_load"]
    ttft, itl, latency = got["ttft_s"], got["itl_s"], got["latency_s"]
    values = (got["output_tokens_per_s"], ttft["p50"], ttft["p95"], itl["mean"], latency["p95"])
    measured = dict(zip(FIGURES, values, strict=True))
    return Compared(bench_load.name, _figures(expected), measured, got["failed"], host["others"] + host["stolen"])


def _figures(forecast: Forecast) -> dict[str, float]:
    return {name: getattr(forecast, name) for name in FIGURES}


def _steps_take(engine: str, folder: str) -> float:
    return float(_bench(["speed", "--engine", Path(engine).name], folder)["steps_take"])


def _bench(options: list[str], folder: str) -> Any:
    """Return what a command of the bench wrote. Raises EngineFailed."""
    command = [sys.executable, "-m", "benchmarks", *options, "--out", folder]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if ended.returncode not in (0, 3):  # 3: a self-check failed; the figures are there
        raise EngineFailed(f"{' '.join(command)}: {ended.stderr.strip()[-2000:]}")
    return json.loads((Path(folder) / f"{options[0]}.json").read_text())


def described(found: list[Compared]) -> str:
    drifts = sorted({described_drift(one.steps_take) for one in found})
    lines = [f"{'forecast / measured':<20}" + "".join(f"{name:>28}" for name in FIGURES) + "  others"]
    for one in found:
        failed = f", {one.failed} failed" if one.failed else ""
        lines.append(f"{one.load:<20}{_cells(one.forecast, one.measured)}  {one.others:.0%}{failed}")
    lines += [*drifts, "forecast at that speed / measured"]
    return "\n".join([*lines, *(f"{one.load:<20}{_cells(one.at_pace, one.measured)}" for one in found)])


def _cells(forecast: dict[str, float], measured: dict[str, float]) -> str:
    pairs = [(forecast[name], measured[name]) for name in FIGURES]
    cells = (f"{said:.4g} / {was:.4g} ({said / was - 1:+.0%})" if was > 0 else "-" for said, was in pairs)
    return "".join(f"{cell:>28}" for cell in cells)

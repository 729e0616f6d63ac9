"""How far forecasts are from real runs: the same load on a real replica behind a real gateway, and simulated.

What was found is kept in fidelity.json beside this module, and told with every forecast.
"""

from __future__ import annotations

import json
import random
import resource
import statistics
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import calibrate, driver, machine, report, scrape, self_check
from benchmarks.arrivals import Poisson
from benchmarks.driver import Extent, Load
from benchmarks.gateway import contenders
from benchmarks.lengths import Lengths, parse
from benchmarks.prompts import Prompts
from benchmarks.record import Record
from benchmarks.report import ms, share, table
from benchmarks.server_process import running_server
from benchmarks.target import EnsembleTarget
from benchmarks.workload import Workload
from contract import step_model, toml_table
from contract.errors import InvalidArgument, Unavailable
from simulator.run import run
from simulator.scenario import Persona, Pool, Scenario

KNOWN = Path(__file__).with_name("fidelity.json")
GOALS = {"ttft_p95": 0.15, "latency_mean": 0.10, "latency_p95": 0.10}  # errors, at most
LOADS = 0.25, 0.5, 0.75  # of what the step model says that the replica can do
ROUNDS = 3  # of the loads, in turns: a machine's speed drifts within minutes
REPLAYS = 8  # of a load in the simulator: each draws other texts and other steps
_FIGURES = "ttft_p50", "ttft_p95", "latency_mean", "latency_p50", "latency_p95"


def known(scenario: Scenario) -> dict[str, Any]:
    """Return for each pool what the comparison of its engine with real runs found; nothing where there is none."""
    compared = json.loads(KNOWN.read_text("utf-8")) if KNOWN.exists() else {}
    return {name: compared.get(pool.engine, {}) for name, pool in scenario.pools.items()}


def compare(engine: str, seconds: float, input_tokens: str, output_tokens: str, seed: int) -> dict[str, Any]:
    """Run three loads on a replica of ``engine`` and simulate them; print and return the errors.

    Before them it gets the last load once: the first prompt of each length takes longer. They are simulated with the
    step model as it was calibrated, whose errors are told with forecasts, and once more at the speed that the machine
    had meanwhile, so that what its drift does is told apart from what the model lacks.

    seconds: of each load, in ROUNDS parts. input_tokens, output_tokens: distributions, as those of a persona.
    Raises InvalidArgument for seconds, lengths, or an engine without a step model; EngineFailed.
    """
    if not 1 <= seconds <= 3600:
        raise InvalidArgument("seconds", f"must be from 1 to 3600, got {seconds:g}")
    prompts_of, answers = parse(input_tokens, "input"), parse(output_tokens, "output")
    pool = toml_table.checked(Pool, {"engine": engine, "send_s": 0.0, "shared": True}, "fidelity")
    request_s = _request_s(pool, prompts_of, answers, random.Random(seed))
    before, used_s = machine.cpu_time(), _used_s()
    measured: list[tuple[float, _Turn]] = []
    turns = [(LOADS[-1], seconds), *((part, seconds / ROUNDS) for _ in range(ROUNDS) for part in LOADS)]
    with TemporaryDirectory() as logs, running_server(engine) as server:
        settings = {"CONFIG": "", "METRICS_URLS": f"{server.url}={server.metrics_url}"}
        ratios = [calibrate.steps_take(server)]
        with contenders.gateway(server.url, Path(logs), settings=settings) as gateway:
            for nth, (part, turn_s) in enumerate(turns):
                # Prompts of another turn would be in the prefix cache.
                workload = Workload(None, Poisson(part / request_s), prompts_of, answers, seed=seed + nth)
                prompts = partial(Prompts.for_engine, server.engine_folder)
                target = partial(EnsembleTarget, gateway.urls["grpc"])
                before_turn = sum(scrape.drafted(server.metrics_url or ""))
                result = driver.run(Load(workload, Extent(turn_s, 2.0), target, prompts))
                drafted = sum(scrape.drafted(server.metrics_url or "")) - before_turn
                real = [record for record in result.records if record.ok]
                if not nth:
                    continue
                trace = [_line(record, result.started_s) for record in real]
                measured.append((part, _Turn(real, trace, turn_s + 2.0, drafted, seed)))
                if part == LOADS[-1]:  # the turn ends
                    ratios.append(calibrate.steps_take(server, rounds=1))
    if {part for part, turn in measured if turn.real} != set(LOADS):
        raise InvalidArgument("seconds", f"must be long enough for a request of each load, got {seconds:g}")
    steps_take = statistics.geometric_mean(ratios)
    others = machine.host_load(before, machine.cpu_time(), _used_s() - used_s).others
    print(report.disturbance(others))
    print(f"  {step_model.described_drift(steps_take)}")
    print("Simulated with the step model as it was calibrated:")
    worst = _errors(pool, measured)
    print("Simulated at the speed of these runs:")
    at_pace = _errors(pool.model_copy(update={"step": pool.step.at_pace(steps_take)}), measured)
    found: dict[str, Any] = {f"{name}_error": round(error, 4) for name, error in worst.items()}
    found |= {f"{name}_error_at_pace": round(error, 4) for name, error in at_pace.items()}
    found |= {
        "when": datetime.now(timezone.utc).date().isoformat(),
        "machine": step_model.machine_kind(),
        "seconds": seconds,
        "loads": list(LOADS),
        "others": round(others, 4),
        "steps_take": round(steps_take, 3),  # times what they took when the engine was calibrated
        "tokens_per_step": round(pool.kind.step.tokens_per_step, 2),  # of a sequence alone, by the calibration's texts
    }
    for figure, goal in GOALS.items():
        error, name = worst[figure], figure.replace("_", " ")
        print(f"  {'met   ' if abs(error) <= goal else 'MISSED'}  {name} within {goal:.0%}: {error:+.1%} at worst")
    return found


@dataclass(frozen=True)
class _Turn:
    """One turn of a load on the real replica: its requests, as a trace too, its seconds, tokens of steps with drafts.
    seed: of the replays."""

    real: list[Record]
    trace: list[str]
    seconds: float
    drafted: float
    seed: int

    def simulated(self, pool: Pool) -> _Compared:
        with TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.jsonl"
            trace.write_text("".join(self.trace), "utf-8")
            people = {"all": Persona.model_validate({"arrivals": f"trace:{trace}"})}
            forecast_of = Scenario(duration_s=self.seconds, pools={"main": pool}, personas=people)
            replays = [run(forecast_of, self.seed + again) for again in range(REPLAYS)]
        drafted = sum(replay.drafted_tokens["main"] for replay in replays) / REPLAYS
        return _Compared(self.real, [replay.everyone for replay in replays], (self.drafted, drafted))


def _errors(pool: Pool, measured: list[tuple[float, _Turn]]) -> dict[str, float]:
    """Simulate and print each turn; return for each figure the error of the load where it is largest."""
    compared = {part: [turn.simulated(pool) for of, turn in measured if of == part] for part in LOADS}
    loads = {part: _together(each) for part, each in compared.items()}
    names = ("load", "measured, ms", "simulated, ms", "error", "of each turn", "std dev of replays")
    print(table([row for part, load in loads.items() for row in load.rows(f"{part:.0%}", compared[part])], names))
    if pool.kind.step.draft_tokens:
        drafted_rows = [load.drafted_row(f"{part:.0%}", compared[part]) for part, load in loads.items()]
        print(table(drafted_rows, ("load", "tokens of steps with drafts: measured", "simulated", "in each turn")))
    return {figure: max((load.error(figure) for load in loads.values()), key=abs) for figure in _FIGURES}


@dataclass(frozen=True)
class _Compared:
    """One load, or one turn of it: what its requests got, and what they got in each replay.

    drafted: tokens that steps with drafts made, and how many they are in a replay.
    """

    real: list[Record]
    replays: list[list[Record]]
    drafted: tuple[float, float] = (0.0, 0.0)

    def forecast(self, figure: str) -> float:
        return _seconds([record for replay in self.replays for record in replay], figure)

    def error(self, figure: str) -> float:
        return self.forecast(figure) / _seconds(self.real, figure) - 1

    def chance(self, figure: str) -> float:
        """Return the error that a load of so many requests shows by chance: the standard deviation of the replays."""
        return float(np.std([_seconds(replay, figure) for replay in self.replays])) / self.forecast(figure)

    def rows(self, load: str, turns: list[_Compared]) -> list[tuple[str, ...]]:
        return [
            (
                f"{load}, {len(self.real)} requests: {figure.replace('_', ' ')}",
                ms(_seconds(self.real, figure)),
                ms(self.forecast(figure)),
                share(self.error(figure)),
                ", ".join(f"{turn.error(figure):+.0%}" for turn in turns if turn.real),
                f"±{self.chance(figure):.0%}",
            )
            for figure in _FIGURES
        ]

    def drafted_row(self, load: str, turns: list[_Compared]) -> tuple[str, ...]:
        """Return which part of all tokens steps with drafts made: how fast a stream goes depends on it most."""
        of_turns = [" / ".join(turn._drafted_shares()) for turn in turns if turn.real]
        return (load, *self._drafted_shares(), ", ".join(of_turns))

    def _drafted_shares(self) -> list[str]:
        return [f"{tokens / sum(record.tokens for record in self.real):.0%}" for tokens in self.drafted]


def _together(turns: list[_Compared]) -> _Compared:
    """Return what the requests of all turns of a load got, and what they got in each replay."""
    replays = [list(chain.from_iterable(parts)) for parts in zip(*(turn.replays for turn in turns), strict=True)]
    measured, forecast = (sum(tokens) for tokens in zip(*(turn.drafted for turn in turns), strict=True))
    return _Compared([record for turn in turns for record in turn.real], replays, (measured, forecast))


def _request_s(pool: Pool, prompts_of: Lengths, answers: Lengths, rng: random.Random) -> float:
    """Return the seconds that a replica which is busy spends on a request of these lengths."""
    kind, busy = pool.kind, min(8, pool.slots)
    mean_in, mean_out = (sum(one.draw(rng) for _ in range(400)) / 400 for one in (prompts_of, answers))
    decode_s = mean_out * kind.step.seconds(busy, busy * (mean_in + mean_out / 2), 0) / busy
    return pool.step.prompt_s(int(mean_in), pool.prefill_chunk) + decode_s + kind.request_s


def keep(engine: str, found: dict[str, Any]) -> None:
    """Keep what was found, for the forecasts to come.

    Raises Unavailable: other processes took too much meanwhile, or the machine is not as fast as when calibrated.
    """
    if found["others"] > self_check.OTHERS_SHARE:
        raise Unavailable(f"nothing is kept: other processes used {found['others']:.0%} of the machine")
    if step_model.drifted(found["steps_take"]):
        raise Unavailable(f"nothing is kept: {step_model.described_drift(found['steps_take'])}")
    compared = json.loads(KNOWN.read_text("utf-8")) if KNOWN.exists() else {}
    KNOWN.write_text(json.dumps({**compared, engine: found}, indent=2, sort_keys=True) + "\n", "utf-8")


def _used_s() -> float:
    """Return the CPU seconds of this process and of those that it started and that have ended."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def _line(record: Record, began_s: float) -> str:
    at_s = record.intended_s - began_s
    return json.dumps({"at_s": at_s, "input_tokens": record.input_tokens, "output_tokens": record.tokens}) + "\n"


def _seconds(records: list[Record], figure: str) -> float:
    """Return one of _FIGURES of these requests."""
    what, statistic = figure.split("_")
    values = [value for record in records if (value := getattr(record, f"{what}_s")) is not None]
    return statistics.fmean(values) if statistic == "mean" else float(np.percentile(values, int(statistic[1:])))

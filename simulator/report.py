"""What a run came to: for people, as JSON that is equal for equal seeds, and as a plot."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import figures
from benchmarks.figures import Slo
from benchmarks.plots import GREY, STYLE
from benchmarks.record import Record
from benchmarks.report import ms, number, share, table
from simulator.run import BEGAN_S, Result

PARTS = ("queue", "prefill", "other")  # of the time to the first token
SPREADS = ("ttft_s", "itl_s", "latency_s")
_RELEASE = ("gateway", "name", "state", "rolled_back")


def of(result: Result, fidelity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report as JSON has it. fidelity: what a comparison with real runs found, by pool; see fidelity.py."""
    scenario, everyone = result.scenario, result.everyone
    tokens = sum(record.input_tokens + record.tokens for record in everyone)
    pools = {}
    for pool, hours in result.replica_hours.items():
        seen = [sample for sample in result.samples if sample.pool == pool]
        most = {f"most_{name}": max((getattr(one, name) for one in seen), default=0) for name in ("present", "waiting")}
        drafted = {"drafted_tokens": result.drafted_tokens[pool]}
        pools[pool] = {"replica_hours": hours, "cost": hours * scenario.pools[pool].price_hour, **most, **drafted}
    cost = sum(pool["cost"] for pool in pools.values())
    return _rounded(
        {
            "scenario": scenario.name,
            "seed": result.seed,
            "duration_s": scenario.duration_s,
            "fidelity": dict(fidelity),
            "tokens_per_step": {name: pool.kind.step.tokens_per_step for name, pool in scenario.pools.items()},
            "all": _figures(result, everyone),
            "personas": {name: _figures(result, records) for name, records in result.records.items()},
            "counts": result.counts,
            "pools": pools,
            "cost": cost,
            "cost_per_1000_tokens": 1000 * cost / tokens if tokens else None,
            "decisions": result.decisions,
            "releases": [{key: one[key] for key in _RELEASE} for one in result.releases],
            "samples": [sample._asdict() for sample in result.samples],
            "missed_faults": [
                {"number": number, **scenario.faults[number].model_dump(include={"kind", "pool", "at_s", "replica"})}
                for number in result.missed
            ],
            "refused_changes": [{"number": number, "why": why} for number, why in result.refused.items()],
            "violations": result.violations,
        }
    )


def _figures(result: Result, records: Sequence[Record]) -> dict[str, Any]:
    scenario = result.scenario
    found = asdict(figures.compute(records, result.window, Slo(scenario.slo_ttft_s, scenario.slo_latency_s)))
    parts = [_parts(record) for record in records if record.timings is not None and record.messages]
    largest = Counter(max(PARTS, key=one.__getitem__) for one in parts)
    found["largest_part_of_ttft"] = {name: count / len(parts) for name, count in sorted(largest.items())}
    found["left_without_a_token"] = sum(one.cancelled and not one.messages for one in result.measured(records))
    return found | {"first_errors": {one.error_type: one.error for one in reversed(records) if one.error}}


def _parts(record: Record) -> dict[str, float]:
    """Return the parts of the time to the first token: until the engine begins, reading the prompt, the rest."""
    assert record.timings is not None and record.ttft_s is not None, "the answer is whole"
    waited_s = record.timings.first_scheduled_ns / 1e9 - record.sent_s
    prefill_s = (record.timings.first_token_ns - record.timings.first_scheduled_ns) / 1e9
    return {"queue": waited_s, "prefill": prefill_s, "other": record.ttft_s - prefill_s - waited_s}


def text(report: Mapping[str, Any]) -> str:
    """Format a report for people."""
    rows = []
    for name, found in {"all": report["all"], **report["personas"]}.items():
        percentiles = [_ms(found[spread][q]) for spread in SPREADS for q in ("p50", "p95", "p99")]
        rows.append((name, found["requests"], found["ok"], *percentiles, number(found["output_tokens_per_s"], 0)))
    header = ("persona", "requests", "ok", "TTFT p50", "p95", "p99", "ITL p50", "p95", "p99", "e2e p50", "p95", "p99")
    everyone = report["all"]
    good = math.nan if everyone["good_fraction"] is None else everyone["good_fraction"]
    parts = ", ".join(f"{name} {share(part)}" for name, part in everyone["largest_part_of_ttft"].items())
    errors = "; ".join(f"{count} {everyone['first_errors'][name]}" for name, count in everyone["errors"].items())
    lines = [
        f"{report['scenario']}: {report['duration_s']:g} simulated seconds, seed {report['seed']}; times in ms",
        table(rows, (*header, "tok/s")),
        f"  requests/s {number(everyone['requests_per_s'], 2)}; goodput {number(everyone['goodput_per_s'], 2)} "
        f"requests/s, {share(good)} of those whose senders did not leave, under "
        f"TTFT {everyone['slo']['ttft_s'] * 1e3:g} ms and latency {everyone['slo']['latency_s']:g} s",
        f"  largest part of the time to first token: {parts or '-'}",
        f"  not answered: {errors or 'none'}; left: {everyone['cancelled']}, "
        f"{everyone['left_without_a_token']} of them without a token",
    ]
    lines += [f"  {name}: {count}" for name, count in report["counts"].items()]
    for pool, found in report["pools"].items():
        wanted = [f"{count} at {at_s:g} s" for at_s, name, count, _ in report["decisions"] if name == pool]
        lines.append(
            f"  pool {pool}: {number(found['replica_hours'], 2)} replica-hours, cost {number(found['cost'], 2)}; "
            f"at most {found['most_present']} replicas and {found['most_waiting']} waiting"
            + (f"; wanted {', '.join(wanted[:24])}{' …' if len(wanted) > 24 else ''}" if wanted else "")
        )
    if report["cost"]:
        per = math.nan if report["cost_per_1000_tokens"] is None else report["cost_per_1000_tokens"]
        lines.append(f"  cost {number(report['cost'], 2)}, {number(per, 5)} per 1,000 tokens")
    for one in report["releases"]:
        where = f"{one['name']} at gateway {one['gateway']}"
        lines.append(f"  release {where}: {one['state']} {one['rolled_back']}".rstrip())
    made = report["tokens_per_step"].items()
    lines += [f"  drafts of {pool}: {per:.1f} tokens a step of a sequence alone" for pool, per in made if per > 1]
    lines += [f"  fidelity of {pool}: {words(found)}" for pool, found in report["fidelity"].items()]
    for one in report["missed_faults"]:
        what = f"{one['kind']} of {one['pool']} at {one['at_s']:g} s"
        lines.append(f"  faults.{one['number']} ({what}) hit no replica")
    lines += [f"  changes.{one['number']} was not made: {one['why']}" for one in report["refused_changes"]]
    broken = [f"  VIOLATED {count} times: {what}" for what, count in report["violations"].items()]
    return "\n".join([*lines, *(broken or ["  invariants: all held"])])


def words(found: Mapping[str, Any]) -> str:
    """Say how far forecasts were from real runs; see fidelity.py."""
    if not found:
        return "unknown, no run of such a replica was compared"
    told = {"TTFT p95": "ttft_p95", "end to end mean": "latency_mean", "end to end p95": "latency_p95"}
    keys = {name: f"{figure}_error" for name, figure in told.items()}
    # A comparison of before December 2026 has no mean.
    errors = ", ".join(f"{name} {found[key]:+.1%}" for name, key in keys.items() if key in found)
    return f"at worst {errors}, where it was compared with real runs ({found['when']}, {found['machine']})"


def plot(result: Result, path: Path) -> None:
    """Draw replicas, requests and times to first token over the run, to a file that ``check_plot`` has checked."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        chart = Figure(figsize=(9, 8))
        axes = chart.subplots(3, 1, sharex=True)
        for pool in result.scenario.pools:
            samples = [sample for sample in result.samples if sample.pool == pool]
            for axis, name in zip((0, 0, 1, 1), ("wanted", "ready", "running", "waiting"), strict=True):
                values = [getattr(sample, name) for sample in samples]
                axes[axis].step([sample.at_s for sample in samples], values, label=f"{pool} {name}", where="post")
        for name, records in result.records.items():
            dots = [(record.intended_s - BEGAN_S, record.ttft_s) for record in records if record.ttft_s is not None]
            axes[2].plot(*zip(*dots, strict=True) if dots else ((), ()), ".", markersize=2, label=name)
        axes[2].axhline(result.scenario.slo_ttft_s, color=GREY, linestyle="--", linewidth=1, label="target, P95")
        for axis, title in zip(axes, ("Replicas", "Requests", "Time to first token, s"), strict=True):
            axis.set_title(title)
            axis.legend(fontsize=7, ncol=4)
        axes[2].set_xlabel(f"simulated seconds · {result.scenario.name}, seed {result.seed}")
        chart.tight_layout()
        chart.savefig(path)


def compared(first: Result, second: Result, told: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Compare two runs of the same people: their figures side by side, and request by request the mean differences of
    those that both answered after the warm-up, with half the width of their 95 % confidence interval, in seconds."""
    spreads = [(name, q) for name in SPREADS for q in ("p50", "p95", "p99")]
    rows = [(f"{name.removesuffix('_s')} {q}, ms", *(_ms(one["all"][name][q]) for one in told)) for name, q in spreads]
    for name in ("requests", "ok", "failed", "cancelled", "output_tokens_per_s", "goodput_per_s"):
        rows.append((name, *(f"{one['all'][name]:g}" for one in told)))
    rows.append(("cost", *(f"{one['cost']:.3f}" for one in told)))
    lines, found = [table(rows, ("", "first", "second"))], {}
    for name in sorted(first.records.keys() & second.records.keys()):
        before, after = (_answered(result, name) for result in (first, second))
        pairs = [(one, after[sender]) for sender, one in before.items() if sender in after]
        for what in ("ttft_s", "latency_s") if len(pairs) > 1 else ():
            differences = [getattr(b, what) - getattr(a, what) for a, b in pairs]
            mean = sum(differences) / len(pairs)
            width = 1.96 * math.sqrt(sum((one - mean) ** 2 for one in differences) / (len(pairs) - 1) / len(pairs))
            found[f"{name} {what}"] = {"pairs": len(pairs), "mean_s": round(mean, 9), "half_width_s": round(width, 9)}
            lines.append(f"  {name} {what}: {1e3 * mean:+.2f} ± {1e3 * width:.2f} ms in {len(pairs)} requests")
    return "\n".join(lines), found


def _answered(result: Result, persona: str) -> dict[tuple[int | None, int], Record]:
    return {(one.user, one.nth): one for one in result.measured(result.records[persona]) if one.ok}


def _ms(seconds: float | None) -> str:
    return ms(math.nan if seconds is None else seconds)


def _rounded(value: Any) -> Any:
    """Return JSON without nan, and without digits that mean nothing."""
    written = json.dumps(value)
    return json.loads(written, parse_float=lambda text: round(float(text), 9), parse_constant=lambda _: None)

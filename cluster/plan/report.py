"""A plan for people: tables and a plot."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cluster.plan.planner import PoolPlan
from cluster.plan.scenario import HOURS
from contract import step_model
from contract.errors import InvalidArgument, NotFound

SUFFIXES = (".svg", ".png", ".pdf")


def described(plan: PoolPlan, currency: str) -> str:
    """Return the tables of one pool."""
    at, cost = plan.forecast, plan.cost
    origin = "measured" if plan.source == "measured" else f"an ESTIMATE, {plan.source}"
    if plan.source != step_model.ROOFLINE:
        origin += f"; its points are within {plan.error_p50_percent:.0f} % (p50), {plan.error_p95_percent:.0f} % (p95)"
    shares = ", ".join(f"{name} {part:.0%}" for name, part in plan.shares.items())
    tokens_per_s = plan.rate * (1 - plan.refused) * plan.output_tokens
    latencies = f"TTFT p50 {at.ttft_p50_s:.3f}, p95 {at.ttft_p95_s:.3f}; ITL mean {at.itl_mean_s:.4f}"
    rows = [
        ("machine", plan.machine),
        ("step model", origin),
        ("forecasts", _errors(plan.checked)),
        ("a request", f"{plan.input_tokens:.0f} tokens in, {plan.output_tokens:.0f} out, in the mean"),
        ("one replica", f"{plan.rate:.3g} requests/s, {tokens_per_s:.0f} tokens/s out"),
        ("its batch", f"{at.sequences:.1f} sequences, busy {at.busy:.0%} of the time; a step is {shares}"),
        ("seconds", f"{latencies}, p95 {at.itl_p95_s:.4f}; end to end p95 {at.e2e_p95_s:.2f}"),
        ("bounds", f"{plan.slots} slots; KV cache for {plan.kv_sequences:.0f} sequences; ITL for {plan.decode_batch}"),
        ("binds", f"{plan.binds}; {plan.moves}"),
        ("peak", f"{plan.requests_per_s[plan.hour]:.3g} requests/s, {plan.little:.0f} at once (Little's law)"),
        ("replicas", f"{max(plan.replicas)} at the peak, with {plan.headroom:.0%} headroom"),
    ]
    if plan.others:
        others = "; ".join(f"hour {one.hour}: {one.rate:.3g} requests/s ({one.binds})" for one in plan.others)
        rows.insert(9, ("other mixes", f"above is hour {plan.hour}, with the most work; {others}"))
    if plan.refused:
        rows.insert(4, ("refused", f"{plan.refused:.2%} of the requests, longer than {plan.longest} tokens"))
    if plan.tokens_per_step > 1:
        told = f"{plan.tokens_per_step:.1f} tokens a step of a sequence alone, by the assumed acceptance of the texts"
        rows.insert(3, ("drafts", told))
    if cost.day:
        each, of_answers = (_priced(per, currency) for per in (cost.per_1000_tokens, cost.per_1000_output_tokens))
        elastic = f"{cost.on_demand_hours:.0f} on-demand hours, {cost.spot_hours:.0f} spot hours a day"
        rows.append(("cost", f"{currency}{cost.month:,.0f} a month; {each} per 1,000 tokens, {of_answers} of answers"))
        rows.append(("paid for", f"{cost.reserved} reserved replicas; {elastic}"))
    lines = [f"pool {plan.name}", *(f"  {name:<16}{text}" for name, text in rows), "", _row("hour", range(HOURS), 6)]
    lines.append(_row("requests/s", (f"{rate:.3g}" for rate in plan.requests_per_s), 6))
    if plan.others:
        lines.append(_row("one replica's", (f"{rate:.3g}" for rate in plan.rates), 6))
    lines += [_row("replicas", plan.replicas, 6), ""]
    lines.append(_row(f"{'cost' if cost.day else 'replica-hours'}, if", ("-20 %", "+20 %"), 9))
    for name, changes in plan.sensitivity.items():
        lines.append(_row(name, ("missed" if change is None else f"{change:+.0f} %" for change in changes), 9))
    return "\n".join([*lines, "", f"  check: {plan.check}"])


def _priced(amount: float | None, currency: str) -> str:
    return "-" if amount is None else f"{currency}{amount:.4g}"


def _errors(checked: Mapping[str, float]) -> str:
    if not checked:
        return "not compared with the bench yet; the last line says how"
    return "off by, at worst beside the bench: " + ", ".join(f"{name} {error:+.0%}" for name, error in checked.items())


def _row(name: str, cells: Iterable[object], width: int) -> str:
    return f"  {name:<18}" + "".join(f" {cell!s:>{width - 1}}" for cell in cells)


def check_plot(path: Path) -> None:
    """Raise InvalidArgument for a file that cannot be drawn to, NotFound without matplotlib: before a plan or a
    simulation takes its minute."""
    if path.suffix not in SUFFIXES:
        raise InvalidArgument("plot", f"must end in {', '.join(SUFFIXES)}, got {path}")
    if not path.absolute().parent.is_dir():
        raise InvalidArgument("plot", f"must be in a folder that exists, got {path}")
    if importlib.util.find_spec("matplotlib") is None:
        raise NotFound("plots need matplotlib: pip install -r requirements/bench.txt")


def plot(plans: Sequence[PoolPlan], path: Path) -> None:
    """Draw replicas and requests per second by hour, to a file that ``check_plot`` has checked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3 * len(plans)), layout="tight")
    for axis, plan in zip(figure.subplots(len(plans), 1, squeeze=False)[:, 0], plans, strict=True):
        axis.bar(range(HOURS), plan.replicas, color="#0072B2")
        axis.set(title=f"{plan.name}: {plan.machine}, {plan.source}", xlabel="hour", ylabel="replicas (bars)")
        right = axis.twinx()
        right.plot(range(HOURS), plan.requests_per_s, color="#E69F00")
        right.set(ylabel="requests/s (line)", ylim=(0, None))
    try:
        figure.savefig(path)
    except OSError as exc:
        raise InvalidArgument("plot", f"must be a file that can be written, got {path}: {exc.strerror}") from exc

"""Plot measurements: the throughput-latency curve, distributions, and a timeline of what ``run`` or ``sweep`` wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import Record
from contract.errors import InvalidArgument, NotFound

# Okabe and Ito's colours, distinguishable with colour vision deficiencies.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#666666"
BIN_S = 0.25
STYLE = {
    **{"figure.dpi": 130, "font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "legend.frameon": False},
    **{"axes.spines.top": False, "axes.spines.right": False},
    **{"axes.titlelocation": "left", "axes.titleweight": "bold"},
}


def draw(result: Path, out: Path) -> list[Path]:
    """Plot a result; return the files. Raises InvalidArgument: it is no result, NotFound: there is no matplotlib."""
    plt = _matplotlib()
    runs = _read(result)
    out.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        figures = {"throughput-latency": _curve(plt, runs)} if len(runs) > 1 else {}
        figures |= {"distributions": _distributions(plt, runs), "timeline": _timeline(plt, runs[-1])}
        paths = [out / f"{result.stem}-{name}.png" for name in figures]
        for path, figure in zip(paths, figures.values(), strict=True):
            figure.tight_layout(rect=(0, 0.03, 1, 1))
            _caption(figure, runs[-1])
            figure.savefig(path)
            plt.close(figure)
    return paths


def ranges(rows: Mapping[str, Sequence[float]], title: str, path: Path) -> None:
    """Plot the median of each row's values, with a line from the smallest to the largest, as a small SVG."""
    plt = _matplotlib()
    path.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context({**STYLE, "svg.fonttype": "none", "svg.hashsalt": "trident", "axes.grid.axis": "x"}):
        figure, axis = plt.subplots(figsize=(8, 0.8 + 0.22 * len(rows)))
        middle = [float(np.median(values)) for values in rows.values()]
        axis.barh(list(rows), middle, color=BLUE, alpha=0.7)
        low, high = ([edge(values) for values in rows.values()] for edge in (min, max))
        axis.hlines(list(rows), low, high, color=GREY, linewidth=2)
        for row, value in enumerate(middle):
            axis.annotate(f" {value:.3g}", (high[row], row), va="center", fontsize=7)
        axis.set_title(title)
        axis.invert_yaxis()
        axis.tick_params(labelsize=7)
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def _matplotlib() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as exc:
        raise NotFound("plots need matplotlib: pip install -r requirements/bench.txt") from exc
    return plt


def _read(result: Path) -> list[dict]:
    try:
        runs = json.loads(result.read_text())
        for run in runs:
            run["records"] = [Record.from_json(record) for record in run["records"]]
            run["figures"]["ttft_s"]["p50"], run["host_load"]["others"]
    except OSError as exc:
        raise InvalidArgument("result", f"must be a readable file, got {result}: {exc.strerror}") from exc
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise InvalidArgument("result", f"must be a file written by run or sweep, got {result} ({exc!r})") from exc
    if not any(run["records"] for run in runs):
        raise InvalidArgument("result", f"must have records, got none in {result}")
    return runs


def _caption(figure, run: dict) -> None:
    conditions, load = run["conditions"], run["workload"]
    others = run["host_load"]["others"] + run["host_load"]["stolen"]
    text = (
        f"engine {conditions.get('engine', '?')} · in {load['input_tokens']}, out {load['output_tokens']} · "
        f"{conditions['cpu']}, {conditions['cores']} cores · {run['when']} · "
        f"other processes used {others:.0%} of the machine"
    )
    figure.text(0.01, 0.005, text, fontsize=6.5, color=GREY)


def _curve(plt, runs: list[dict]) -> Any:
    """Plot latency over throughput, one point per load."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.8))
    rate = [run["figures"]["output_tokens_per_s"] for run in runs]
    panels = (("ttft_s", "Time to first token"), ("itl_s", "Inter-token latency"), ("latency_s", "End to end"))
    for axis, (name, title) in zip(axes, panels, strict=True):
        for quantile, colour in (("p50", BLUE), ("p95", ORANGE), ("p99", RED)):
            values = [run["figures"][name][quantile] * 1e3 for run in runs]
            axis.plot(rate, values, "o-", color=colour, label=quantile, markersize=4, linewidth=1.4)
        top = [run["figures"][name]["p99"] * 1e3 for run in runs]
        for run, x, y in zip(runs, rate, top, strict=True):
            axis.annotate(run["name"], (x, y), textcoords="offset points", xytext=(0, 5), ha="center", fontsize=7)
        axis.set(title=title, xlabel="output tokens/s", ylabel="ms")
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
    slo = runs[0]["figures"]["slo"]
    for axis, limit_s in ((axes[0], slo["ttft_s"]), (axes[2], slo["latency_s"])):
        if axis.get_ylim()[1] > limit_s * 500:  # the curve comes near it
            axis.axhline(limit_s * 1e3, color=GREY, linestyle="--", linewidth=1)
            place = {"xytext": (3, 3), "textcoords": "offset points"}
            axis.annotate("SLO, P95", (0, limit_s * 1e3), **place, fontsize=7, color=GREY)
    closed = runs[0]["workload"]["loop"].startswith("closed")
    points = "at each point: requests in flight" if closed else None
    axes[0].legend(loc="upper left", title=points, title_fontsize=7, alignment="left")
    return figure


def _distributions(plt, runs: list[dict]) -> Any:
    """Plot cumulative distributions over logarithmic time."""
    from matplotlib.ticker import LogLocator

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.8))
    shown = runs if len(runs) <= 6 else [runs[round(n * (len(runs) - 1) / 5)] for n in range(6)]
    colours = plt.get_cmap("viridis")(np.linspace(0.0, 0.85, len(shown)))
    for run, colour in zip(shown, colours, strict=True):
        begin_s, end_s = run["window"]
        records = [record for record in run["records"] if begin_s <= record.intended_s <= end_s]
        gaps = [gap for record in records for gap in record.gaps]
        per_token = np.repeat([gap / count for gap, count in gaps], [count for _, count in gaps])
        ttfts = [record.ttft_s for record in records if record.ttft_s is not None]
        for axis, values in zip(axes, (ttfts, per_token, [gap for gap, _ in gaps]), strict=True):
            ordered = np.sort(np.asarray(values)) * 1e3
            if ordered.size:
                axis.step(ordered, np.arange(1, ordered.size + 1) / ordered.size, color=colour, label=run["name"])
    titles = (("Time to first token", "share of requests"), ("Inter-token latency", "share of tokens"))
    for axis, (title, ylabel) in zip(axes, (*titles, ("Gap between messages", "share of messages")), strict=True):
        axis.set(title=title, xlabel="ms", ylabel=ylabel, ylim=(0, 1.01))
        if not axis.lines:  # answers that are not streamed have no gaps
            axis.text(0.5, 0.5, "no data", transform=axis.transAxes, ha="center", va="center", color=GREY)
            axis.set_xticks([])
            continue
        axis.set_xscale("symlog" if min(line.get_xdata().min() for line in axis.lines) <= 0 else "log")
        for level in (0.5, 0.95):
            axis.axhline(level, color=GREY, linewidth=0.6, linestyle=":")
        if (low := axis.get_xlim()[0]) < 0.01:
            axis.set_xlim(left=max(low, 0.01))
        axis.xaxis.set_major_formatter("{x:g}")
        low, high = axis.get_xlim()
        axis.xaxis.set_minor_locator(LogLocator(subs=(2, 5) if high < 30 * low else range(2, 10)))
        axis.xaxis.set_minor_formatter("{x:g}" if high < 30 * low else "")
    if len(shown) > 1:
        axes[0].legend(title="load", fontsize=7, loc="lower right")
    return figure


def _timeline(plt, run: dict) -> Any:
    """Plot tokens per second, requests in flight and times to first token over the run."""
    records, zero_s = run["records"], run["started_s"]
    figure, axes = plt.subplots(3, 1, figsize=(10, 6.2), sharex=True)
    last_s = max(record.ended_s for record in records) - zero_s
    edges = np.arange(0, last_s + BIN_S, BIN_S)
    instants = [(at_s - zero_s, count) for record in records for at_s, count in record.messages]
    if instants:
        tokens, _ = np.histogram([at for at, _ in instants], edges, weights=[count for _, count in instants])
        axes[0].stairs(tokens / BIN_S, edges, color=BLUE, fill=True, alpha=0.6)
    axes[0].set(title=f"{run['name']}: output tokens/s", ylabel="tokens/s")
    begins = sorted(record.intended_s - zero_s for record in records)
    ends = sorted(record.ended_s - zero_s for record in records)
    times = np.array(sorted(begins + ends))
    in_flight = np.searchsorted(begins, times, side="right") - np.searchsorted(ends, times, side="right")
    axes[1].step(times, in_flight, where="post", color=GREEN, label="in flight, client")
    gauges = run["server"]["gauges"] if run["server"] else []
    for name, colour in (("running", BLUE), ("waiting", RED)) if gauges else ():
        at, values = zip(*((instant - zero_s, seen[name]) for instant, seen in gauges), strict=True)
        axes[1].plot(at, values, "o", color=colour, markersize=3, label=f"{name}, server")
    axes[1].set(title="Requests", ylabel="requests")
    axes[1].set_ylim(0, 1.3 * max(1, *in_flight.tolist()))
    axes[1].yaxis.get_major_locator().set_params(integer=True)
    axes[1].legend(loc="upper right", fontsize=7, ncol=3)
    dots = [(r.intended_s - zero_s, r.ttft_s * 1e3) for r in records if r.ttft_s is not None]
    if dots:
        axes[2].plot(*zip(*dots, strict=True), ".", color=BLUE, markersize=4, label="time to first token")
    failed = [r.intended_s - zero_s for r in records if r.error]
    if failed:
        axes[2].plot(failed, [0] * len(failed), "x", color=RED, label="failed", clip_on=False)
    slo_ms = run["figures"]["slo"]["ttft_s"] * 1e3
    if dots and max(y for _, y in dots) > slo_ms / 2:
        axes[2].axhline(slo_ms, color=GREY, linestyle="--", linewidth=1, label="SLO, P95")
    axes[2].set(title="Time to first token, by intended instant of sending", ylabel="ms", xlabel="seconds")
    axes[2].set_ylim(0, 1.3 * axes[2].get_ylim()[1])  # room for the legend
    axes[2].legend(loc="upper right", fontsize=7, ncol=3)
    for axis in axes:
        axis.axvspan(0, max(0.0, run["window"][0] - zero_s), color=GREY, alpha=0.12, linewidth=0)
        axis.set_xlim(0, math.ceil(last_s * 10) / 10)
    return figure

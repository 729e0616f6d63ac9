"""The project's alert rules in a real Prometheus whose time is compressed: five minutes of a rule are ten seconds."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import yaml

RULES = Path(__file__).parents[1] / "monitoring" / "prometheus"
# Rules of what is out or full now. Objectives over hours and days stay out: a run is too short for them to clear.
FILES = ("saturation.rules.yml", "scaling.rules.yml")
COMPRESSION = 30
INTERVAL = "250ms"
STEP_S = 0.25  # between two values of a range query
_DURATION = re.compile(r"(?<=\[)(\d+)([smhd])(?=\])")
_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def compress(text: str) -> str:
    """Return rules with all durations shorter by COMPRESSION."""
    table = yaml.safe_load(text)
    for group in table["groups"]:
        for rule in group["rules"]:
            rule["expr"] = _DURATION.sub(lambda found: _shorter(found[0]), rule["expr"])
            if "for" in rule:
                rule["for"] = _shorter(rule["for"])
    return yaml.safe_dump(table)


def _shorter(duration: str) -> str:
    return f"{int(duration[:-1]) * _MS[duration[-1]] // COMPRESSION}ms"


def held_s(alert: str) -> float:
    """Return how many seconds, compressed, the condition of an alert must hold."""
    groups = yaml.safe_load((RULES / FILES[0]).read_text("utf-8"))["groups"]
    [rule] = [rule for group in groups for rule in group["rules"] if rule.get("alert") == alert]
    return float(_shorter(rule["for"])[:-2]) / 1000


def write(folder: Path, targets: Mapping[str, list[str]]) -> Path:
    """Write the configuration; return its path. targets: HOST:PORT by job."""
    for name in FILES:
        (folder / name).write_text(compress((RULES / name).read_text("utf-8")), "utf-8")
    jobs = [{"job_name": job, "static_configs": [{"targets": urls}]} for job, urls in targets.items()]
    times = {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL}
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump({"global": times, "rule_files": list(FILES), "scrape_configs": jobs}), "utf-8")
    return config


def spans(answer: Mapping, names: Mapping[str, str]) -> dict[str, list[tuple[float, float]]]:
    """Read a range query: when, in Unix seconds, each series was there without a pause, by ``ALERT PROCESS REPLICA`` as
    far as it has these labels. names: of processes by HOST:PORT."""
    found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for series in answer["data"]["result"]:
        metric, times = series["metric"], [float(at) for at, _ in series["values"]]
        instance = metric.get("instance", "")
        words = metric.get("alertname", ""), names.get(instance, instance), metric.get("replica", "")
        starts = [now for before, now in pairwise([-math.inf, *times]) if now - before > 1.5 * STEP_S]
        ends = [now for now, after in pairwise([*times, math.inf]) if after - now > 1.5 * STEP_S]
        found[" ".join(filter(None, words))] += zip(starts, ends, strict=True)
    return found

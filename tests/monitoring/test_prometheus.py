"""The rules by Prometheus' own tool, and every name in them and in the dashboard against what /metrics really says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

for needed in (
    "starlette",
    "uvicorn",
    "orjson",
    "pydantic",
    "prometheus_client",
    "opentelemetry.sdk",
    "httptools",
    "yaml",
):
    pytest.importorskip(needed)

import aiohttp
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cluster.scaling.scaler import Scaler
from cluster.scaling.settings import Settings as ScalerSettings
from tests.fakes.replica import FakeReplica
from tests.gateway.running import gateway

ROOT = Path(__file__).parents[2]
PROMETHEUS, DASHBOARD = ROOT / "monitoring" / "prometheus", ROOT / "monitoring" / "grafana" / "trident.json"
RULES = sorted(PROMETHEUS.glob("*.rules.yml"))
UNIT_TESTS = sorted(Path(__file__).parent.glob("*.test.yml"))
WORDS = {"by", "and", "or", "on", "bool", "ignoring", "group_left", "unless", "without", "inf"}
OWN = {"up", "ALERTS"}  # Prometheus' own series
FROM_ELSEWHERE = {"job", "instance", "alertname", "alertstate", "severity"}  # labels Prometheus adds


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not on PATH (Debian: the package prometheus has it)")
    return found


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.name)
def test_prometheus_accepts_the_rules(promtool: str, path: Path):
    run(promtool, "check", "rules", str(path))


def test_prometheus_accepts_the_example_of_what_to_scrape(promtool: str):
    run(promtool, "check", "config", str(PROMETHEUS / "prometheus.yml"))


@pytest.mark.slow  # hours of made-up traffic
@pytest.mark.parametrize("path", UNIT_TESTS, ids=lambda path: path.name)
def test_alerts_fire_when_they_should_and_only_then(promtool: str, path: Path):
    run(promtool, "test", "rules", str(path))


def test_prometheus_can_read_every_query_of_the_dashboard(promtool: str, tmp_path: Path):
    rules = [
        {"record": f"panel:{number}", "expr": expr.replace("$__rate_interval", "5m").replace("$instance", ".+")}
        for number, expr in enumerate(dashboard_queries())
    ]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    run(promtool, "check", "rules", str(path))


def rules() -> list[dict]:
    return [rule for path in RULES for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def dashboard_queries() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def test_counts_are_not_shown_as_percent():
    for panel in panels():
        defaults, overrides = panel["fieldConfig"]["defaults"], panel["fieldConfig"]["overrides"]
        apart = {one["matcher"]["options"] for one in overrides for item in one["properties"] if item["id"] == "unit"}
        for target in panel["targets"]:
            counts = "increase(" in target["expr"] and "/" not in target["expr"]
            assert not counts or defaults["unit"] != "percentunit" or target["refId"] in apart, panel["title"]


def queries() -> list[str]:
    return [rule["expr"] for rule in rules()] + dashboard_queries()


def selectors(expr: str) -> Iterator[tuple[str, dict[str, tuple[str, str]]]]:
    """(metric, label → (operator, value)) of each selector in an expression."""
    expr = re.sub(r"\b(by|on|ignoring|without|group_left)\s*\([^)]*\)", " ", expr)
    for name, call, inside in re.findall(
        r"([a-zA-Z_][a-zA-Z0-9_:]*)\s*(\()?(?:\{([^}]*)\})?", expr_without_values(expr)
    ):
        if not call and name not in WORDS:
            matchers = re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"\x00(\d+)"', inside)
            values = re.findall(r'"((?:[^"\\]|\\.)*)"', expr)
            yield name, {label: (operator, values[int(place)]) for label, operator, place in matchers}


def expr_without_values(expr: str) -> str:
    """Quoted values become their place in the expression, ranges go."""
    count = iter(range(10_000))
    expr = re.sub(r'"(?:[^"\\]|\\.)*"', lambda _: f'"\x00{next(count)}"', expr)
    return re.sub(r"\[[^\]]*\]", "", expr)


def test_selectors_are_found():
    found = list(selectors('sum by (le) (rate(a_b{x="1", y=~"p|}q"}[5m])) / on (x) up > bool 3 or vector(0)'))
    assert found == [("a_b", {"x": ("=", "1"), "y": ("=~", "p|}q")}), ("up", {})]


async def page(tmp_path: Path) -> tuple[set[str], dict[str, list[dict[str, str]]]]:
    """Names of all series that a gateway can have, and the labels of those that there are after a few requests."""
    config = '[prices]\nreplica_hour = 2.0\ncurrency = "EUR"\n[samples.checks]\n'
    async with FakeReplica() as replica, gateway(replica, config=config, batch_db=tmp_path / "b") as running:
        body = {"model": "demo", "prompt": "one two", "max_tokens": 3}
        assert (await running.post("/v1/completions", body))[0] == 200
        assert (await running.post("/v1/completions", {**body, "max_tokens": 0}))[0] == 400
        scaler = Scaler(ScalerSettings(gateways=running.monitoring_url))
        async with aiohttp.ClientSession() as http:
            async with http.post(f"{running.base_url}/v1/completions", json={**body, "stream": True}) as answer:
                assert (await answer.text()).endswith("data: [DONE]\n\n")
            await scaler.reader.read(http)
        scaler.step()
        running.service.metrics.registry.register(scaler)
        text = await running.metrics_page()
    names, samples = set(), defaultdict(list)
    for family in text_string_to_metric_families(text):
        endings = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(family.type, ("",))
        names |= {family.name + ending for ending in endings}
        for sample in family.samples:
            samples[sample.name].append(sample.labels)
    return names, samples


def documented() -> dict[str, dict[str, set[str]]]:
    """The replicas' metrics, of which tests/end_to_end/test_metrics.py asserts every row: name → label → values."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    text = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    for name, label, value in re.findall(r"^\| `(\w+)(?:\{(\w+)=(\w+)\})?` \|", text, re.MULTILINE):
        for ending in ("_bucket", "_count", "_sum") if name.endswith(("_seconds", "_len")) else ("",):
            found[name + ending][label].add(value)
    return found


async def test_rules_and_dashboard_ask_for_what_is_there(tmp_path: Path):
    names, samples = await page(tmp_path)
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    replicas = documented()
    for expr in queries():
        for name, matchers in selectors(expr):
            assert name in names | recorded | OWN | replicas.keys(), f"{name} is nowhere exported: {expr}"
            ours = {label: match for label, match in matchers.items() if label not in FROM_ELSEWHERE}
            for label, (operator, value) in ours.items():
                place = f"{name}{{{label}{operator}{value}}} in {expr}"
                if name in samples:
                    there = {sample.get(label) for sample in samples[name]}
                    assert None not in there, f"there is no such label: {place}"
                    # What stands for itself has to be there; refusals and errors have not happened on this page.
                    if operator == "=" and label in ("le", "direction", "outcome", "error_type"):
                        assert value in there, f"there is no such value: {place}"
                elif name in replicas:
                    assert operator != "=" or value in replicas[name][label], place
                    assert operator != "=~" or set(value.split("|")) <= replicas[name][label], place


def test_every_gateway_metric_is_on_the_dashboard_or_in_a_rule():
    asked = {name for expr in queries() for name, _ in selectors(expr)}
    from prometheus_client import CollectorRegistry

    from gateway.batch.worker import BatchMetrics

    registry = CollectorRegistry()
    BatchMetrics(registry, lambda: 0.0)
    for family in registry.collect():
        assert {family.name, f"{family.name}_total"} & asked, f"no panel or rule uses {family.name}"


def test_reasons_of_refusals_are_those_that_admission_gives():
    [rule] = [rule for rule in rules() if rule.get("alert") == "TridentQueueFull"]
    [reasons] = [matchers["reason"][1] for _, matchers in selectors(rule["expr"])]
    source = (ROOT / "gateway" / "admission" / "fair_admission.py").read_text("utf-8")
    for reason in set(reasons.split("|")) - {"Overloaded"}:
        assert f'"{reason}"' in source, f"admission gives no {reason!r}"


def test_an_objective_has_all_its_windows_and_every_alert_says_what_it_is():
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for objective in ("unavailable", "errors", "slow_first_token", "slow"):
        alerts = [r for r in rules() if "alert" in r and r["labels"].get("objective") == objective]
        burns = {r["labels"]["window"]: r["labels"]["severity"] for r in alerts if r["alert"].endswith("Burns")}
        assert burns == {"1h": "critical", "6h": "critical", "1d": "warning", "3d": "warning"}
        assert {r["labels"]["severity"] for r in alerts if r["alert"].endswith("Objective")} == {"warning", "critical"}
        for window in ("5m", "30m", "1h", "2h", "6h", "1d", "3d", "30d"):
            assert f"trident:{objective}:ratio_rate{window}" in recorded
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical") and rule["annotations"]["summary"]


def test_the_dashboards_panels_stand_beside_each_other_and_ask_the_chosen_source():
    board = json.loads(DASHBOARD.read_text())
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert [one["name"] for one in board["templating"]["list"]] == ["datasource", "instance"]
    for panel in panels():
        assert panel["title"] and panel["description"] and panel["targets"], panel
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert {one["datasource"]["uid"] for one in [panel, *panel["targets"]]} == {"${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])

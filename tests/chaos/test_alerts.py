"""The project's rules in compressed time."""

import shutil
import subprocess

import pytest
import yaml

from chaos import alerts


def test_durations_become_shorter_and_nothing_else_changes():
    text = (alerts.RULES / alerts.FILES[0]).read_text()
    before, after = yaml.safe_load(text), yaml.safe_load(alerts.compress(text))
    rules = [[rule for group in table["groups"] for rule in group["rules"]] for table in (before, after)]
    assert [one["alert"] for one in rules[0]] == [one["alert"] for one in rules[1]]
    by_name = {one["alert"]: one for one in rules[1]}
    assert by_name["TridentGatewayDown"]["for"] == "2000ms" and alerts.held_s("TridentGatewayDown") == 2.0
    assert "[10000ms]) > 20" in by_name["TridentQueueGrows"]["expr"]


@pytest.mark.slow
def test_prometheus_accepts_them(tmp_path):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not on PATH (Debian: the package prometheus has it)")
    config = alerts.write(tmp_path, {"trident-gateway": ["127.0.0.1:1"]})
    done = subprocess.run([promtool, "check", "config", str(config)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_times_at_which_an_alert_fired_are_read():
    series = {"metric": {"alertname": "Down"}, "values": [[1.0, "1"], [1.25, "1"], [1.5, "1"]]}
    assert alerts.spans({"data": {"result": [series]}}, {}) == {"Down": [(1.0, 1.5)]}


def test_an_alert_that_fires_twice_did_not_fire_between_and_is_that_of_its_process():
    ats, gateway = (13.0, 13.25, 13.5, 58.0), {"alertname": "Out", "instance": "127.0.0.1:9", "replica": "a:1"}
    first = {"metric": gateway, "values": [[at, "1"] for at in ats]}
    second = {"metric": gateway | {"instance": "127.0.0.1:8"}, "values": [[30.0, "1"]]}
    found = alerts.spans(
        {"data": {"result": [first, second]}}, {"127.0.0.1:9": "gateway-1", "127.0.0.1:8": "gateway-2"}
    )
    assert found == {"Out gateway-1 a:1": [(13.0, 13.5), (58.0, 58.0)], "Out gateway-2 a:1": [(30.0, 30.0)]}

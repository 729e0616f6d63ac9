"""What is known of the error of forecasts."""

from __future__ import annotations

import json

from simulator import fidelity
from simulator.scenario import of


def test_what_was_compared_is_told_by_pool(tmp_path, monkeypatch):
    (tmp_path / "known.json").write_text(json.dumps({"demo": {"ttft_p95_error": 0.1}}))
    monkeypatch.setattr(fidelity, "KNOWN", tmp_path / "known.json")
    pools = {name: {"step": {"step_s": 0.1}} for name in "ab"}
    scenario = of({"duration_s": 1.0, "pools": pools, "personas": {"p": {"users": 1}}})
    measured = {**scenario.pools, "a": scenario.pools["a"].model_copy(update={"engine": "demo"})}
    scenario = scenario.model_copy(update={"pools": measured})
    assert fidelity.known(scenario) == {"a": {"ttft_p95_error": 0.1}, "b": {}}

"""How far forecasts were from real runs: kept beside the code, and told with every forecast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from simulator.scenario import Scenario

KNOWN = Path(__file__).with_name("fidelity.json")


def known(scenario: Scenario) -> dict[str, Any]:
    """Return for each pool what the comparison of its engine with real runs found; nothing where there is none."""
    compared = json.loads(KNOWN.read_text("utf-8")) if KNOWN.exists() else {}
    return {name: compared.get(pool.engine, {}) for name, pool in scenario.pools.items()}

"""Planted bugs in the queue and the slots: the simulator finds each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.admission import concurrency
from gateway.admission.concurrency import Concurrency
from gateway.admission.fair_queue import FairQueue
from gateway.admission.pool_slots import PoolSlots
from simulator.run import Result
from tests.simulator.test_run import CHAT, simulated

TURNS = """
salt = "9f3c0d5e2a71b8446c1fd0a3e97b5a28"
[admission]
max_wait_s = 5.0
aging_s = 3.0
max_in_flight_of_class = { 5 = 12 }
[classes.bulk]
priority = 5
share = 0.5
[orgs.b.teams.web]
weight = 3.0
[orgs.c.teams.web]
class = "bulk"
"""


def turns(folder: Path, orgs: str) -> Result:
    """Run people of these organisations, who want more slots than there are."""
    (folder / "gateway.toml").write_text(TURNS)
    busy = CHAT | {"arrivals": f"poisson:{12 / len(orgs)}", "output": "60"}
    people = {org: busy | {"key": f"{org}/web/site"} for org in orgs}
    gateway = {"policy": "gateway.toml", "settings": {"max_in_flight": "50"}}
    pool = {"slots": 10, "send_s": 0.5, "step": {"step_s": 0.05}}
    return simulated(folder=folder, gateway=gateway, personas=people, pools={"main": pool}, duration_s=60.0)


@pytest.mark.slow  # a simulated minute of each
@pytest.mark.parametrize(
    ("orgs", "owner", "name", "plant", "violation"),
    [
        (
            "abc",
            concurrency,
            "caps",
            lambda real: lambda *_: {},
            "class 5 at main had more requests under way than max_in_flight",
        ),
        (
            "abc",
            Concurrency,
            "_most",
            lambda real: lambda caps, pool: real(caps, pool) + 1000,
            "all had more requests under way than max_in_flight",
        ),
        (
            "abc",
            PoolSlots,
            "_limits",
            lambda real: lambda slots: real(slots)._replace(limit=100, open=100),
            "more slots were given than are there",
        ),
        (
            "a",
            PoolSlots,
            "_limits",
            lambda real: lambda slots: real(slots)._replace(share=100),
            "a tenant got more slots than tenant_share",
        ),
        ("c", PoolSlots, "_share", lambda real: lambda *_: 100, "a class got more slots than its share"),
        (
            "abc",
            FairQueue,
            "_by_urgency",
            lambda real: lambda queue, now_s: real(queue, now_s)[::-1],
            "a slot went to a less urgent class than one that waited",
        ),
        (
            "ab",
            FairQueue,
            "_turn",
            lambda real: lambda _, heads: heads[min(heads)],
            "a tenant got turns beyond its share while another one waited",
        ),
        ("ab", FairQueue, "expire", lambda real: lambda *_: [], "a request got a slot after its deadline"),
    ],
    ids="class gateway slots tenant share order fair deadline".split(),
)
def test_a_slot_for_the_wrong_request_is_found(monkeypatch, tmp_path: Path, orgs, owner, name, plant, violation):
    assert not turns(tmp_path, orgs).violations
    monkeypatch.setattr(owner, name, plant(getattr(owner, name)))
    assert violation in turns(tmp_path, orgs).violations

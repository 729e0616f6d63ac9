"""The classes that serve as permits, turns and keys have every member of the protocols."""

from __future__ import annotations

import time

from contract.generation import GenerationRequest
from gateway.admission.budget_store import MemoryStore
from gateway.admission.concurrency import Concurrency
from gateway.admission.fair_admission import FairAdmission
from gateway.admission.permit import Keys, Permit, Turn
from gateway.config.configuration import Configuration
from gateway.config.tenant import Tenant


def members(protocol: type) -> set[str]:
    return {name for name in {*vars(protocol), *protocol.__annotations__} if not name.startswith("_")}


async def test_an_admitted_request_is_a_permit_with_turns():
    admission = FairAdmission(MemoryStore(time.monotonic), Concurrency(9), time.monotonic)
    permit = await admission.admit([GenerationRequest("one", max_tokens=5)] * 2, Tenant())
    assert members(Permit) <= set(dir(permit))
    assert all(members(Turn) <= set(dir(turn)) for turn in permit.turns)
    assert len(permit.turns) == len(permit.requests) == len(permit.counts) == 2
    await permit.turns[0].begin()  # the first choice has its slot already
    permit.settle(None)
    permit.settle(None)
    assert admission.running == 0


def test_a_configuration_is_a_table_of_keys():
    configuration = Configuration(None, {}, {"": "a:1"})
    assert members(Keys) <= set(dir(configuration))
    assert configuration.named("anonymous", "") == Tenant() and configuration.named("other", "") is None

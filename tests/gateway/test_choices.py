"""The choices of one permit: read together, settled once, a prompt counted once."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from contract.errors import EngineFailed
from contract.generation import Usage
from gateway.choices import ChoiceDelta, together, total
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.generation_runtime import requests, runtime
from tests.gateway.running import until


async def test_choices_are_merged_and_the_permit_is_settled_with_the_last():
    async with FakeReplica() as replica, runtime(replica.url) as here:
        choices = await here.choices(requests(3))
        read = [item async for item in choices]
        assert {item.choice for item in read} == {0, 1, 2} and isinstance(read[0], ChoiceDelta)
        choices.close()
        assert here.idle
        assert here.metric("trident_gateway_tokens_total", tenant="anonymous", direction="output", source="engine") == 9
        prompts = here.metric("trident_gateway_tokens_total", tenant="anonymous", direction="input", source="engine")
        assert prompts == choices.generations[0].usage.input_tokens  # once, for three choices


@pytest.mark.parametrize("count", [1, 2])
async def test_a_closed_request_is_freed_without_the_garbage_collector(count: int):
    async with FakeReplica() as replica, runtime(replica.url) as here:
        choices = await here.choices(requests(count))
        await together(choices, "request-1")
        choices.close()
        held = [choices, *choices.generations, choices.generations[0]._permit]
        gc.disable()
        try:
            left = [weakref.ref(one) for one in held]
            held.clear()
            del choices
            await asyncio.sleep(0)
            assert not [one for one in left if one() is not None]
        finally:
            gc.enable()


async def test_together_joins_the_deltas_of_each_choice():
    async with FakeReplica() as replica, runtime(replica.url) as here:
        choices = await here.choices(requests(2))
        assert [one.text for one in await together(choices, "request-1")] == [" one two one"] * 2
        choices.close()


async def test_the_first_error_ends_all_choices():
    scripts = iter([Script((" a",), stall_after=0), Script((), refuse=EngineFailed("broken"))])
    async with FakeReplica(lambda seen: next(scripts)) as replica, runtime(replica.url) as here:
        choices = await here.choices(requests(2))
        with pytest.raises(EngineFailed) as caught:
            await together(choices, "request-1")
        choices.close(caught.value)
        await until(lambda: replica.counts.running == 0)
        assert here.idle


async def test_closing_before_reading_gives_everything_back():
    async with FakeReplica() as replica, runtime(replica.url) as here:
        choices = await here.choices(requests(2))
        assert here.admission.running
        choices.close()
        await asyncio.sleep(0)
        assert here.idle and replica.counts.started == 0


def test_a_prompt_counts_once_with_the_largest_count():
    usages = [Usage(5, 1, 2), None, Usage(6, 2, 3), Usage(1, 4, 0)]
    assert total(usages, ["p", "p", "p", "q"]) == Usage(7, 7, 3)
    assert total([None], ["p"]) is None

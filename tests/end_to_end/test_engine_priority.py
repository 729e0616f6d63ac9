"""Classes at a full engine, behind the real gateway: class 0 goes first, whatever class 9 asks for."""

from __future__ import annotations

import asyncio

import pytest

from gateway.config.tenant import Tenant
from server.replica import Replica
from tests.end_to_end.watching import halted
from tests.gateway.admission.test_request_class import sent_by_grpc
from tests.gateway.running import Running, gateway, until

# So short that the KV cache holds one for every slot.
LONG = {"max_tokens": 450, "ignore_eos": True}


class Keys:
    def tenant(self, api_key: str) -> Tenant:
        return Tenant(f"class {api_key}", priority=int(api_key))


async def completion(running: Running, key: str, **fields: object) -> int:
    body = {"model": "demo", "prompt": "The cat", "max_tokens": 2, **fields}
    status, _, _ = await running.post("/v1/completions", body, authorization=f"Bearer {key}")
    return status


@pytest.mark.slow
async def test_a_class_9_caller_with_the_highest_priority_does_not_pass_class_0(replica: Replica) -> None:
    urls = {"replicas": replica.grpc_url, "metrics_urls": {replica.grpc_url: replica.metrics_url}}
    async with gateway(keys=Keys(), **urls) as running:
        known = running.service.replicas.all()[0]
        await until(lambda: known.metrics.max_running > 0 and known.takes_priority)
        slots = known.metrics.max_running

        # Through the gateway: beside requests of others it sends no more than can run, and nothing waits at the engine.
        with halted(replica):  # until all wait, nothing ends
            filling = [asyncio.ensure_future(completion(running, "5", **LONG)) for _ in range(slots)]
            await until(lambda: known.metrics.running == slots and known.metrics.waiting == 0)
            ended: list[str] = []
            nine = asyncio.ensure_future(sent_by_grpc(running.grpc_url, "9", request_priority=1.0))
            nine.add_done_callback(lambda _: ended.append("class 9"))
            await until(lambda: known.metrics.waiting == 1)
            zero = asyncio.ensure_future(completion(running, "0"))
            zero.add_done_callback(lambda _: ended.append("class 0"))
            await until(lambda: known.metrics.waiting == 2)
            filling.pop().cancel()  # one slot becomes free
        try:
            assert await zero == 200 and await nine
            assert ended == ["class 0", "class 9"]
        finally:
            for task in filling:
                task.cancel()
            await asyncio.gather(*filling, return_exceptions=True)

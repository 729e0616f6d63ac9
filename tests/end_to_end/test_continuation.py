"""A gateway in front of two real servers, of which one dies in the middle of streams: no stream shows it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from server.replica import Replica, running
from tests.end_to_end.watching import until_idle, worker
from tests.gateway.api.test_kserve import ours
from tests.gateway.running import gateway, until

PROMPTS = [f"def function_{n}(first, second):" for n in range(4)]
LONG = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.0}
ECHO = {**LONG, "max_tokens": 200, "echo": True, "log_probs": True, "prompt_log_probs": True}
PENALISED = {**LONG, "max_tokens": 200, "temperature": 1.0, "seed": 5, "presence_penalty": 0.5}


@pytest.fixture(scope="module")
def pair(engine_dir) -> Iterator[tuple[Replica, Replica]]:
    with running("demo") as one, running("demo") as two:
        yield one, two


def kill_worker(replica: Replica) -> None:
    os.kill(worker(replica), signal.SIGKILL)


def kill_server(replica: Replica) -> None:
    os.kill(replica.server_pid, signal.SIGKILL)


@pytest.mark.parametrize("end", [kill_worker, kill_server])
async def test_streams_of_a_replica_that_dies_go_on_at_the_other(pair, end):
    urls = {replica.grpc_url: replica.metrics_url for replica in pair}
    settings = {
        "replicas": ",".join(urls),
        "metrics_urls": urls,
        "routing": "round_robin",
        "continuations": 2,
        "probe_interval_s": 0.5,
        "config": "[reuse]\ncoalesce = false\ncache_bytes = 0",
    }
    async with gateway(**settings) as served, ours(served) as client:
        await until(lambda: len(served.service.replicas.ready()) == 2)
        asked = [(prompt, LONG) for prompt in PROMPTS] + [(PROMPTS[0], PENALISED), (PROMPTS[1], ECHO)]
        whole = await asyncio.gather(*(client.generate(prompt, **options).complete() for prompt, options in asked))
        streams = [client.generate(prompt, **options) for prompt, options in asked]
        began = [[await stream.__anext__() for _ in range(3)] for stream in streams]
        end(pair[0])
        for stream, first, expected in zip(streams, began, whole, strict=True):
            deltas = [*first, *[delta async for delta in stream]]
            assert "".join(delta.text for delta in deltas) == expected.text
            assert sum((delta.token_ids for delta in deltas), ()) == expected.token_ids
            assert sum((len(delta.log_probs) for delta in deltas), 0) == len(expected.log_probs)
            assert deltas[-1].usage.output_tokens == expected.usage.output_tokens
        page = await served.metrics()
        assert page['trident_gateway_continuations_total{result="continued"}'] >= 2
        await until(lambda: not served.service.live)
        await until(lambda: len(served.service.replicas.ready()) == 2)
    for replica in pair:
        await until_idle(replica)

"""What stands still is noticed by its lack of steps, heartbeats or answers, told to every stream, and replaced.

A stopped process (SIGSTOP) stands for a deadlocked one: it exists, holds its sockets, and does nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import grpc
import pytest
import tritonclient.grpc.aio as triton
from triton_requests import Answer, ask

from contract.errors import EngineFailed, TridentError
from contract.watchdog import cpu_s
from server.admin import fetch
from server.replica import Replica, running
from tests.end_to_end.watching import PATIENCE_S, requests, until, worker

LONG = {"text_input": "def fibonacci(n):\n", "max_tokens": 900, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def replica(engine_dir) -> Iterator[Replica]:
    """With a liveness probe every 2 s, because an idle engine's hang shows at the next request only."""
    with running("demo", canary_interval_s=2.0, stall_s=4.0) as server:
        yield server


async def ask_or_break(client: triton.InferenceServerClient, inputs: dict) -> Answer:
    """An answer; when the connection broke, one whose error is the gRPC status."""
    try:
        return await ask(client, inputs)
    except grpc.RpcError as error:
        return Answer(error=error.code().name)


def is_ready(replica: Replica, path: str) -> bool:
    try:
        fetch(replica.http_url + path, timeout_s=1.0)
    except TridentError:
        return False
    return True


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):  # as it should be: it was killed
                os.kill(pid, signal.SIGCONT)


async def hang(replica: Replica, streams: int, *pids: int) -> list[Answer]:
    """Stops ``pids`` while ``streams`` long requests run; returns their answers once the server is ready again.

    On the way the server, its model and the supervisor must each have said that they are not ready. Loading a model
    anew takes 0.3 s, which a process that waits for a core may miss: then Triton's log says that it was not there.
    """
    before, log = replica.status, len(replica.log())

    def is_mended() -> bool:
        now = replica.status
        mended = now.restarts + now.reloads > before.restarts + before.reloads
        return now.state == "ready" and mended and is_ready(replica, "/v2/health/ready")

    async with triton.InferenceServerClient(replica.grpc_url) as client:
        tasks = [asyncio.create_task(ask_or_break(client, LONG)) for _ in range(streams)]
        if streams:
            await until(replica, lambda page: requests(page, "active") >= streams)
        with stopped(*pids):
            doubts = {"/v2/health/ready", "/v2/models/ensemble/ready", "status"}
            deadline_s = time.monotonic() + PATIENCE_S
            while doubts:
                assert time.monotonic() < deadline_s, doubts
                doubts = {
                    what
                    for what in doubts
                    if (replica.status.state == "ready" if what == "status" else is_ready(replica, what))
                }
                if doubts and replica.status.reloads > before.reloads and is_mended():
                    assert "ensemble ensemble contains models that are not available" in replica.log()[log:], doubts
                    break
                await asyncio.sleep(0.02)
            while not is_mended():
                assert time.monotonic() < deadline_s, replica.status
                await asyncio.sleep(0.02)
        return await asyncio.gather(*tasks)


async def serves_whole(replica: Replica) -> None:
    async with triton.InferenceServerClient(replica.grpc_url) as client:
        answer = await ask(client, {**LONG, "max_tokens": 5})
    assert answer.finish_reasons == ["length"] and answer.outputs["num_output_tokens"].item() == 5


def stub(replica: Replica, model: str) -> int:
    return replica.stubs(model)[0].pid


@pytest.mark.parametrize("streams", [1, 8])
async def test_an_engine_that_makes_no_step_ends_its_streams_by_name_and_is_replaced(replica, streams):
    before, hung = replica.status.restarts, worker(replica)
    answers = await hang(replica, streams, hung)
    assert replica.status.restarts == before + 1 and worker(replica) != hung
    for answer in answers:
        message = (
            answer.outputs["error_message"].item().decode() if answer.finish_reasons == ["error"] else answer.error
        )
        assert f"{EngineFailed.__name__}: the engine process hung with" in message and "being restarted" in message, (
            message
        )
    assert "no progress and no CPU use" in replica.output.read_text()
    assert "contract/thread_dump.py" in replica.log(), "the stacks of the stub, whose thread this is"
    await serves_whole(replica)


async def test_an_idle_engine_that_hangs_is_found_by_the_liveness_probe(replica):
    hung = worker(replica)
    await hang(replica, 0, hung)
    assert worker(replica) != hung
    await serves_whole(replica)


@pytest.mark.parametrize("streams", [0, 4])
@pytest.mark.parametrize("model", ["engine", "detokenizer"])
async def test_a_hung_stub_that_streams_run_through_restarts_the_server(replica, model, streams):
    before, hung = replica.status.restarts, stub(replica, model)
    answers = await hang(replica, streams, hung)
    assert replica.status.restarts == before + 1 and stub(replica, model) != hung
    assert all(answer.error == "UNAVAILABLE" or "is not healthy" in answer.error for answer in answers)
    assert f"{model} process hangs" in replica.output.read_text()
    await serves_whole(replica)


async def tokenizers(replica: Replica) -> set[int]:
    """The pids after a reload, once the process that did not hang is finalized or killed."""
    deadline_s = time.monotonic() + PATIENCE_S
    while len(left := replica.stubs("tokenizer")) > 2:
        assert time.monotonic() < deadline_s, left
        await asyncio.sleep(0.1)
    return {found.pid for found in left}


@pytest.mark.parametrize("streams", [0, 4])
async def test_a_hung_tokenizer_is_loaded_anew_and_streams_in_flight_go_on(replica, streams):
    before, hung = replica.status, stub(replica, "tokenizer")
    answers = await hang(replica, streams, hung)
    assert (replica.status.restarts, replica.status.reloads) == (before.restarts, before.reloads + 1)
    assert hung not in await tokenizers(replica)
    assert {tuple(answer.finish_reasons) for answer in answers} <= {("length",)}
    await serves_whole(replica)


async def test_two_hung_tokenizers_are_both_replaced(replica):
    hung = [found.pid for found in replica.stubs("tokenizer")]
    assert len(hung) == 2, "a stub of a model that was reloaded before still runs"
    before = replica.status
    await hang(replica, 0, *hung)
    deadline_s = time.monotonic() + PATIENCE_S
    # The one that was found second may still have its grace when the reloaded model is ready.
    while {found.pid for found in replica.stubs("tokenizer")} & set(hung):
        assert time.monotonic() < deadline_s, replica.stubs("tokenizer")
        await asyncio.sleep(0.02)
    assert replica.status.restarts == before.restarts
    await serves_whole(replica)


async def test_a_hung_tritonserver_is_replaced(replica):
    before = replica.server_pid
    answers = await hang(replica, 4, before)
    assert replica.server_pid != before and {answer.error for answer in answers} == {"UNAVAILABLE"}
    assert "tritonserver hangs" in replica.output.read_text()
    await serves_whole(replica)


async def test_engine_and_detokenizer_hung_together_are_replaced(replica):
    await hang(replica, 2, worker(replica), stub(replica, "detokenizer"))
    await serves_whole(replica)


async def test_a_pause_shorter_than_a_hang_is_not_noticed(replica):
    """Of the worker and the server, for half of that time, with requests running. (Triton 2.51 itself gives up
    on a stub that does not take a request for a second.)"""
    before = replica.status
    async with triton.InferenceServerClient(replica.grpc_url) as client:
        for pid in (worker(replica), replica.server_pid):
            tasks = [asyncio.create_task(ask_or_break(client, {**LONG, "max_tokens": 300})) for _ in range(2)]
            await until(replica, lambda page: requests(page, "active") > 0)
            with stopped(pid):
                await asyncio.sleep(replica.settings.stall_s / 2)
            answers = await asyncio.gather(*tasks)
            assert [answer.finish_reasons for answer in answers] == [["length"]] * 2
    after = replica.status
    assert (after.restarts, after.reloads, after.state) == (before.restarts, before.reloads, "ready")


async def test_a_tokenizer_that_stood_still_within_a_call_answers_no_other_request(replica):
    """Triton gives the call up after a second and would take its answer for the next call's."""
    before, slow_prompt = replica.status, {"text_input": "wo rd, " * 40_000, "max_tokens": 5, "stream": True}
    async with triton.InferenceServerClient(replica.grpc_url) as client:
        streams = [asyncio.create_task(ask(client, LONG)) for _ in range(2)]
        await until(replica, lambda page: requests(page, "active") >= 2)
        used_s = {found.pid: cpu_s(found.pid) for found in replica.stubs("tokenizer")}
        call = asyncio.create_task(ask_or_break(client, slow_prompt))
        while not (calling := [pid for pid in used_s if cpu_s(pid) - used_s[pid] >= 0.03]):
            assert not call.done(), await call
            await asyncio.sleep(0.002)
        with stopped(*calling):
            await asyncio.sleep(replica.settings.stall_s / 2)
        assert "is not healthy" in (await call).error
        deadline_s = time.monotonic() + PATIENCE_S
        while replica.status.reloads == before.reloads or replica.status.state != "ready":
            assert time.monotonic() < deadline_s, replica.status
            await asyncio.sleep(0.02)
        answers = await asyncio.gather(*streams)
    assert "did not run for a second within a call" in replica.log()
    assert not await tokenizers(replica) & set(calling)
    assert replica.status.restarts == before.restarts
    assert {tuple(answer.finish_reasons) for answer in answers} == {("length",)}
    await serves_whole(replica)

"""What breaks is told to every stream in flight, and the server is ready again without a hand."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
import tritonclient.grpc.aio as triton
from triton_requests import Answer, ask, metric

from clients import NO_RETRY, AsyncClient
from contract import packed_delta
from contract.errors import DeadlineExceeded, EngineFailed, TridentError
from server.replica import running
from tests.end_to_end.watching import PATIENCE_S, TRIES, halted, requests, until, until_idle, worker

ROOT = Path(__file__).resolve().parents[2]
LONG = {"text_input": "def fibonacci(n):\n", "max_tokens": 900, "ignore_eos": True, "stream": True}


async def ask_or_break(client: triton.InferenceServerClient, inputs: dict) -> Answer:
    """An answer; when the connection broke, one whose error is the gRPC status."""
    try:
        return await ask(client, inputs)
    except grpc.RpcError as error:
        return Answer(error=error.code().name)


async def strike(replica, streams: int, blow, max_tokens: int = 900) -> list[Answer]:
    """Answers of ``streams`` long requests that were all in the engine, generating or waiting, when ``blow`` fell."""
    async with triton.InferenceServerClient(replica.grpc_url) as client:
        with halted(replica):
            tasks = [
                asyncio.create_task(ask_or_break(client, {**LONG, "max_tokens": max_tokens})) for _ in range(streams)
            ]
            await until(replica, lambda page: requests(page, "active") == streams)
        await until(replica, generating)
        with halted(replica):
            blow()
        return await asyncio.gather(*tasks)


def generating(page) -> bool:
    name = "nv_trt_llm_inflight_batcher_metrics"
    return metric(page, name, inflight_batcher_specific_metric="generation_requests") > 0


async def serve_one(replica) -> Answer:
    async with triton.InferenceServerClient(replica.grpc_url) as client:
        return await ask(client, {**LONG, "max_tokens": 3})


async def test_a_killed_engine_process_ends_running_streams_in_band_and_serves_the_waiting_ones(replica):
    for _ in range(TRIES):  # who stands still for as long as all of it takes strikes too late
        answers = await strike(replica, 40, lambda: os.kill(worker(replica), signal.SIGKILL))
        in_band = [answer.outputs["error_message"].item() for answer in answers if answer.finish_reasons == ["error"]]
        if in_band:
            break
        await serve_one(replica)  # no stream had begun; the next try needs the engine that is started anew
    assert set(in_band) == {b"EngineFailed: the engine process was killed by signal 9; it is being restarted"}
    # A stream that had said nothing yet is answered with the error instead.
    others = [answer.error for answer in answers if not answer.finish_reasons]
    assert all(in_band[0].decode() in error for error in others)
    waited = [answer for answer in answers if answer.finish_reasons == ["length"]]
    assert waited and len(in_band) + len(others) + len(waited) == 40
    assert replica.status.restarts == 0
    assert (await serve_one(replica)).finish_reasons == ["length"]


async def test_a_deadline_and_a_killed_engine_process_read_the_same_through_both_ensembles(replica):
    models = ("ensemble", "ensemble_packed") * 3

    async def error_of(model: str, began: asyncio.Event, **arguments: object) -> tuple:
        async with AsyncClient(replica.grpc_url, model=model, retry=NO_RETRY) as client:
            try:
                async for _ in client.generate("def fibonacci(n):\n", ignore_eos=True, **arguments):
                    began.set()
            except TridentError as error:
                return type(error), str(error)
            return ()

    with halted(replica):
        late = await asyncio.gather(*(error_of(model, asyncio.Event(), timeout_s=2.0) for model in models))
    assert set(late) == {(DeadlineExceeded, "the deadline of 2 s passed before the first token")}
    await until_idle(replica)
    for _ in range(TRIES):  # who stands still for as long as all of it takes strikes too late
        begun = [asyncio.Event() for _ in models]
        reading = [error_of(model, event, max_tokens=900) for model, event in zip(models, begun, strict=True)]
        tasks = [asyncio.ensure_future(one) for one in reading]
        await asyncio.gather(*(event.wait() for event in begun))
        os.kill(worker(replica), signal.SIGKILL)
        failed = await asyncio.gather(*tasks)
        await serve_one(replica)
        if () not in failed:
            break
    text = "the engine process was killed by signal 9; it is being restarted"
    assert set(failed) == {(EngineFailed, text)} and replica.status.restarts == 0


async def test_a_killed_tokenizer_stub_is_reloaded_while_streams_in_flight_continue(replica):
    await until_idle(replica)
    before = replica.status.reloads
    hit = replica.stubs("tokenizer")[0].pid
    answers = await strike(replica, 20, lambda: os.kill(hit, signal.SIGKILL), max_tokens=300)
    assert {tuple(answer.finish_reasons) for answer in answers} == {("length",)}
    replica.wait_until_ready(reloads=before + 1)
    assert (await serve_one(replica)).finish_reasons == ["length"]


async def test_streams_of_both_ensembles_end_as_unavailable_when_tritonserver_aborts_and_it_comes_back(replica):
    await until_idle(replica)
    before, began = replica.status, asyncio.Event()

    async def outcome_of(model: str) -> str:
        async with AsyncClient(replica.grpc_url, model=model, retry=NO_RETRY) as client:
            try:
                async for _ in client.generate("def fibonacci(n):\n", ignore_eos=True, max_tokens=900):
                    began.set()
            except TridentError as error:
                return type(error).__name__
            return "ended"

    reading = [asyncio.ensure_future(outcome_of(model)) for model in ("ensemble", packed_delta.MODEL) * 20]
    await began.wait()
    os.kill(before.server_pid, signal.SIGABRT)  # as glibc does when it finds the heap damaged
    outcomes = set(await asyncio.wait_for(asyncio.gather(*reading), PATIENCE_S))
    assert "Unavailable" in outcomes <= {"Unavailable", "ended"}
    replica.wait_until_ready(restarts=before.restarts + 1)
    assert replica.server_pid != before.server_pid
    assert (await serve_one(replica)).finish_reasons == ["length"]


@pytest.mark.parametrize("model", ["engine", "detokenizer"])
async def test_a_killed_stub_ends_every_stream_as_unavailable_and_the_server_comes_back(replica, model):
    await until_idle(replica)
    before = replica.status.restarts
    answers = await strike(replica, 30, lambda: os.kill(replica.stubs(model)[0].pid, signal.SIGKILL))
    assert {answer.error for answer in answers if answer.finish_reasons != ["length"]} == {"UNAVAILABLE"}
    replica.wait_until_ready(restarts=before + 1)
    assert (await serve_one(replica)).finish_reasons == ["length"]


def test_sigterm_with_a_hundred_open_streams_ends_each_with_its_text_or_an_error(engine_dir):
    with running("demo", drain_s=1.0, stall_s=3600) as replica:
        answers = asyncio.run(strike(replica, 100, lambda: replica.process.send_signal(signal.SIGTERM)))
        assert replica.process.wait(PATIENCE_S) == 0
    for answer in answers:
        if answer.finish_reasons == ["error"]:
            assert answer.outputs["error_message"].item().decode().startswith("Unavailable: ")
        else:
            assert answer.finish_reasons == ["length"] or answer.error
    assert len(answers) == 100


def serve(engines_dir: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server", "--engine", "demo", "--free-ports", "--", "true"]
    environ = {**os.environ, "TRIDENT_ENGINES_DIR": str(engines_dir)}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "is half-built"),
        (lambda folder: (folder / "openvino_model.bin").write_bytes(b"x"), "openvino_model.bin is not the file that"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json is not the file that was built"),
        (lambda folder: shutil.rmtree(folder), "there is no engine at"),
    ],
)
def test_a_broken_engine_folder_is_one_clear_error_before_anything_starts(engine_dir, tmp_path, damage, message):
    shutil.copytree(engine_dir, tmp_path / "demo")
    damage(tmp_path / "demo")
    result = serve(tmp_path)
    assert result.returncode == 1
    assert message in result.stderr

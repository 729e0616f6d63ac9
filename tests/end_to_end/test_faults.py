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
from triton_requests import Answer, ask

from server.replica import running

ROOT = Path(__file__).resolve().parents[2]
LONG = {"text_input": "def fibonacci(n):\n", "max_tokens": 900, "ignore_eos": True, "stream": True}


async def ask_or_break(client: triton.InferenceServerClient, inputs: dict) -> Answer:
    """An answer; when the connection broke, one whose error is the gRPC status."""
    try:
        return await ask(client, inputs)
    except grpc.RpcError as error:
        return Answer(error=error.code().name)


async def strike(replica, streams: int, blow) -> list[Answer]:
    """Answers of ``streams`` long requests that were generating or waiting when ``blow`` fell."""
    async with triton.InferenceServerClient(replica.grpc_url) as client:
        tasks = [asyncio.create_task(ask_or_break(client, LONG)) for _ in range(streams)]
        await asyncio.sleep(0.5)
        blow()
        return await asyncio.wait_for(asyncio.gather(*tasks), timeout=120)


async def serve_one(replica) -> Answer:
    async with triton.InferenceServerClient(replica.grpc_url) as client:
        return await ask(client, {**LONG, "max_tokens": 3})


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_a_killed_engine_process_ends_running_streams_in_band_and_serves_the_waiting_ones(replica):
    engine_stub = replica.stubs("engine")[0].pid

    def kill_worker() -> None:
        os.kill(children(engine_stub)[0], signal.SIGKILL)

    answers = await strike(replica, 80, kill_worker)
    broken = [answer for answer in answers if answer.finish_reasons == ["error"]]
    whole = [answer for answer in answers if answer.finish_reasons == ["length"]]
    assert broken and whole and len(broken) + len(whole) == 80
    for answer in broken:
        said = answer.outputs["error_message"].item().decode()
        assert said == "EngineFailed: the engine process was killed by signal 9; it is being restarted"
    assert replica.status.restarts == 0
    assert (await serve_one(replica)).finish_reasons == ["length"]


async def test_a_killed_tokenizer_stub_is_revived_and_no_stream_in_flight_notices(replica):
    before = replica.status.revivals
    answers = await strike(replica, 20, lambda: os.kill(replica.stubs("tokenizer")[0].pid, signal.SIGKILL))
    assert {tuple(answer.finish_reasons) for answer in answers} == {("length",)}
    replica.wait_until_ready(revivals=before + 1)
    assert (await serve_one(replica)).finish_reasons == ["length"]


@pytest.mark.parametrize("model", ["engine", "detokenizer"])
async def test_a_killed_stub_ends_every_stream_as_unavailable_and_the_server_comes_back(replica, model):
    before = replica.status.restarts
    answers = await strike(replica, 30, lambda: os.kill(replica.stubs(model)[0].pid, signal.SIGKILL))
    assert {answer.error for answer in answers} == {"UNAVAILABLE"}
    replica.wait_until_ready(restarts=before + 1)
    assert (await serve_one(replica)).finish_reasons == ["length"]


def test_sigterm_with_a_hundred_open_streams_ends_each_with_its_text_or_an_error(engine_dir):
    with running("demo", drain_s=1.0) as replica:
        answers = asyncio.run(strike(replica, 100, lambda: replica.process.send_signal(signal.SIGTERM)))
        assert replica.process.wait(timeout=30) == 0
    for answer in answers:
        if answer.finish_reasons == ["error"]:
            assert answer.outputs["error_message"].item().decode().startswith("Unavailable: ")
        else:
            assert answer.finish_reasons == ["length"] or answer.error
    assert len(answers) == 100


def serve(engines_dir: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server", "--engine", "demo", "--free-ports", "--", "true"]
    environ = {**os.environ, "TRIDENT_ENGINES_DIR": str(engines_dir)}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "is half-built"),
        (lambda folder: (folder / "openvino_model.bin").write_bytes(b"x"), "openvino_model.bin is not the file that"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json is not the file that was built"),
        (lambda folder: shutil.rmtree(folder), "there is no engine at"),
    ],
)
def test_a_broken_engine_folder_is_one_clear_error_before_anything_starts(engine_dir, tmp_path, damage, said):
    shutil.copytree(engine_dir, tmp_path / "demo")
    damage(tmp_path / "demo")
    result = serve(tmp_path)
    assert result.returncode == 1
    assert said in result.stderr

"""A stranger with curl: an answer arrives event by event, and hanging up frees the engine."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess

import pytest

from tests.end_to_end.watching import TRIES, ended, halted, left_in_time, requests, until, until_idle

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def curl(replica, max_tokens: int, path: str = "generate_stream", stream: bool = True) -> subprocess.Popen:
    body = {"text_input": "def fibonacci(n):\n", "max_tokens": max_tokens, "stream": stream, "ignore_eos": True}
    url = f"{replica.http_url}/v2/models/ensemble/{path}"
    return subprocess.Popen(["curl", "-sN", url, "-d", json.dumps(body)], stdout=subprocess.PIPE, text=True)


def test_curl_reads_a_stream_event_by_event(replica):
    for _ in range(TRIES):  # tokens that were not read in time share an event
        with curl(replica, 300) as process:
            lines = [line for line in process.stdout if line.startswith("data: ")]
        assert process.returncode == 0
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert events[-1]["finish_reason"] == "length"
        assert "".join(event["text_output"] for event in events).strip()
        if len(events) > 30:
            break
    assert len(events) > 30


async def test_curl_hangs_up_at_the_first_event_and_the_engine_is_free(replica):
    """Which also shows that the first event came while others were still to be made."""

    async def leave() -> None:
        with curl(replica, 900) as process:
            assert process.stdout.readline().startswith("data: ")
            process.terminate()

    await left_in_time(replica, leave)


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
async def test_callers_for_an_answer_in_one_piece_hang_up_and_the_engine_is_free(replica, path):
    """Triton does not notice; the engine finds that all of its requests were left."""

    before = ended(await until_idle(replica), "cancelled")
    with halted(replica):  # nothing ends by itself
        callers = [curl(replica, 900, path, stream=False) for _ in range(5)]
        await until(replica, lambda page: requests(page, "active") >= 5)
        for caller in callers:
            caller.kill()
            caller.communicate()
        await until(replica, lambda page: ended(page, "cancelled") == before + 5)
    await until_idle(replica)


async def test_a_caller_who_still_waits_gets_the_whole_answer_though_others_have_left(replica):
    await until_idle(replica)
    with halted(replica):
        stays, leaves = (curl(replica, 100, "generate", stream=False) for _ in range(2))
        await until(replica, lambda page: requests(page, "active") >= 2)
        leaves.kill()
        leaves.communicate()
        await asyncio.sleep(3)  # three looks of the engine
    output, _ = await asyncio.to_thread(stays.communicate)
    assert json.loads(output)["num_output_tokens"] == 100

"""A stranger with curl: an answer arrives event by event, and hanging up frees the engine."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from tests.end_to_end.watching import TRIES, left_in_time

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def curl(replica, max_tokens: int) -> subprocess.Popen:
    body = {"text_input": "def fibonacci(n):\n", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    url = f"{replica.http_url}/v2/models/ensemble/generate_stream"
    return subprocess.Popen(["curl", "-sN", url, "-d", json.dumps(body)], stdout=subprocess.PIPE, text=True)


def test_curl_reads_a_stream_event_by_event(replica):
    for _ in range(TRIES):  # tokens that nobody took in time share an event
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

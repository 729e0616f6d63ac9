"""A stranger with curl: an answer arrives event by event, and hanging up frees the engine."""

from __future__ import annotations

import json
import shutil
import subprocess
import time

import pytest
from triton_requests import metric, metrics

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def curl(replica, max_tokens: int) -> subprocess.Popen:
    body = {"text_input": "def fibonacci(n):\n", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    url = f"{replica.http_url}/v2/models/ensemble/generate_stream"
    return subprocess.Popen(["curl", "-sN", url, "-d", json.dumps(body)], stdout=subprocess.PIPE, text=True)


def test_curl_reads_a_stream_event_by_event(replica):
    with curl(replica, 300) as process:
        arrived = [(time.monotonic(), line) for line in process.stdout if line.startswith("data: ")]
    assert process.returncode == 0
    events = [json.loads(line.removeprefix("data: ")) for _, line in arrived]
    assert len(events) > 30 and events[-1]["finish_reason"] == "length"
    assert "".join(event["text_output"] for event in events).strip()
    # Not all at the end: the first came while most were still to be made.
    assert arrived[0][0] < arrived[-1][0] - 0.05


def test_curl_hangs_up_and_the_engine_is_free(replica):
    with curl(replica, 900) as process:
        assert process.stdout.readline().startswith("data: ")
        process.terminate()
    deadline_s = time.monotonic() + 5.0
    while metric(metrics(replica.metrics_url), "nv_trt_llm_request_metrics", request_type="active"):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)

"""A stop of the real server as its callers see it: what runs ends whole, what is new is told to try elsewhere."""

from __future__ import annotations

import json
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from clients import Client
from contract.errors import Unavailable
from contract.generation import FinishReason, GenerationRequest, SamplingParams
from server.replica import running
from tests.end_to_end.watching import halted

LONG = GenerationRequest("def f(", max_tokens=300, sampling=SamplingParams(temperature=0.0, ignore_eos=True))


class Answer:
    """One streamed generation, read in the background."""

    def __init__(self, url: str) -> None:
        self.deltas = []
        self.begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(url,), daemon=True)
        self._thread.start()

    def _read(self, url: str) -> None:
        with Client(url) as client:
            for delta in client.open(LONG):
                self.deltas.append(delta)
                self.begun.set()

    def wait(self) -> None:
        self._thread.join(600)
        assert not self._thread.is_alive()


def post(url: str, body: dict) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def status_of(url: str) -> int:
    try:
        return urllib.request.urlopen(url, timeout=60).status
    except urllib.error.HTTPError as error:
        return error.code


def test_a_draining_server_says_so_to_every_new_caller_and_ends_what_it_has(engine_dir: Path) -> None:
    with running("demo", canary_interval_s=3600, stall_s=3600, drain_s=600.0) as replica:
        answers = [Answer(replica.grpc_url) for _ in range(8)]
        assert all(answer.begun.wait(60) for answer in answers)
        with halted(replica):  # until all is asked, nothing ends
            replica.process.send_signal(signal.SIGTERM)
            give_up_s = time.monotonic() + 60
            while not replica.settings.drain_file.exists():
                assert time.monotonic() < give_up_s
                time.sleep(0.001)
            assert status_of(f"{replica.http_url}/v2/health/ready") == 400
            with Client(replica.grpc_url) as client, pytest.raises(Unavailable, match="the server is shutting down"):
                list(client.open(LONG))
            for path in ("generate", "generate_stream"):
                code, message = post(
                    f"{replica.http_url}/v2/models/ensemble/{path}", {"text_input": "x", "max_tokens": 4}
                )
                assert (
                    code == 400 and "Unavailable: the server is shutting down" in message
                )  # Triton has no other code here
        for answer in answers:
            answer.wait()
            assert answer.deltas[-1].finish_reason is FinishReason.LENGTH
            assert sum(len(delta.token_ids) for delta in answer.deltas) == LONG.max_tokens
        assert replica.process.wait(600) == 0
    assert not replica.settings.drain_file.exists()

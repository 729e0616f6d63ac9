"""The Ray Serve policy, as Serve's controller calls it; Ray itself is not needed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from cluster.ray import policy as policies
from cluster.ray.policy import TokensPolicy
from contract.errors import InvalidArgument
from tests.cluster.scaling.test_reader import page


@pytest.fixture
def served():
    """A page at .url, of which .text may be changed; "" is a failure."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if server.text else 503)
            self.end_headers()
            self.wfile.write(server.text.encode())

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.text, server.url = page(queued=1e6, speed=100), f"http://127.0.0.1:{server.server_port}/metrics"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def context(target: int, state: dict | None = None) -> SimpleNamespace:
    """Of what Ray's AutoscalingContext has, that which is used."""
    return SimpleNamespace(target_num_replicas=target, policy_state=state or {})


def eventually(policy: TokensPolicy, target: int, wanted: int) -> dict:
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        number, state = policy(context(target))
        if number == wanted:
            return state
        time.sleep(0.01)
    raise AssertionError(f"{number} instead of {wanted}")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(policies, "INTERVAL_S", 0.01)


def test_it_wants_what_the_law_says_and_its_state_is_json(served, monkeypatch):
    monkeypatch.setattr(policies, "INTERVAL_S", 600)
    policy = TokensPolicy([served.url], pool="main")
    state = eventually(policy, 1, 9)
    assert json.loads(json.dumps(state)) == state
    served.text = ""
    for _ in range(100):
        assert policy(context(9, state))[0] == 9
    assert policy._readings == 1  # a call reads nothing
    assert policy(context(9, {"__decision_counters": 3}))[1]["__decision_counters"] == 3


def test_while_nothing_can_be_read_it_holds(served):
    served.text = ""
    policy = TokensPolicy([served.url], pool="main")
    for state in ({}, {"trident": "nonsense"}, {"trident": {"wanted": 99}}):
        assert policy(context(4, state))[0] == 4
        time.sleep(0.03)


def test_it_never_raises(caplog):
    policy = TokensPolicy(["http://127.0.0.1:1/metrics"])
    for _ in range(3):
        wanted, state = policy(SimpleNamespace(target_num_replicas="many", policy_state=None))
        assert wanted == "many" and state == {}
    assert sum("the policy failed" in line for line in caplog.messages) == 1


def test_a_changed_file_holds_without_a_new_policy(served, tmp_path):
    path = tmp_path / "scaling.toml"
    path.write_text("[pools.main]\nmax_replicas = 3\n")
    policy = TokensPolicy([served.url], "main", str(path))
    eventually(policy, 1, 3)
    path.write_text("[pools.main]\nmax_replicas = 5 # more\n")
    eventually(policy, 1, 5)


def test_the_reading_ends_with_the_policy(served):
    before = set(threading.enumerate())
    policy = TokensPolicy([served.url])
    [reading] = [one for one in set(threading.enumerate()) - before if one.name == "scaling-reader"]
    del policy
    reading.join(60)
    assert not reading.is_alive()


def test_wrong_arguments_are_told_when_it_is_made():
    with pytest.raises(InvalidArgument):
        TokensPolicy(["nowhere"])
    with pytest.raises(InvalidArgument):
        TokensPolicy(["http://127.0.0.1:1"], config="/no/such/file")


@pytest.mark.slow
def test_it_imports_neither_ray_nor_grpc():
    code = "import sys, cluster.ray.policy; print({'ray', 'grpc', 'numpy', 'tritonclient'} & sys.modules.keys() or '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "" and done.returncode == 0, done.stderr

"""A release by its command, in front of the real server: shadow copies agree, and all requests move and come back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.replica import Replica

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def gateway(replica: Replica, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """(URL, environment). Both pools are the same server, so that their texts are equal."""
    folder = tmp_path_factory.mktemp("releases")
    (folder / "gateway.toml").write_text("# the operator's comment\n")
    (folder / "token").write_text("an-operators-token-0123")
    settings = {
        "HTTP_PORT": "0",
        "GRPC_PORT": "0",
        "MONITORING_PORT": "0",
        "REPLICAS": f"stable={replica.grpc_url};next={replica.grpc_url}",
        "POOL_WEIGHTS": "stable=1",
        "CONFIG": str(folder / "gateway.toml"),
        "ADMIN_TOKEN_FILE": str(folder / "token"),
    }
    environ = {**os.environ, **{f"TRIDENT_GATEWAY_{name}": value for name, value in settings.items()}}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway"], cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        yield f"http://{process.stdout.readline().split()[1]}", environ
        process.terminate()
        assert process.wait(60) == 0 and "Traceback" not in (folder / "log").read_text()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def complete(url: str, prompt: str) -> str:
    body = {"model": "trident", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    names = json.load(urllib.request.urlopen(f"{url}/v1/models", timeout=30))
    body["model"] = names["data"][0]["id"]
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    return json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["text"]


def test_a_release_from_shadow_to_all_and_back(gateway: tuple[str, dict[str, str]]):
    url, environ = gateway

    def release(*arguments: str) -> str:
        command = [sys.executable, "-m", "gateway", "release", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def status() -> dict:
        headers = {"authorization": f"Bearer {Path(environ['TRIDENT_GATEWAY_ADMIN_TOKEN_FILE']).read_text()}"}
        request = urllib.request.Request(f"{url}/admin/releases", headers=headers)
        found = json.load(urllib.request.urlopen(request, timeout=30))["releases"]
        return found[0] if found else {"state": "", "kind": "", "weight": 0}

    def settled(kind: str, state: str = "running") -> None:
        until_s = time.monotonic() + 30
        while ((found := status())["kind"], found["state"], found["weight"]) != (kind, state, 100):
            assert time.monotonic() < until_s, found
            time.sleep(0.05)

    assert "next gets 100 % of stable" in release(
        "start", "r", "--kind", "shadow", "--stable", "stable", "--candidate", "next", "--weight", "100"
    )
    settled("shadow")
    texts = [complete(url, f"def f{number}(") for number in range(3)]
    until_s = time.monotonic() + 30
    while sum((copies := status()["candidate"]["copies"]).values()) < 3:
        assert time.monotonic() < until_s, copies
        time.sleep(0.05)
    assert copies == {"agree": 3}

    release("start", "r", "--kind", "blue_green", "--weight", "100")
    settled("blue_green")
    before = status()["stable"]["requests"]
    assert [complete(url, f"def f{number}(") for number in range(3)] == texts
    found = status()
    assert found["stable"]["requests"] == before and found["candidate"]["requests"] >= 3
    assert found["candidate"]["errors"] == found["candidate"]["refusals"] == 0 < found["candidate"]["ttft_p95_s"]

    release("rollback", "r", "--reason", "a test")
    settled("blue_green", "rolled back")
    assert "r: blue_green, rolled back (a test), weight 100 %" in release("status", "--gateway", url)
    complete(url, "def g(")
    assert status()["stable"]["requests"] == before + 1
    text = Path(environ["TRIDENT_GATEWAY_CONFIG"]).read_text()
    assert text.startswith("# the operator's comment\n") and 'rolled_back = "a test"' in text

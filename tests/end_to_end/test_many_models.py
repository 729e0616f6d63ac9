"""One or several engines behind a gateway: ``python -m server --engine A,B -- python -m gateway``."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from clients import Client
from contract.errors import NotFound

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
[models.demo]
pools = "demo"
capabilities = ["chat", "completions"]
context_length = 512
[models.demo-int8]
pools = "demo-int8"
aliases = ["small"]
capabilities = ["completions"]
[models.auto]
router = ["demo-int8", "demo"]
"""
BODY = {"prompt": "def fibonacci(n):", "max_tokens": 24, "temperature": 0}


@contextlib.contextmanager
def served(engines: str, folder: Path, **settings: str) -> Iterator[tuple[str, str]]:
    """(URL of the OpenAI endpoint, HOST:PORT of the KServe endpoint) of a gateway beside the servers of ``engines``."""
    own = {"HTTP_PORT": "0", "GRPC_PORT": "0", **settings}
    outside = {name: value for name, value in os.environ.items() if not name.startswith("TRIDENT_GATEWAY_")}  # of make
    environ = {**outside, **{f"TRIDENT_GATEWAY_{name}": value for name, value in own.items()}}
    environ["TRIDENT_STATE_DIR"] = str(folder / "state")
    server = [sys.executable, "-m", "server", "--engine", engines, "--free-ports", "--"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*server, sys.executable, "-m", "gateway"],
            cwd=ROOT,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdout is not None
    try:
        words = process.stdout.readline().split()
        assert words[::2] == ["http", "grpc"], (folder / "log").read_text()
        yield f"http://{words[1]}/v1", words[3]
        process.terminate()
        assert process.wait(60) == 0, (folder / "log").read_text()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def endpoints(engine_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    subprocess.run([sys.executable, "-m", "build.engine", "--engine", "demo-int8"], cwd=ROOT, check=True)
    folder = tmp_path_factory.mktemp("models")
    (folder / "gateway.toml").write_text(CONFIG)
    with served("demo,demo-int8", folder, CONFIG=str(folder / "gateway.toml")) as found:
        yield found


def test_a_gateway_beside_one_server_finds_it_at_any_port(engine_dir: Path, tmp_path: Path):
    with served("demo", tmp_path) as (url, _), openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["demo"]
        assert client.completions.create(model="demo", **BODY).choices[0].text


def test_each_model_is_served_by_its_own_engine_over_both_protocols(endpoints: tuple[str, str]):
    texts = {}
    with openai.OpenAI(base_url=endpoints[0], api_key="none", max_retries=0) as client:
        assert {model.id for model in client.models.list()} == {"demo", "demo-int8", "auto"}
        for name in ("demo", "demo-int8", "small", "auto"):
            raw = client.completions.with_raw_response.create(model=name, **BODY)
            texts[name] = raw.parse().choices[0].text
            expected = "demo" if name == "demo" else "demo-int8"
            assert (raw.parse().model, raw.headers["x-trident-model"]) == (expected, expected)
        assert texts["small"] == texts["auto"] == texts["demo-int8"] and texts["demo"]
        raw = client.completions.with_raw_response.create(
            model="auto", extra_headers={"x-trident-escalate": "1"}, **BODY
        )
        assert raw.headers["x-trident-model"] == "demo" and raw.parse().choices[0].text == texts["demo"]
        chat = client.chat.completions.create(model="auto", messages=[{"role": "user", "content": "hi"}], max_tokens=4)
        assert chat.model == "demo"  # the smaller one has no chat
        with pytest.raises(openai.BadRequestError, match="must be one with chat: demo; got demo-int8"):
            client.chat.completions.create(model="small", messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", **BODY)
    for name in ("demo", "demo-int8"):
        with Client(endpoints[1], model=name) as client:
            assert client.complete(BODY["prompt"], max_tokens=24, temperature=0.0).text == texts[name]
    with Client(endpoints[1], model="other") as client, pytest.raises(NotFound):
        client.complete("x")

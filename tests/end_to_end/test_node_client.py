"""Another language's gRPC client, Node's own, unchanged: the KServe service as tritonclient has it is all it knows."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from tritonclient.grpc import service_pb2

from clients import Client
from tests.end_to_end.watching import TRIES, left_in_time

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "node_client"
PACKAGES = ("@grpc/grpc-js@1.14.7", "@grpc/proto-loader@0.8.1")
SCRIPT = Path(__file__).parent / "node_client.js"
PROMPT = "def fibonacci(n):\n"


@pytest.fixture(scope="module")
def node_modules() -> Path:
    """The packages, installed once into a folder that git does not see; skipped where that cannot be."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed")
    stamp = CACHE / "installed"
    if not stamp.exists() or stamp.read_text() != " ".join(PACKAGES):
        CACHE.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--prefix", str(CACHE), "--no-audit", "--no-fund", "--loglevel=error", *PACKAGES]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            pytest.skip("npm took more than 120 s; is its registry within reach?")
        if done.returncode:
            pytest.skip(f"npm cannot install {', '.join(PACKAGES)}: {done.stderr.strip()[-200:]}")
        stamp.write_text(" ".join(PACKAGES))
    return CACHE / "node_modules"


@pytest.fixture(scope="module")
def descriptors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The service and what it imports, dependencies first, as a serialized FileDescriptorSet."""
    found = descriptor_pb2.FileDescriptorSet()

    def add(file) -> None:
        for dependency in file.dependencies:
            add(dependency)
        if file.name not in {one.name for one in found.file}:
            file.CopyToProto(found.file.add())

    add(service_pb2.DESCRIPTOR)
    path = tmp_path_factory.mktemp("node") / "kserve.descriptors"
    path.write_bytes(found.SerializeToString())
    return path


@pytest.fixture
def node(replica, node_modules, descriptors):
    def run(*arguments: str) -> list[dict]:
        command = ["node", str(SCRIPT), str(descriptors), replica.grpc_url, *arguments]
        environ = {"NODE_PATH": str(node_modules), "PATH": str(Path(shutil.which("node")).parent)}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


def test_node_streams_the_same_text_as_our_own_client(node, replica):
    with Client(replica.grpc_url) as client:
        whole = client.complete(PROMPT, max_tokens=40, temperature=0.0, ignore_eos=True)
    for _ in range(TRIES):  # tokens that were not read in time share a message
        messages = node("stream", PROMPT, "40")
        if len(messages) > 5:
            break
    assert not [message for message in messages if "status" in message]
    assert "".join(message["text"] for message in messages) == whole.text
    assert len(messages) > 5
    assert {message["id"] for message in messages} == {"from-node"}
    assert [message["final"] for message in messages] == [False] * (len(messages) - 1) + [True]
    assert not any(message["error"] for message in messages)


def test_node_is_told_what_was_wrong_with_its_request(node):
    (message,) = node("stream", PROMPT, "0")
    assert "max_tokens" in message["error"]
    assert message["final"]


async def test_node_cancels_and_the_engine_is_free_again(node, replica):
    received = []

    async def leave() -> None:
        received[:] = node("cancel", PROMPT, "900")

    await left_in_time(replica, leave)
    assert received[-1] == {"status": 1, "details": "Cancelled on client"}
    assert not any(message.get("final") for message in received)


def test_node_can_ask_what_the_server_has(node):
    (answer,) = node("ask")
    assert answer["ready"] is True
    assert {"text_input", "max_tokens", "stream"} <= set(answer["inputs"])

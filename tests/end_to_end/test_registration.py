"""Replicas come and go under load: each registers at a real gateway, and no stream meets an error."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from server import ports
from server.replica import Replica, running
from tests.stream_load import Load

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "an-operators-token-0123"


class Gateway:
    """A gateway process on fixed ports, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.http_port, self.grpc_port, self.monitoring_port = ports.free(3)
        self.token_file, self.log = folder / "token", folder / "log"
        self.token_file.write_text(TOKEN)
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        environ = {
            **os.environ,
            "TRIDENT_GATEWAY_HTTP_PORT": str(self.http_port),
            "TRIDENT_GATEWAY_GRPC_PORT": str(self.grpc_port),
            "TRIDENT_GATEWAY_MONITORING_PORT": str(self.monitoring_port),
            "TRIDENT_GATEWAY_REPLICAS": "registered",
            "TRIDENT_GATEWAY_ADMIN_TOKEN_FILE": str(self.token_file),
            "TRIDENT_GATEWAY_CONTINUATIONS": "0",  # which would hide a stream that a drain has cut
        }
        with self.log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gateway"], cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=errors
            )
        assert self.process.stdout and self.process.stdout.readline().startswith(b"http"), self.log.read_text()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()  # type: ignore[union-attr]

    def in_use(self) -> set[str]:
        """The addresses of the replicas that get requests."""
        url = f"http://127.0.0.1:{self.http_port}/admin/replicas"
        request = urllib.request.Request(url, headers={"authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return {entry["address"] for entry in json.load(answer)["replicas"] if entry["in_use"]}


@pytest.fixture(scope="module")
def gateway(engine_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    gateway = Gateway(tmp_path_factory.mktemp("gateway"))
    gateway.start()
    try:
        yield gateway
        assert "Traceback" not in gateway.log.read_text()
    finally:
        gateway.kill()


def registered(gateway: Gateway) -> contextlib.AbstractContextManager[Replica]:
    where = f"127.0.0.1:{gateway.http_port}"
    return running("demo", register_=where, register_token_file=gateway.token_file, stall_s=3600, drain_s=600)


async def until(condition: Callable[[], bool], patience_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + patience_s
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline_s, "it did not come to hold"
        await asyncio.sleep(0.02)


async def test_no_stream_is_lost_while_replicas_come_and_go(gateway: Gateway):
    load, older = Load(), contextlib.ExitStack()
    first = older.enter_context(registered(gateway))
    try:
        await until(lambda: gateway.in_use() == {first.grpc_url})
        async with load.running(gateway.http_port, gateway.grpc_port):
            for _ in range(2):  # 1 → 2 → 1; it is always the older one that goes
                newer = contextlib.ExitStack()
                second = await asyncio.to_thread(newer.enter_context, registered(gateway))
                try:
                    await until(lambda: len(gateway.in_use()) == 2)
                    await asyncio.sleep(0.5)
                    await asyncio.to_thread(older.close)
                finally:
                    older = newer
                assert gateway.in_use() == {second.grpc_url}  # noqa: B023
        assert not load.failed and load.ended > 20
    finally:
        older.close()


async def test_a_killed_supervisor_and_a_killed_gateway_are_got_over(gateway: Gateway):
    with registered(gateway) as kept, registered(gateway) as killed:
        await until(lambda: gateway.in_use() == {kept.grpc_url, killed.grpc_url})
        os.kill(killed.pid, signal.SIGKILL)
        await until(lambda: gateway.in_use() == {kept.grpc_url})
        gateway.kill()
        gateway.start()
        await until(lambda: gateway.in_use() == {kept.grpc_url})
        load = Load()
        async with load.running(gateway.http_port, gateway.grpc_port, streams=1):
            await until(lambda: bool(load.ended or load.failed))
        assert not load.failed

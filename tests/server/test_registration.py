"""Registration at gateways: real ones, ones that hang, and ones that are not there."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from contract.errors import InvalidArgument
from server import registration
from server.registration import Registration
from server.settings import Settings
from tests.fakes.replica import FakeReplica
from tests.gateway.running import gateway, until

TOKEN = "an-operators-token-0123"
REQUEST = {"model": "demo", "prompt": "one two", "max_tokens": 3}


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN)
    return path


class Server:
    """The registration of one server, whose state a test sets."""

    def __init__(self, token_file, where: str, port: int = 8001, **settings) -> None:
        self.state, self.said = "ready", []
        values = {"register_": where, "register_token_file": token_file, "grpc_port": port, **settings}
        self.registration = Registration(
            Settings(**values), {"engine": "demo", "slots": 4}, lambda: (self.state, None), self.said.append
        )


@contextlib.asynccontextmanager
async def hung_gateway():
    """It accepts connections and never answers, as one that is stopped."""

    async def ignore(reader, writer):
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(ignore, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def test_a_real_gateway_hears_of_it_at_once_and_of_its_withdrawal(token_file):
    async with FakeReplica() as replica, gateway(admin_token_file=token_file, replicas="registered") as running:
        server = Server(token_file, running.base_url[7:], int(replica.url.rpartition(":")[2]))
        entries = running.service.replicas.registrations.entries
        await until(lambda: bool(running.service.replicas.ready()))
        [entry] = entries()
        assert entry["engine"] == "demo" and entry["slots"] == 4 and entry["address"] == replica.url
        assert (await running.post("/v1/completions", REQUEST))[0] == 200
        server.state = "draining"
        await server.registration.withdraw()
        assert not running.service.replicas.all() and entries()[0]["state"] == "draining"
        await server.registration.close()
        assert not entries() and not server.said


@pytest.mark.slow
async def test_every_gateway_is_told_and_one_that_hangs_delays_no_other(token_file, monkeypatch):
    monkeypatch.setattr(registration, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(registration, "NOTICE_S", 0.0)
    monkeypatch.setattr(registration, "BEAT_S", 0.02)
    async with hung_gateway() as hung, gateway(admin_token_file=token_file, replicas="registered") as running:
        server = Server(token_file, f"{hung},{running.base_url[7:]},127.0.0.1:1")
        entries = running.service.replicas.registrations.entries
        await until(lambda: bool(entries()))
        before_s = entries()[0]["beat_age_s"]
        for part in ("no answer within 1 s", "127.0.0.1:1:"):
            await until(lambda part=part: any(part in line for line in server.said))
        await until(lambda: entries()[0]["beat_age_s"] <= max(before_s, 0.2))
        server.state = "draining"
        began_s = time.monotonic()
        await server.registration.withdraw()
        assert entries()[0]["state"] == "draining" and time.monotonic() - began_s < 30
        await server.registration.close()
        assert not entries()


async def test_a_gateway_that_comes_later_is_told_and_a_wrong_token_is_said_once(token_file, tmp_path, monkeypatch):
    monkeypatch.setattr(registration, "BEAT_S", 0.02)
    wrong = tmp_path / "wrong"
    wrong.write_text("another-token-0123456")
    async with gateway(admin_token_file=token_file, replicas="registered") as running:
        server = Server(wrong, running.base_url[7:])
        await until(lambda: bool(server.said))
        await asyncio.sleep(0.1)
        [line] = server.said
        assert "HTTP 401" in line and TOKEN not in line
        wrong.write_text(TOKEN)
        await until(lambda: len(server.said) == 2)
        assert "accepts the registration" in server.said[1]
        await server.registration.close()


async def test_an_old_state_never_arrives_behind_a_new_one(token_file, monkeypatch):
    monkeypatch.setattr(registration, "NOTICE_S", 0.0)
    async with gateway(admin_token_file=token_file, replicas="registered") as running:
        server = Server(token_file, running.base_url[7:])
        entries = running.service.replicas.registrations.entries
        await until(lambda: bool(entries()))
        for _ in range(20):
            server.state = "ready"
            server.registration.changed()
            await asyncio.sleep(0.002)
            server.state = "draining"
            await server.registration.withdraw()
            assert entries()[0]["state"] == "draining"
        await server.registration.close()


async def test_the_address_is_what_the_gateway_can_reach(token_file):
    async with gateway(admin_token_file=token_file, replicas="registered") as running:
        entries = running.service.replicas.registrations.entries
        for settings, host in (({"host": "0.0.0.0"}, "127.0.0.1"), ({"advertise": "pod-0.trident"}, "pod-0.trident")):
            server = Server(token_file, running.base_url[7:], register_pool="", **settings)
            await until(lambda: bool(entries()))
            assert entries()[0]["address"] == f"{host}:8001"
            assert entries()[0]["metrics_url"] == f"http://{host}:8002/metrics"
            await server.registration.close()


def test_what_is_no_gateway_or_no_token_is_refused(token_file, tmp_path):
    for where in ("http://gateway:9000", "gateway:x", ","):
        with pytest.raises(InvalidArgument, match="TRIDENT_REGISTER: must be HOST:PORT"):
            Settings.from_environment({"TRIDENT_REGISTER": where, "TRIDENT_REGISTER_TOKEN_FILE": str(token_file)})
    for environ in ({}, {"TRIDENT_REGISTER_TOKEN_FILE": str(tmp_path / "none")}):
        with pytest.raises(InvalidArgument, match="TRIDENT_REGISTER_TOKEN_FILE: must be a file"):
            Settings.from_environment({"TRIDENT_REGISTER": "gateway:9000", **environ})

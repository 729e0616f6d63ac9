"""The call that says a batch is over, as a receiver sees it, and whom it never reaches."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")
for needed in ("starlette", "uvicorn", "orjson", "pydantic", "prometheus_client", "opentelemetry.sdk", "httptools"):
    pytest.importorskip(needed)

from aiohttp import web

from contract.errors import InvalidArgument
from gateway.batch.webhook import FIRST_WAIT_S, MAX_ATTEMPTS, Webhooks, wait_s
from tests.fakes.replica import FakeReplica
from tests.gateway.batch.test_endpoints import chat, client, jsonl, made
from tests.gateway.running import gateway, until

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()


class Receiver:
    """Answers with the statuses in turn, the last one for ever; keeps what came."""

    def __init__(self, *statuses: int) -> None:
        self.statuses, self.seen = list(statuses), []
        self.origin = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.seen.append((request.path, dict(request.headers), await request.read()))
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        return web.Response(status=status, headers={"location": "/elsewhere"} if status == 307 else {})


@contextlib.asynccontextmanager
async def receiving(*statuses: int) -> AsyncIterator[Receiver]:
    receiver = Receiver(*statuses)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", receiver.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    receiver.origin = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    try:
        yield receiver
    finally:
        await runner.cleanup()


def configured(tmp_path: Path, receiver: Receiver) -> dict[str, Any]:
    return {
        "batch_db": tmp_path / "b",
        "batch_webhook_origins": f"https://hooks.example.org, {receiver.origin}",
        "batch_webhook_secret": SECRET,
    }


@pytest.mark.slow  # a tick of the worker
async def test_the_end_of_a_batch_is_called_signed_as_openais_client_verifies_it(tmp_path: Path):
    async with FakeReplica() as replica, receiving(200) as receiver:
        async with gateway(replica, **configured(tmp_path, receiver)) as running, client(running) as ask:
            url = receiver.origin + "/batches?x=1"
            batch = await made(ask, jsonl(chat("a")), extra_body={"webhook_url": url})
            await until(lambda: bool(receiver.seen))
            [(path, headers, body)] = receiver.seen
            event = ask.webhooks.unwrap(body, headers, secret=SECRET)
            assert path == "/batches" and event.type == "batch.completed" and event.data.id == batch.id
            with pytest.raises(openai.InvalidWebhookSignatureError):
                ask.webhooks.unwrap(body + b" ", headers, secret=SECRET)
            with pytest.raises(openai.InvalidWebhookSignatureError):
                ask.webhooks.unwrap(body, headers, secret="whsec_" + base64.b64encode(bytes(32)).decode())


@pytest.mark.slow  # three ticks of the worker
async def test_a_receiver_that_fails_is_called_again_with_the_same_id(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("gateway.batch.webhook.FIRST_WAIT_S", 0.0)
    async with FakeReplica() as replica, receiving(500, 307, 204) as receiver:
        async with gateway(replica, **configured(tmp_path, receiver)) as running, client(running) as ask:
            await made(ask, jsonl(chat("a")), extra_body={"webhook_url": receiver.origin + "/hook"})
            await until(lambda: len(receiver.seen) == 3)
            assert {path for path, *_ in receiver.seen} == {"/hook"}  # no redirect is followed
            assert len({headers["webhook-id"] for _, headers, _ in receiver.seen}) == 1
            metrics = await running.metrics()
            assert metrics['trident_gateway_batch_webhooks_total{outcome="retried"}'] == 2


def test_waits_grow_and_end():
    waits = [wait_s(attempt) for attempt in range(1, MAX_ATTEMPTS + 1)]
    assert waits[0] == FIRST_WAIT_S and waits[-1] is None and None not in waits[:-1]
    assert waits[:-1] == sorted(waits[:-1]) and sum(waits[:-1]) < 86_400


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example.org.evil.example/x",
        "https://hooks.example.org@evil.example/x",
        "https://evil.example/https://hooks.example.org",
        "http://hooks.example.org/x",  # the scheme is part of an origin
        "https://hooks.example.org:444/x",
        "https://user:password@hooks.example.org/x",
        "https://hooks.example.org:99999/x",
        "https://[::1]/x",
        "http://169.254.169.254/latest/meta-data",
        "file:///etc/passwd",
        "gopher://hooks.example.org/x",
        "//hooks.example.org/x",
        "https://hooks.example.org/\r\nx: y",
        "https://hooks.example.org/ü",
        "https://hooks.example.org\\@evil.example/",
        "https://hooks.example.org/" + "x" * 2000,
        "",
    ],
)
def test_only_configured_origins_are_called(url):
    with pytest.raises(InvalidArgument, match="webhook_url"):
        Webhooks(("https://hooks.example.org",), lambda: SECRET).check(url)


def test_configured_origins_are_allowed_however_they_are_written():
    hooks = Webhooks(("https://hooks.example.org", "http://127.0.0.1:8080/"), lambda: SECRET)
    for url in ("https://HOOKS.example.org:443/x?y#z", "https://hooks.example.org", "http://127.0.0.1:8080/x"):
        hooks.check(url)


def test_webhooks_are_off_unless_they_are_configured_whole():
    with pytest.raises(InvalidArgument, match="not configured"):
        Webhooks().check("https://hooks.example.org")
    for secret in ("", "whsec_", "whsec_c2hvcnQ=", "whsec_!!!", "whsec_é", SECRET.removeprefix("whsec_")):
        with pytest.raises(InvalidArgument, match="^TRIDENT_GATEWAY_BATCH_WEBHOOK_SECRET") as refused:
            Webhooks(("https://hooks.example.org",), lambda secret=secret: secret)
        assert not secret or secret not in str(refused.value).replace("whsec_ and", "")
    for origin in (
        "hooks.example.org",
        "https://",
        "https://a.example/path",
        "ftp://a.example",
        "https://a:b@c.example",
        "https://[::1",
    ):
        with pytest.raises(InvalidArgument, match="^TRIDENT_GATEWAY_BATCH_WEBHOOK_ORIGINS"):
            Webhooks((origin,), lambda: SECRET)

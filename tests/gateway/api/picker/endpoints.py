"""What Envoy forwards to in these tests: HTTP servers that say who they are, and replicas behind the picker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.fakes.replica import FakeReplica
from tests.gateway.running import Running, gateway


@dataclass
class Endpoint:
    """An HTTP server. answer: in place of telling about itself. held: cleared, it does not answer.

    seen: the bodies, with the path and the headers.
    """

    answer: tuple[int, dict[str, str], bytes] | None = None
    held: asyncio.Event = field(default_factory=asyncio.Event)
    seen: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    runner: web.AppRunner | None = None

    async def serve(self, request: web.Request) -> web.Response:
        body = await request.text()
        self.seen.append(
            {"path": request.path, "body": body, "headers": {k.lower(): v for k, v in request.headers.items()}}
        )
        await self.held.wait()
        if self.answer is not None:
            status, headers, data = self.answer
            return web.Response(status=status, headers=headers, body=data)
        usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        return web.json_response({"endpoint": self.url, "body": body, "usage": usage})

    async def start(self) -> None:
        self.held.set()
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self.serve)
        self.runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None


@dataclass
class Pool:
    """A picker's gateway, its replicas and their HTTP endpoints, in the same order."""

    running: Running
    replicas: list[FakeReplica]
    endpoints: list[Endpoint]

    @property
    def urls(self) -> list[str]:
        """Every endpoint: those of HTTP and those of gRPC."""
        return [each.url for each in (*self.endpoints, *self.replicas)]

    def outstanding(self) -> list[int]:
        """Requests booked at each replica."""
        booked = {each.url: each.work.outstanding for each in self.running.service.replicas.all()}
        return [booked[replica.url] for replica in self.replicas]


@contextlib.asynccontextmanager
async def pool(size: int = 2, **settings: Any) -> AsyncIterator[Pool]:
    """A gateway with a picker in front of ``size`` replicas."""
    async with contextlib.AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(FakeReplica()) for _ in range(size)]
        endpoints = [Endpoint() for _ in replicas]
        for endpoint in endpoints:
            await endpoint.start()
            stack.push_async_callback(endpoint.stop)
        named = {replica.url: endpoint.url for replica, endpoint in zip(replicas, endpoints, strict=True)}
        values = {"picker_port": 0, "picker_endpoints": named, **settings}
        running = await stack.enter_async_context(gateway(*replicas, **values))
        yield Pool(running, replicas, endpoints)

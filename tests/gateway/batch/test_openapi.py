"""What is published about files and batches, held to by schemathesis."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

for needed in ("starlette", "uvicorn", "orjson", "pydantic", "prometheus_client", "opentelemetry.sdk", "schemathesis"):
    pytest.importorskip(needed)

from gateway import openapi
from gateway.config.settings import Settings
from tests.fakes.replica import FakeReplica
from tests.gateway.running import gateway


def test_files_and_batches_are_published_where_they_are_served(tmp_path: Path):
    assert not any("batch" in path for path in openapi.document(Settings())["paths"])
    paths = openapi.document(Settings(batch_db=tmp_path / "b"))["paths"]
    assert set(paths["/v1/files/{id}"]) == {"get", "delete"} and set(paths["/v1/batches"]) == {"get", "post"}
    [body] = paths["/v1/batches"]["post"]["requestBody"]["content"].values()
    assert "webhook_url" not in body["schema"]["properties"]  # it would be refused


@pytest.mark.slow
async def test_schemathesis_finds_nothing(tmp_path: Path):
    async with FakeReplica() as replica, gateway(replica, batch_db=tmp_path / "b", batch_max_batches=1000) as running:
        arguments = ["run", f"{running.base_url}/openapi.json", "--url", running.base_url]
        arguments += ["--include-path-regex", "/v1/(files|batches)", "--max-examples", "20", "--no-color"]
        process = await asyncio.create_subprocess_exec(
            Path(sys.executable).parent / "st", *arguments, cwd=tmp_path, stdout=-1, stderr=-2
        )
        message, _ = await asyncio.wait_for(process.communicate(), 600)
        assert process.returncode == 0, message.decode()[-4000:]

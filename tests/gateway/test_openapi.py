"""The published schema, and what a machine that knows nothing else finds with it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.fakes.replica import FakeReplica, Script
from tests.gateway.running import gateway

# Two rules are not published: a tool turn answers a call of the assistant's turn before it, which a schema cannot
# express; best_of equals n, a union of so many cases that schemathesis generates nothing.
_CONFIG = """
[[operations]]
include-path = "/v1/completions"
checks.positive_data_acceptance.enabled = false

[[operations]]
include-path = "/v1/chat/completions"
checks.positive_data_acceptance.enabled = false
"""


@pytest.mark.slow
async def test_schemathesis_finds_nothing_wrong(tmp_path: Path):
    async with FakeReplica(lambda seen: Script((" a", " b"))) as replica, gateway(replica) as running:
        program = Path(sys.executable).with_name("schemathesis")
        arguments = ["run", f"{running.base_url}/openapi.json", "--max-examples", "25", "--seed", "1", "--no-color"]
        (tmp_path / "schemathesis.toml").write_text(_CONFIG)
        process = await asyncio.create_subprocess_exec(
            str(program), *arguments, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), 600)
        except asyncio.TimeoutError:
            process.kill()
            await process.wait()
            raise
        assert process.returncode == 0, output.decode()[-6000:]
        # What is only slow or strange would end in a defect of ours.
        page = await running.metrics()
        assert not [name for name in page if "requests_total" in name and 'code="500"' in name]

"""The published schema, and what a machine that knows nothing else finds with it."""

from __future__ import annotations

import asyncio
import os
import sys
from itertools import combinations, product
from pathlib import Path

import jsonschema_rs
import pytest

from contract.errors import InvalidArgument
from gateway import openapi
from gateway.api.schemas import Message
from gateway.config.settings import Settings
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.running import gateway

# Of responses more cannot be expressed: references to stored items, and which fields go together.
_CONFIG = """
[[operations]]
include-path = "/v1/responses"
checks.positive_data_acceptance.enabled = false
"""
# A schema cannot express that a call's arguments are JSON in a string, nor that a tool's turn answers a call of the
# turn before it, nor that tools differ in name and tool_choice names one of them: such turns, well-formed calls, names
# of tools and equal tools are left out of generated chats. All else that the schema allows must be accepted.
_HOOKS = """
import schemathesis

def plain(turn):
    if not isinstance(turn, dict) or not isinstance(turn.get("content") or "", (str, list)):
        return turn
    if turn.get("role") == "tool" and isinstance(turn.get("tool_call_id"), str):
        return {"role": "user", "content": turn.get("content") or ""}
    calls = turn.get("tool_calls")
    if turn.get("role") == "assistant" and isinstance(calls, list) and all(isinstance(call, dict) for call in calls):
        return {**turn, "tool_calls": None, "content": turn.get("content") or ""}
    return turn

def name(tool):
    function = tool.get("function") if isinstance(tool, dict) else None
    return str(function["name"] if isinstance(function, dict) and "name" in function else tool)

@schemathesis.hook
def map_body(context, body):
    if isinstance(body, dict) and isinstance(body.get("messages"), list):
        body["messages"] = [plain(turn) for turn in body["messages"]]
        if isinstance(body.get("tool_choice"), dict) and isinstance(body["tool_choice"].get("function"), dict):
            del body["tool_choice"]
        if isinstance(body.get("tools"), list):
            body["tools"] = list({name(tool): tool for tool in body["tools"]}.values())
    return body
"""


@pytest.mark.slow
async def test_schemathesis_finds_nothing_wrong(tmp_path: Path):
    async with FakeReplica(lambda seen: Script((" a", " b"))) as replica, gateway(replica) as running:
        program = Path(sys.executable).with_name("schemathesis")
        arguments = ["run", f"{running.base_url}/openapi.json", "--max-examples", "25", "--seed", "1", "--no-color"]
        (tmp_path / "hooks.py").write_text(_HOOKS)
        (tmp_path / "schemathesis.toml").write_text(_CONFIG)
        process = await asyncio.create_subprocess_exec(
            str(program),
            *arguments,
            cwd=tmp_path,
            env={**os.environ, "SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(tmp_path)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
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


def test_the_messages_that_the_schema_allows_are_those_that_are_accepted():
    document = openapi.document(Settings())
    schema = jsonschema_rs.validator_for({"$ref": "#/components/schemas/Message", **document})
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    fields = {"content": "x", "name": "n", "reasoning_content": "hm", "tool_calls": [call], "tool_call_id": "a"}
    for role, count in product(("system", "developer", "user", "assistant", "tool"), range(len(fields) + 1)):
        for names in combinations(fields, count):
            message = {"role": role, **{name: fields[name] for name in names}}
            try:
                Message.model_validate(message).plain("messages.0")
                accepted = True
            except InvalidArgument:
                accepted = False
            assert schema.is_valid(message) == accepted, message


def test_the_parameters_of_usage_are_those_that_it_reads(tmp_path: Path):
    paths = openapi.document(Settings(usage_db=str(tmp_path / "usage.db")))["paths"]
    for path, more in (("/v1/usage", {"group_by"}), ("/v1/usage/requests", {"request_id", "limit", "after"})):
        names = {parameter["name"] for parameter in paths[path]["get"]["parameters"]}
        assert names == {"from", "to", "tenant", "model", "endpoint", "time_zone", "format", *more}


def test_files_and_batches_are_published_where_they_are_served(tmp_path: Path):
    assert not any("batch" in path for path in openapi.document(Settings())["paths"])
    paths = openapi.document(Settings(batch_db=tmp_path / "b"))["paths"]
    assert set(paths["/v1/files/{id}"]) == {"get", "delete"} and set(paths["/v1/batches"]) == {"get", "post"}
    [body] = paths["/v1/batches"]["post"]["requestBody"]["content"].values()
    assert "webhook_url" not in body["schema"]["properties"]  # it would be refused


@pytest.mark.slow
async def test_schemathesis_finds_nothing_in_files_and_batches(tmp_path: Path):
    async with FakeReplica() as replica, gateway(replica, batch_db=tmp_path / "b", batch_max_batches=1000) as running:
        arguments = ["run", f"{running.base_url}/openapi.json", "--url", running.base_url]
        arguments += ["--include-path-regex", "/v1/(files|batches)", "--max-examples", "20", "--no-color"]
        process = await asyncio.create_subprocess_exec(
            Path(sys.executable).parent / "st", *arguments, cwd=tmp_path, stdout=-1, stderr=-2
        )
        message, _ = await asyncio.wait_for(process.communicate(), 600)
        assert process.returncode == 0, message.decode()[-4000:]

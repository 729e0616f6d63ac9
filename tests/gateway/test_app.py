"""The routes of the HTTP application that belong to no endpoint."""

from __future__ import annotations

import json

import pytest

from tests.fakes.replica import FakeReplica
from tests.gateway.running import gateway

pytestmark = pytest.mark.slow


async def test_models_are_listed_and_found_by_name():
    async with FakeReplica() as replica, gateway(replica) as running:
        status, text = await running.get("/v1/models")
        assert status == 200
        [model] = json.loads(text)["data"]
        assert json.loads((await running.get(f"/v1/models/{model['id']}"))[1]) == model
        status, text = await running.get("/v1/models/other")
        assert status == 404 and "other" in json.loads(text)["error"]["message"]


async def test_an_unknown_path_is_a_json_error_and_the_schema_is_published():
    async with FakeReplica() as replica, gateway(replica) as running:
        status, text = await running.get("/v1/nothing")
        assert status == 404 and json.loads(text)["error"]["code"] == "not_found"
        status, text = await running.get("/openapi.json")
        assert status == 200 and "/v1/chat/completions" in json.loads(text)["paths"]

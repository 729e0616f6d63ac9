"""Feedback's fields, and who may see and delete samples."""

from __future__ import annotations

import time

import aiohttp
import pytest

from contract.errors import InvalidArgument
from gateway.api.samples import Feedback
from gateway.api.schemas import checked
from gateway.samples.store import HELD, KEPT, SampleStore
from tests.gateway.running import gateway
from tests.gateway.samples.test_recorder import KEYS, config
from tests.gateway.samples.test_store import RULES, everything, sample

TOKEN = "an-operators-token-0123"


@pytest.mark.parametrize(
    ("sent", "request_id", "rating"),
    [
        ({"response_id": "chatcmpl-abc", "rating": "up"}, "abc", "up"),
        ({"response_id": "cmpl-abc", "score": 0.4}, "abc", "down"),
        ({"request_id": "abc", "score": 0.5}, "abc", "up"),
        ({"request_id": "chatcmpl-abc", "score": 1, "rating": "down"}, "chatcmpl-abc", "down"),
    ],
)
def test_a_request_is_named_by_its_id_or_its_response(sent, request_id, rating):
    fields = checked(Feedback, sent).fields()
    assert (fields["request_id"], fields["rating"]) == (request_id, rating)


@pytest.mark.parametrize(
    "wrong",
    [
        {"response_id": "resp_1", "request_id": None},
        {"comment": "x" * 4097},
        {"choice": -1},
        {"labels": ["x"] * 17},
        {"rating": "good"},
        {"score": "1"},
    ],
)
def test_what_is_wrong_is_named(wrong):
    with pytest.raises(InvalidArgument) as raised:
        checked(Feedback, {"request_id": "a", "rating": "up", **wrong})
    assert raised.value.field.partition(".")[0].partition("[")[0] in wrong


async def test_operators_see_sizes_and_delete_and_callers_do_not(tmp_path):
    token = tmp_path / "token"
    token.write_text(TOKEN)
    options = {"samples": tmp_path / "samples", "admin_token_file": token}
    async with gateway(config=config("fraction = 1.0"), **options) as running:
        store = SampleStore(tmp_path / "samples", None)
        for kind in (KEPT, HELD):
            for tenant in ("acme/in", "acme/also"):
                store.append(tenant, kind, [sample("one", f"text of {tenant}", time.time())], RULES)

        async def call(method: str, key: str, query: str = ""):
            url, headers = f"{running.base_url}/admin/samples{query}", {"authorization": f"Bearer {key}"}
            async with aiohttp.ClientSession() as session, session.request(method, url, headers=headers) as answer:
                return answer.status, await answer.json()

        status, seen = await call("GET", TOKEN)
        assert status == 200 and seen["encrypted"] is False and "text of" not in str(seen)
        assert [(row["tenant"], row["samples"]) for row in seen["tenants"]] == [("acme/also", 1), ("acme/in", 1)]
        for method in ("GET", "DELETE"):
            assert (await call(method, KEYS["in"], "?tenant=acme/in"))[0] == 403
            assert (await call(method, "wrong", "?tenant=acme/in"))[0] == 401
        status, problem = await call("DELETE", TOKEN)
        assert status == 400 and problem["error"]["param"] == "tenant"
        for name in ("acme", "acme/none", "acme/in/k"):
            status, problem = await call("DELETE", TOKEN, f"?tenant={name}")
            assert status == 404 and name in problem["error"]["message"]
        assert store.tenants() == ["acme/also", "acme/in"]
        status, answer = await call("DELETE", TOKEN, "?tenant=acme/out")  # no sample yet, one may be on its way
        assert status == 200 and answer["deleted_bytes"] == 0 and "acme/out" in store.tenants()
        status, answer = await call("DELETE", TOKEN, "?tenant=acme/in")
        assert status == 200 and answer["deleted_bytes"] > 0
        left = everything(tmp_path / "samples")
        assert b"text of acme/in" not in left and left.count(b"text of acme/also") == 2

"""OpenAI's client asks for responses: whole, streamed, stored and continued."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from contract.errors import EngineFailed, PromptTooLong
from contract.generation import FinishReason
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.api.responses.contract import check_event, check_list, check_response, folded
from tests.gateway.config.test_configuration import ALICE, BOB, keys
from tests.gateway.running import Running, gateway, until

pytestmark = pytest.mark.slow


def client(running: Running, api_key: str = "any") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{running.base_url}/v1", api_key=api_key, max_retries=0)


def words(*tokens: str, **more: Any) -> Any:
    return lambda seen: Script(tokens, **more)


def said(replica: FakeReplica) -> list[tuple[str, str]]:
    return [(one["role"], one["content"]) for one in json.loads(replica.seen[-1].value("messages"))]


async def test_a_response_is_that_of_its_stream_and_can_be_continued_retrieved_and_deleted() -> None:
    async with FakeReplica(words("Hel", "lo")) as replica, gateway(replica) as running, client(running) as ask:
        asked: Any = {"model": "demo", "instructions": "be", "temperature": 0.5}
        first = await ask.responses.create(**asked, input="hi", metadata={"a": "b"}, max_output_tokens=9)
        assert first.output_text == "Hello" and first.status == "completed" and first.usage.output_tokens == 2
        check_response(json.loads(first.to_json()))
        assert said(replica) == [("system", "be"), ("user", "hi")] and replica.seen[-1].value("max_tokens") == 9
        events = [one async for one in await ask.responses.create(**asked, input="hi", stream=True)]
        for event in events:
            check_event(json.loads(event.to_json()))
        streamed = folded([json.loads(event.to_json()) for event in events])
        assert streamed["output"][0]["content"][0]["text"] == first.output_text
        assert streamed["usage"] == json.loads(first.usage.to_json())
        second = await ask.responses.create(model="demo", input="more", previous_response_id=first.id)
        assert said(replica) == [("user", "hi"), ("assistant", "Hello"), ("user", "more")]
        listed = [one async for one in ask.responses.input_items.list(second.id, limit=2, order="asc")]
        assert [one.content[0].text for one in listed] == ["hi", "Hello", "more"]
        assert [one.id async for one in ask.responses.input_items.list(second.id, limit=1)] == [
            one.id for one in reversed(listed)
        ]
        _, page = await running.get(f"/v1/responses/{second.id}/input_items?limit=2")
        check_list(json.loads(page))
        assert json.loads(page)["has_more"] is True
        assert (await ask.responses.retrieve(second.id)).to_json() == second.to_json()
        assert (await ask.responses.retrieve(streamed["id"])).output_text == "Hello"
        reference = {"type": "item_reference", "id": first.output[0].id}
        await ask.responses.create(model="demo", input=[reference, {"role": "user", "content": "x"}])
        assert said(replica) == [("assistant", "Hello"), ("user", "x")]
        await ask.responses.create(model="demo", input=[*first.output, {"role": "user", "content": "x"}], store=False)
        assert said(replica) == [("assistant", "Hello"), ("user", "x")]
        await ask.responses.delete(first.id)
        for call in (ask.responses.retrieve, ask.responses.delete, ask.responses.input_items.list):
            with pytest.raises(openai.NotFoundError) as caught:
                await call(first.id)
            assert caught.value.body["param"] is None and caught.value.body["code"] == "not_found"
        with pytest.raises(openai.BadRequestError, match="is gone") as refused:
            await ask.responses.create(model="demo", input="x", previous_response_id=second.id)
        assert refused.value.body["param"] == "previous_response_id"
        page = await running.metrics()
        assert page['trident_gateway_requests_total{code="404",operation="responses",protocol="http"}'] == 3
        assert running.service.admission.running == 0


class Sum(BaseModel):
    a: int


async def test_openais_helpers_stream_and_parse() -> None:
    async with FakeReplica(words('{"a"', ": 5}")) as replica, gateway(replica) as running, client(running) as ask:
        parsed = await ask.responses.parse(model="demo", input="hi", text_format=Sum)
        assert parsed.output_parsed == Sum(a=5)
        assert "a" in json.loads(replica.seen[-1].value("guided_decoding_guide"))["properties"]
        async with ask.responses.stream(model="demo", input="hi", text_format=Sum) as stream:
            kinds = [event.type async for event in stream]
            done = await stream.get_final_response()
        assert done.output_parsed == Sum(a=5) and kinds[0] == "response.created" and kinds[-1] == "response.completed"
        raw = await ask.responses.create(model="demo", input="hi", include=["message.output_text.logprobs"])
        assert [one.logprob for one in raw.output[0].content[0].logprobs] == [-0.5, -0.5]


async def test_what_is_stored_survives_a_restart_and_belongs_to_its_tenant(tmp_path: Path) -> None:
    config = keys(ALICE, BOB)
    async with FakeReplica(words("a", finish_reason=FinishReason.LENGTH)) as replica:
        async with gateway(replica, config=config, response_db=tmp_path / "db") as running:
            async with client(running, ALICE) as ask:
                made = await ask.responses.create(model="demo", input="hi")
                assert made.status == "incomplete" and made.incomplete_details.reason == "max_output_tokens"
                unstored = await ask.responses.create(model="demo", input="hi", store=False)
        async with gateway(replica, config=config, response_db=tmp_path / "db") as running:
            async with client(running, ALICE) as ask, client(running, BOB) as other:
                assert (await ask.responses.retrieve(made.id)).output_text == "a"
                await ask.responses.create(model="demo", input="more", previous_response_id=made.id)
                with pytest.raises(openai.NotFoundError):
                    await ask.responses.retrieve(unstored.id)
                for call in (other.responses.retrieve, other.responses.delete, other.responses.input_items.list):
                    with pytest.raises(openai.NotFoundError, match=f"no such response: '{made.id}'"):
                        await call(made.id)
                with pytest.raises(openai.BadRequestError, match="must be the id of a stored response"):
                    await other.responses.create(model="demo", input="more", previous_response_id=made.id)
                with pytest.raises(openai.BadRequestError, match="input.0.id: must be of a stored item"):
                    reference: Any = {"type": "item_reference", "id": made.output[0].id}
                    await other.responses.create(model="demo", input=[reference])
            async with client(running, "wrong") as nobody:
                with pytest.raises(openai.AuthenticationError):
                    await nobody.responses.retrieve(made.id)


async def test_a_failure_in_the_middle_is_told_and_nothing_is_stored() -> None:
    script = words("a", "b", fail_after=1, error=EngineFailed("secret"))
    async with FakeReplica(script) as replica, gateway(replica) as running, client(running) as ask:
        events = [one async for one in await ask.responses.create(model="demo", input="hi", stream=True)]
        last = events[-1]
        assert last.type == "response.failed" and last.response.error.code == "server_error"
        assert "secret" not in last.response.error.message
        check_event(json.loads(last.to_json()))
        with pytest.raises(openai.NotFoundError):
            await ask.responses.retrieve(last.response.id)
        with pytest.raises(openai.InternalServerError):
            await ask.responses.create(model="demo", input="hi")
        replica.script = words(refuse=PromptTooLong("text_input", "has 9 tokens; allowed are 8"))
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                await ask.responses.create(model="demo", input="hi", stream=stream)
            assert caught.value.body["param"] == "input" and caught.value.code == "context_length_exceeded"


async def test_a_reader_that_leaves_frees_the_engine_and_stores_nothing() -> None:
    async with FakeReplica(words("a", "b", stall_after=1)) as replica:
        async with gateway(replica) as running, client(running) as ask:
            stream = await ask.responses.create(model="demo", input="hi", stream=True)
            created = await anext(aiter(stream))
            await stream.close()
            await until(lambda: replica.counts.running == 0 and running.service.admission.running == 0)
            with pytest.raises(openai.NotFoundError):
                await ask.responses.retrieve(created.response.id)


async def test_a_retry_with_an_idempotency_key_is_the_same_response() -> None:
    async with FakeReplica(words("a", "b")) as replica, gateway(replica) as running, client(running) as ask:
        asked: Any = {"model": "demo", "input": "hi", "extra_headers": {"idempotency-key": "k"}}
        first, again = await asyncio.gather(ask.responses.create(**asked), ask.responses.create(**asked))
        assert first.to_json() == again.to_json() and len(replica.seen) == 1
        assert (await ask.responses.retrieve(first.id)).output_text == "ab"


async def test_what_is_asked_of_a_stored_response_has_the_id_of_its_request() -> None:
    async with FakeReplica(words("a")) as replica, gateway(replica) as running, client(running) as ask:
        made = await ask.responses.create(model="demo", input="hi")
        raw = ask.responses.with_raw_response
        mine = {"extra_headers": {"x-request-id": "mine"}}
        for found in (await raw.retrieve(made.id, **mine), await raw.delete(made.id, **mine)):
            assert found.headers["x-request-id"] == "mine"
        with pytest.raises(openai.NotFoundError) as refused:
            await ask.responses.retrieve(made.id)
        assert refused.value.request_id


async def test_queries_and_other_methods_are_refused_by_name() -> None:
    async with FakeReplica(words("a")) as replica, gateway(replica) as running, client(running) as ask:
        made = await ask.responses.create(model="demo", input="hi")
        for query, problem in (
            ("limit=101", "limit: must be an integer from 1 to 100, got '101'"),
            ("order=up", "order: must be one of desc, asc, got 'up'"),
            ("after=x", "after: must be the id of an item of the response, got 'x'"),
            ("before=x", "before: is not supported; leave it out"),
        ):
            status, body = await running.get(f"/v1/responses/{made.id}/input_items?{query}")
            assert status == 400 and json.loads(body)["error"]["message"] == problem
        status, body = await running.get(f"/v1/responses/{made.id}?stream=true")
        assert status == 400 and "stream: is not supported" in body
        assert (await running.get("/v1/responses"))[0] == 405
        status, _, body = await running.post("/v1/responses", {"model": "demo", "input": "x", "background": True})
        assert status == 400 and body["error"]["param"] == "background"

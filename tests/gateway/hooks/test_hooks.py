"""Hooks on the wire: what they change, refuse and see, by every endpoint, and what a broken one does to others."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import openai
import pytest
from prometheus_client import CollectorRegistry

from clients import AsyncClient
from contract.errors import InvalidArgument, PermissionDenied
from contract.generation import GenerationRequest, SamplingParams
from gateway.config.policy import HookRules
from gateway.config.tenant import Tenant
from gateway.hooks.hooks import Hooks
from gateway.request_context import RequestContext
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.api.test_kserve import inputs, send_requests
from tests.gateway.config.test_configuration import ALICE, BOB, keys
from tests.gateway.hooks import sample_hooks
from tests.gateway.running import Running, gateway, until

SAMPLES = "tests.gateway.hooks.sample_hooks"
UPPER = f'[hooks.upper]\nuse = "{SAMPLES}:Upper"\ntimeout_ms = 5000.0\n'
ASK: dict[str, Any] = {"model": "demo", "prompt": "one two", "max_tokens": 3}


def words(*tokens: str) -> Any:
    return lambda seen: Script(tokens)


def of(kind: str, **more: Any) -> str:
    """The section of a hook whose filter is of this kind."""
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in more.items())
    return f'[hooks.{kind}]\nuse = "{SAMPLES}:Output"\noptions = {{ kind = "{kind}" }}\n{lines}'


async def text(running: Running, path: str = "/v1/completions", **more: Any) -> str:
    async with openai.AsyncOpenAI(base_url=f"{running.base_url}/v1", api_key="any", max_retries=0) as ask:
        got = await ask.completions.create(**{**ASK, **more})
        return "".join([part.choices[0].text async for part in got]) if more.get("stream") else got.choices[0].text


def hooks(**rules: HookRules) -> Hooks:
    known = {("acme/research", "acme/research/alice"): Tenant("acme/research")}
    made = Hooks(lambda tenant, key: known.get((tenant, key)), CollectorRegistry())
    made.prepare(rules)
    made.change()
    return made


async def test_without_hooks_nothing_is_made_for_a_request():
    context = RequestContext(Tenant(), "http", "chat", "r")
    with hooks().call(context) as none:
        assert none is None
    elsewhere = HookRules(use=f"{SAMPLES}:observer", tenants=("acme",))
    with hooks(elsewhere=elsewhere).call(context) as none:
        assert none is None


async def test_a_prompt_is_shown_once_for_all_its_choices_and_seeds_stay_apart():
    made = hooks(upper=HookRules(use=f"{SAMPLES}:Upper", timeout_ms=5000.0))
    prompts = ["one", "two"]
    asked = [
        GenerationRequest(text_input=prompt, sampling=SamplingParams(seed=seed))
        for prompt in prompts
        for seed in (7, 8)
    ]
    with made.call(RequestContext(Tenant(), "http", "chat", "r")) as found:
        assert found is not None and found.filters
        changed = await found.changed(asked, "demo", "")
    assert [(one.text_input, one.sampling.seed) for one in changed] == [("changed", 7), ("changed", 8)] * 2
    assert made._metrics.calls.labels("upper", "request", "ok")._value.get() == 2
    await made.close()
    assert sample_hooks.ENDED[-1][0].finish_reasons == ()


@pytest.mark.parametrize(("own", "seeds"), [(None, [5, 6, 7]), (2**64 - 1, [5, 6, 7])])
async def test_choices_differ_where_a_hook_sets_the_seed(own: int | None, seeds: list[int]):
    made = hooks(seed=HookRules(use=f"{SAMPLES}:Requests", options={"kind": "seed"}, timeout_ms=5000.0))
    each = [None if own is None else (own + choice) % 2**64 for choice in range(3)]
    asked = [GenerationRequest(text_input="one", sampling=SamplingParams(seed=seed)) for seed in each]
    asked = [replace(one, text_input=asked[0].text_input) for one in asked]
    with made.call(RequestContext(Tenant(), "http", "chat", "r")) as found:
        assert found is not None
        assert [one.sampling.seed for one in await found.changed(asked, "demo", "")] == seeds


@pytest.mark.parametrize("kind", ["stream", "number", "in place", "empty", "messages", "nonsense"])
async def test_a_request_that_cannot_be_served_is_a_failure(kind: str):
    rules = HookRules(use=f"{SAMPLES}:Requests", options={"kind": kind}, on_failure="open", timeout_ms=5000.0)
    chat = ({"role": "user", "content": "one"},)
    one = GenerationRequest(messages=chat) if kind == "in place" else GenerationRequest(text_input="one")
    made, asked = hooks(odd=rules), [one]
    with made.call(RequestContext(Tenant(), "http", "chat", "r")) as found:
        assert found is not None
        assert await found.changed(asked, "demo", "") == asked and chat[0]["content"] == "one"
    assert made._metrics.calls.labels("odd", "request", "error")._value.get() == 1


async def test_the_log_names_the_field_that_a_hook_made_wrong(caplog: pytest.LogCaptureFixture):
    for kind, told in (("number", "ValidationError of stop"), ("nonsense", "got str"), ("messages", "of messages")):
        rules = HookRules(use=f"{SAMPLES}:Requests", options={"kind": kind}, on_failure="open", timeout_ms=5000.0)
        with hooks(odd=rules).call(RequestContext(Tenant(), "http", "chat", "r")) as found:
            assert found is not None
            await found.changed([GenerationRequest(text_input="one")], "demo", "")
        assert told in caplog.messages[-1]


async def test_a_refused_reload_does_not_show_a_hook_as_called_again():
    out = HookRules(use=f"{SAMPLES}:Upper", timeout_ms=5000.0)
    made = hooks(upper=out)
    made._metrics.out.labels("upper").set(1)
    with pytest.raises(InvalidArgument):
        made.prepare({"upper": out.model_copy(update={"threads": 2}), "odd": HookRules(use="no.such:Hook")})
    assert made._metrics.out.labels("upper")._value.get() == 1
    made.prepare({"upper": out.model_copy(update={"threads": 2})})
    made.change()
    assert made._metrics.out.labels("upper")._value.get() == 0


async def test_a_hook_may_say_who_asks():
    made = hooks(own=HookRules(use=f"{SAMPLES}:OwnKeys", timeout_ms=5000.0))
    assert (await made.authenticated({"x-who": "acme/research/alice"})) == Tenant("acme/research")
    assert await made.authenticated({}) is None
    with pytest.raises(PermissionDenied):
        await made.authenticated({"x-who": "nobody"})


@pytest.mark.slow
async def test_requests_and_outputs_are_changed_on_every_endpoint():
    async with FakeReplica(words(" a", " b")) as replica, gateway(replica, config=UPPER) as running:
        for stream in (False, True):
            assert await text(running, stream=stream) == " A B"
        assert replica.seen[-1].value("text_input") == "changed" and replica.seen[-1].value("max_tokens") == 2
        async with openai.AsyncOpenAI(base_url=f"{running.base_url}/v1", api_key="any", max_retries=0) as ask:
            chat: Any = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
            whole = await ask.chat.completions.create(**chat, n=2)
            assert [choice.message.content for choice in whole.choices] == [" A B", " A B"]
            assert json.loads(replica.seen[-1].value("messages")) == [{"role": "user", "content": "changed"}]
            response = await ask.responses.create(model="demo", input="hi")
            assert response.output_text == " A B"
            events = [event async for event in await ask.responses.create(model="demo", input="hi", stream=True)]
            assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == " A B"
            with pytest.raises(openai.BadRequestError, match="hooks of this gateway"):
                await ask.chat.completions.create(**chat, logprobs=True)
        request = {"inputs": inputs("p", 4), "request_id": "x"}
        assert "".join(shown for _, shown in await send_requests(running, request)) == " A B"
        assert replica.seen[-1].value("text_input") == "changed" and replica.seen[-1].value("max_tokens") == 2
        status, _, error = await running.post("/v1/completions", ASK, x_forbidden="yes")
        assert status == 403 and error["error"]["message"] == "not this one"
        await until(lambda: bool(sample_hooks.ENDED) and isinstance(sample_hooks.ENDED[-1][0].error, PermissionDenied))
        ended = [outcome for outcome, call in sample_hooks.ENDED if call.operation == "chat" and outcome.usage][-1]
        assert ended.finish_reasons == ("stop", "stop") and ended.usage.output_tokens == 4
        counted = await running.metrics()
        assert counted['trident_gateway_hook_calls_total{hook="upper",method="request",result="refused"}'] == 1


@pytest.mark.slow
async def test_ids_that_show_the_text_are_not_sent_over_grpc():
    async with FakeReplica(words(" a", " b")) as replica, gateway(replica, config=UPPER) as running:
        for model in ("ensemble", "ensemble_packed"):
            async with AsyncClient(running.grpc_url, model=model) as client:
                done = await client.generate("p", max_tokens=4).complete()
            assert (
                done.text == " A B" and not done.token_ids and done.usage is not None and done.usage.output_tokens == 2
            )


@pytest.mark.slow
async def test_a_cached_text_is_the_original_and_every_reader_has_its_own_hooks():
    config = keys(ALICE, BOB) + UPPER + 'tenants = ["o0"]\n'
    asked, alice = {**ASK, "temperature": 0}, {"authorization": f"Bearer {ALICE}"}
    async with FakeReplica(words(" a", " b"), engine="e") as replica, gateway(replica, config=config) as running:
        await until(lambda: bool(running.service.replicas.engine("")))
        first = await running.post("/v1/completions", asked, **alice)
        again = await running.post("/v1/completions", {**asked, "prompt": "changed", "max_tokens": 2}, **alice)
        assert again[1]["x-trident-cache"] == "hit", "the key is that of the changed request"
        assert first[2]["choices"][0]["text"] == again[2]["choices"][0]["text"] == " A B"
        assert replica.counts.started == 1
        without = await running.post("/v1/completions", asked, authorization=f"Bearer {BOB}")
        assert without[2]["choices"][0]["text"] == " a b" and replica.counts.started == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Raises", "Hangs", "Spins", "Blocks", "Waits", "Nonsense"])
@pytest.mark.parametrize("rule", ["open", "closed"])
async def test_a_broken_hook_harms_no_other_stream(
    kind: str, rule: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    monkeypatch.setattr("gateway.hooks.runner.HANG_S", 0.2)
    sample_hooks.LET_GO.clear()
    request.addfinalizer(sample_hooks.LET_GO.set)
    config = keys(ALICE, BOB) + of(kind, on_failure=rule, timeout_ms=20.0, max_hangs=2, tenants=["o0"])
    alice, bob = ({"authorization": f"Bearer {key}"} for key in (ALICE, BOB))
    async with FakeReplica(words(" a", " b")) as replica, gateway(replica, config=config) as running:
        asked = [running.post("/v1/completions", ASK, **(alice if n % 2 else bob)) for n in range(8)]
        for n, (status, _, answer) in enumerate(await asyncio.gather(*asked)):
            if rule == "open" or not n % 2:
                assert (status, answer["choices"][0]["text"]) == (200, " a b")
            else:
                assert status == 503 and f"the hook {kind}" in answer["error"]["message"]
        if kind in ("Hangs", "Spins"):
            hook = running.service.hooks._hooks[0]
            await until(lambda: hook._runner.hangs >= 2)
            await running.post("/v1/completions", ASK, **alice)
            assert (await running.metrics())[f'trident_gateway_hook_out{{hook="{kind}"}}'] == 1
        assert not running.service.admission.running


@pytest.mark.slow
async def test_an_output_that_breaks_a_rule_ends_its_stream_with_the_reason():
    async with FakeReplica(words(" a", " b")) as replica, gateway(replica, config=of("Forbids")) as running:
        with pytest.raises(openai.APIError, match="the output broke a rule"):
            await text(running, stream=True)
        await until(lambda: replica.counts.running == 0)


@pytest.mark.slow
async def test_hooks_are_replaced_while_the_gateway_runs_and_a_wrong_name_changes_nothing():
    async with FakeReplica(words(" a")) as replica, gateway(replica, config=UPPER) as running:
        path = running.service.configuration.path
        assert path is not None
        path.write_text(UPPER + 'options = { suffix = "!" }\n')
        await running.service.configuration.reload()
        assert await text(running) == " A!"
        path.write_text(UPPER.replace("Upper", "Missing"))
        await running.service.configuration.reload()
        assert "hooks.upper.use" in running.service.configuration.problem
        assert await text(running) == " A!"
        assert "trident_gateway_hook_out{" in await running.metrics_page()
        path.write_text("")
        await running.service.configuration.reload()
        assert await text(running) == " a"
        assert "trident_gateway_hook_out{" not in await running.metrics_page()

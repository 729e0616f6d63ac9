"""The table of models: names, capabilities, allow lists, routers; alone, and behind a gateway with two pools."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.async_client import AsyncClient
from contract.errors import InvalidArgument, NotFound
from contract.generation import GenerationRequest, Guide, Usage
from gateway.config import policy
from gateway.config.configuration import Configuration
from gateway.config.policy import ModelRules
from gateway.config.pools import of as pools_of
from gateway.config.settings import Settings
from gateway.config.tenant import Tenant
from gateway.models import ESCALATE, HEADER, Models, ServedModel, needs_of
from gateway.service import Service
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.openai_upstream import upstream
from tests.gateway.running import Running, gateway, until

ANYONE = Tenant()
TEXT = GenerationRequest("hello", max_tokens=8)
CHAT = GenerationRequest(messages=({"role": "user", "content": "hello"},), max_tokens=8)
TOKENIZER = Path(__file__).resolve().parents[2] / "build" / "demo_model" / "checkpoint" / "tokenizer.json"
SIZES = ("small", "medium", "large")


def models(**table: dict[str, Any]) -> Models:
    made = Models(Settings())
    rules = policy.read("f", {"models": table, "overflow": {"far": {"url": "http://x/v1", "model": "m"}}}, {})
    made.change(rules.models)
    return made


def table(**more: Any) -> dict[str, dict[str, Any]]:
    return {name: {"pools": [name], **more} for name in SIZES}


async def chosen(
    made: Models,
    name: str,
    request: GenerationRequest = TEXT,
    tenant: Tenant = ANYONE,
    ready: Any = None,
    default_length: bool = False,
    **headers: str,
) -> str:
    sent = {k.replace("_", "-"): v for k, v in headers.items()}
    served = await made.serving(name, (request,), tenant, sent, ready or (lambda one: True), default_length)
    return served.name


def test_without_a_table_there_is_one_model_under_its_names_and_any_public_pool():
    made = Models(Settings())
    assert [made.find(name, Tenant()).name for name in ("demo", "ensemble", "ensemble_packed")] == ["demo"] * 3
    with pytest.raises(NotFound):
        Models(Settings(triton_model="textbook")).find("ensemble_packed", Tenant())
    assert not made.configured and made.pools == {} and made.find("demo", Tenant()).pool == ""


def test_names_aliases_and_the_replicas_own_name_find_a_model():
    made = models(small={"pools": ["p"], "aliases": ["gpt"]}, large={"pools": ["q", "r"], "fallbacks": ["far"]})
    assert [made.find(name, Tenant()).name for name in ("small", "gpt", "ensemble", "large")] == [
        *["small"] * 3,
        "large",
    ]
    assert made.pools == {"p": ("p",), "model large": ("q", "r")}


def test_adapters_are_models_of_their_own_that_are_served_by_their_base():
    made = models(base={"pools": ["p"], "adapters": ["french"], "aliases": ["b"]})
    for name in ("base:french", "b:french"):
        found = made.find(name, Tenant())
        assert (found.name, found.adapter, found.pool) == ("base:french", "french", "p")
    assert found.describe("EUR")["parent"] == "base"
    for unknown in ("base:german", "base:", "other:french"):
        with pytest.raises(NotFound):
            made.find(unknown, Tenant())
    assert [one.name for one in made.of(Tenant(models=("base:french",)))] == ["base:french"]


@given(st.sets(st.sampled_from(SIZES)))
def test_a_tenant_sees_and_gets_exactly_the_models_of_its_list(allowed: set[str]):
    made, tenant = models(**table()), Tenant(models=tuple(allowed))
    listed = {one.name for one in made.of(tenant)}
    assert listed == (allowed or set(SIZES))
    for name in SIZES:
        if name in listed:
            assert made.find(name, tenant).name == name
        else:
            with pytest.raises(NotFound) as refused:
                made.find(name, tenant)
            with pytest.raises(NotFound) as unknown:
                made.find("never", tenant)
            assert str(refused.value).replace(name, "never", 1) == str(unknown.value)


def test_needs_are_read_from_the_request():
    tools = GenerationRequest(messages=CHAT.messages, tools="[]", guide=Guide("json"))
    assert needs_of([TEXT]) == {"completions"} and needs_of([CHAT]) == {"chat"}
    assert needs_of([tools]) == {"chat", "tools", "schema"}


async def test_a_missing_capability_names_the_models_that_have_it():
    made = models(
        small={"pools": ["p"], "capabilities": ["completions"]},
        large={"pools": ["q"], "capabilities": ["completions", "chat"]},
        auto={"router": ["small"]},
    )
    assert await chosen(made, "large", CHAT) == "large"
    for name in ("small", "auto"):
        with pytest.raises(InvalidArgument, match=rf"model: must be one with chat: large; got {name}"):
            await chosen(made, name, CHAT)
    with pytest.raises(InvalidArgument, match="must be one with chat: no model of this gateway"):
        await chosen(made, "small", CHAT, Tenant(models=("small",)))


@given(
    sizes=st.lists(st.integers(10, 2000), min_size=3, max_size=3).map(sorted),
    able=st.lists(st.booleans(), min_size=3, max_size=3),
    up=st.lists(st.booleans(), min_size=3, max_size=3),
    max_tokens=st.integers(1, 2500),
    escalate=st.integers(0, 9),
)
def test_a_router_takes_the_smallest_that_fits_and_is_ready(sizes, able, up, max_tokens, escalate):
    capabilities = [["chat", "completions"] if one else ["completions"] for one in able]
    rows = {
        name: {"pools": [name], "context_length": size, "capabilities": can}
        for name, size, can in zip(SIZES, sizes, capabilities, strict=True)
    }
    made, request = (
        models(**rows, auto={"router": list(SIZES)}),
        GenerationRequest(messages=CHAT.messages, max_tokens=max_tokens),
    )
    ready = dict(zip(SIZES, up, strict=True))

    async def choose() -> str:
        return await chosen(made, "auto", request, ready=lambda one: ready[one.name], x_trident_escalate=str(escalate))

    prompt = made.find("small", Tenant()).prompt_tokens.estimate(request).likely  # type: ignore[union-attr]
    fitting = [name for name, size, can in zip(SIZES, sizes, able, strict=True) if can and prompt + max_tokens <= size]
    if not fitting:
        with pytest.raises(InvalidArgument, match="model: must"):
            asyncio.run(choose())
        return
    larger = fitting[min(escalate, len(fitting) - 1) :]
    assert asyncio.run(choose()) == next((name for name in larger if ready[name]), larger[0])


async def test_a_default_length_that_fits_nowhere_takes_the_largest_model_with_room_for_the_prompt():
    rows = {name: {"pools": [name], "context_length": size} for name, size in zip(SIZES, (64, 128, 256), strict=True)}
    made, request = models(**rows, auto={"router": list(SIZES)}), replace(CHAT, max_tokens=256)
    with pytest.raises(InvalidArgument, match="model: must have room"):
        await chosen(made, "auto", request)
    assert await chosen(made, "auto", request, default_length=True) == "large"
    long = GenerationRequest("word " * 1000, max_tokens=256)
    with pytest.raises(InvalidArgument, match="model: must have room"):
        await chosen(made, "auto", long, default_length=True)


async def test_a_router_keeps_to_the_tenants_models_and_refuses_a_bad_header():
    made = models(**table(), auto={"router": list(SIZES)})
    assert await chosen(made, "auto", tenant=Tenant(models=("auto", "large"))) == "large"
    for bad in ("-1", "10", "one", "", "9" * 5000):
        for name in ("auto", "small"):
            with pytest.raises(InvalidArgument, match=f"{ESCALATE}: must be an integer from 0 to 9"):
                await chosen(made, name, x_trident_escalate=bad)


def test_a_model_tells_what_it_can_do_and_what_it_costs():
    rules = ModelRules(pools=("p",), context_length=2048, price={"input": 1.0, "cached": 0.5, "output": 4.0})
    model = ServedModel("m", "p", "", rules)
    told = model.describe("EUR")
    assert (told["id"], told["context_length"], told["price"]["currency"]) == ("m", 2048, "EUR")
    assert model.price.micros(Usage(3000, 500, 1000)) == pytest.approx((2 * 1.0 + 0.5 + 2.0) * 1e6)
    assert ServedModel().price is None


def test_a_reload_keeps_what_a_model_has_learnt_about_its_tokens():
    made = models(a={"pools": ["p"]}, b={"pools": ["p"]})
    before = {name: made.find(name, Tenant()).prompt_tokens for name in "ab"}
    made.change({"a": ModelRules(pools=("q",)), "b": ModelRules(pools=("p",), aliases=("c",))})
    assert all(made.find(name, Tenant()).prompt_tokens is one for name, one in before.items())


TWO = """
[models.small]
pools = "small"
capabilities = ["chat", "completions"]
aliases = ["mini"]
price = { input = 1000.0, output = 2000.0 }
[models.large]
pools = ["large"]
capabilities = ["chat", "completions", "tools"]
context_length = 4096
[models.auto]
router = ["small", "large"]
"""


def body(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "one two", "max_tokens": 3, "temperature": 0, **more}


async def said(running: Running, model: str, **headers: str) -> tuple[str, str, str]:
    """Text, the name in the response, the name in its header."""
    status, found, answer = await running.post("/v1/completions", body(model), **headers)
    assert status == 200, answer
    return answer["choices"][0]["text"], answer["model"], found[HEADER]


def replicas() -> tuple[FakeReplica, FakeReplica]:
    return FakeReplica(lambda seen: Script((" s",))), FakeReplica(lambda seen: Script((" l",)))


def pools(small: FakeReplica, large: FakeReplica) -> dict[str, Any]:
    return {"replicas": f"small={small.url};large={large.url}"}


@pytest.mark.slow
async def test_each_name_reaches_its_own_pool_and_the_response_tells_which():
    async with replicas()[0] as small, replicas()[1] as large:
        async with gateway(small, large, config=TWO, **pools(small, large)) as running:
            assert await said(running, "small") == (" s", "small", "small")
            assert await said(running, "mini") == (" s", "small", "small")
            assert await said(running, "large") == (" l", "large", "large")  # equal prompts of two models share nothing
            assert await said(running, "auto") == (" s", "small", "small")
            assert await said(running, "auto", x_trident_escalate="1") == (" l", "large", "large")
            status, _, answer = await running.post("/v1/completions", body("other"))
            assert status == 404 and answer["error"]["code"] == "model_not_found", answer
            page = await running.metrics()
            assert page['trident_gateway_charges_total{model="small",tenant="anonymous"}'] >= 1
            listed = json.loads((await running.get("/v1/models"))[1])["data"]
            assert [one["id"] for one in listed] == ["small", "large", "auto"] and listed[2]["router"] == [
                "small",
                "large",
            ]
            async with AsyncClient(running.grpc_url, model="large") as client:
                assert (await client.generate("one two", max_tokens=3).complete()).text == " l"
                assert await client.model_ready("auto") and not await client.model_ready("other")
            async with AsyncClient(running.grpc_url, model="nothing") as client:
                with pytest.raises(NotFound, match="'nothing' does not exist; there is small, large, auto"):
                    await client.generate("one two", max_tokens=3).complete()


@pytest.mark.slow
async def test_streams_go_on_while_the_table_changes_under_them():
    gate = asyncio.Event()
    async with FakeReplica(lambda seen: Script((" a",) * 40, gap_s=0.02)) as small, FakeReplica() as large:
        async with gateway(small, large, config=TWO, **pools(small, large)) as running:

            async def stream() -> bytes:
                async with aiohttp.ClientSession() as session:
                    ask = body("small", stream=True, max_tokens=40)
                    async with session.post(f"{running.base_url}/v1/completions", json=ask) as answer:
                        gate.set()
                        return await answer.read()

            streaming = asyncio.create_task(stream())
            await gate.wait()
            path = running.service.configuration.path
            assert path is not None
            path.write_text('[models.small]\npools = "large"\n', encoding="utf-8")
            await running.service.configuration.poll()
            await until(lambda: [one.name for one in running.service.models.of(Tenant())] == ["small"])
            status, _, answer = await running.post("/v1/completions", body("small"))
            assert status == 200 and answer["choices"][0]["text"] == " one two one"
            assert (await running.post("/v1/completions", body("large")))[0] == 404
            data = await streaming
            assert data.count(b'" a"') == 40 and data.endswith(b"data: [DONE]\n\n")


@pytest.mark.slow
async def test_a_model_of_an_upstream_alone_and_one_that_falls_back_to_it():
    async with FakeReplica() as replica, upstream() as there:
        config = f"""
[overflow.far]
url = "{there.url}"
model = "theirs"
[models.remote]
fallbacks = "far"
[models.local]
pools = "local"
fallbacks = "far"
"""
        async with gateway(replica, config=config, replicas=f"local={replica.url};down=127.0.0.1:1") as running:
            assert (await said(running, "local"))[0] == " one two one" and not there.seen
            assert (await said(running, "remote"))[1:] == ("remote", "remote") and len(there.seen) == 1
            running.service.replicas.all()[0].health = type(running.service.replicas.all()[0].health)(healthy=False)
            assert (await said(running, "local"))[1] == "local" and len(there.seen) == 2
            async with AsyncClient(running.grpc_url, model="remote") as client:
                with pytest.raises(
                    InvalidArgument, match="model: must be one with replicas for this protocol, got remote"
                ):
                    await client.generate("one two", max_tokens=3).complete()


async def test_a_tokenizer_that_cannot_be_read_is_named_at_the_start_and_changes_nothing_later(tmp_path: Path):
    path = tmp_path / "gateway.toml"
    path.write_text('[models.a]\npools = "a"\ntokenizer = "/nowhere.json"\n', encoding="utf-8")
    settings = Settings(replicas="a=127.0.0.1:1", metrics_port=0, config=path)
    with pytest.raises(InvalidArgument, match=r"models\.a\.tokenizer: must be a tokenizer\.json, got /nowhere\.json"):
        Service(settings, Configuration(path, {}, pools_of(settings)))
    path.write_text('[models.a]\npools = "a"\n', encoding="utf-8")
    configuration = Configuration(path, {}, pools_of(settings))
    service = Service(settings, configuration)
    await service.start()
    path.write_text('[models.b]\npools = "a"\ntokenizer = "/nowhere.json"\n', encoding="utf-8")
    await configuration.poll()
    assert "models.b.tokenizer" in configuration.problem and [one.name for one in service.models.of(ANYONE)] == ["a"]
    await service.close()


def test_the_environment_names_a_model_for_each_pool_and_its_tokenizer():
    settings = Settings.from_environment(
        {"TRIDENT_GATEWAY_REPLICAS": "a=x:1;b=x:2", "TRIDENT_GATEWAY_MODELS": f"a={TOKENIZER},b={TOKENIZER}"}
    )
    service = Service(settings, Configuration(None, {}, pools_of(settings)))
    service.models.change(service._table(service.configuration.policy))
    assert [(one.name, one.pool) for one in service.models.of(ANYONE)] == [("a", "a"), ("b", "b")]
    file = {"models": {"big": {"pools": ["a"]}, "both": {"pools": ["a", "b"]}, "own": {"router": ["big"]}}}
    found = service._table(policy.read("f", file, {}))
    assert [found[name].tokenizer for name in file["models"]] == [TOKENIZER, TOKENIZER, None]
    with pytest.raises(InvalidArgument, match="TRIDENT_GATEWAY_MODELS: must name pools of a, b, got 'c'"):
        Settings.from_environment({"TRIDENT_GATEWAY_REPLICAS": "a=x:1;b=x:2", "TRIDENT_GATEWAY_MODELS": "c=t.json"})

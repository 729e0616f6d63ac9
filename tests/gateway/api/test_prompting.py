"""Requests that name a prompt template, over HTTP."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from contract.errors import InvalidArgument
from gateway.api.prompting import PromptReference
from gateway.config import policy
from gateway.prompts.chat_tokens import chat_tokens
from gateway.telemetry.tracing import Tracing
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.running import gateway, until

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TOKENIZER = Path(__file__).resolve().parents[3] / "build" / "demo_model" / "checkpoint" / "tokenizer.json"
TURN = ("user", "assistant")
TEXT = """
[variables.product]
max_length = 8
[[messages]]
role = "system"
content = "About {{ product }}, VERSION."
[[messages]]
role = "request"
[[messages]]
role = "user"
content = "Be short."
[parameters]
max_tokens = 7
temperature = 0.25
[budgets]
system = 1
"""
ASK = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    prompts = tmp_path / "prompts"
    (prompts / "support").mkdir(parents=True)
    for version in ("1.0.0", "1.1.0"):
        (prompts / "support" / f"{version}.toml").write_text(TEXT.replace("VERSION", version))
    return prompts


def said(replica: FakeReplica) -> list[tuple[str, str]]:
    return [(one["role"], one["content"]) for one in json.loads(replica.seen[-1].value("messages"))]


def named(**more: Any) -> dict[str, Any]:
    return {"prompt": {"id": "support", "variables": {"product": "tea"}, **more}}


@pytest.mark.slow
async def test_a_template_stands_around_the_chat_and_is_told_everywhere(folder: Path, caplog):
    caplog.set_level(logging.INFO)
    exporter = InMemorySpanExporter()
    script = Script((" my", " answer"))
    async with FakeReplica(lambda seen: script) as replica:
        async with gateway(replica, prompts=folder, tracing=Tracing(exporter=exporter)) as running:
            status, headers, _ = await running.post("/v1/chat/completions", {**ASK, **named(version="1.0.0")})
            assert (status, headers["x-trident-prompt"]) == (200, "support@1.0.0")
            assert headers["x-trident-prompt-warnings"].startswith("system ")
            assert said(replica) == [("system", "About tea, 1.0.0."), ("user", "hi"), ("user", "Be short.")]
            seen = replica.seen[-1]
            assert (seen.value("max_tokens"), seen.value("temperature")) == (7, 0.25)
            # What the request has wins, also under its other name, and no messages are needed.
            own = {"model": "demo", "max_completion_tokens": 3, "temperature": 1.0, **named()}
            _, headers, _ = await running.post("/v1/chat/completions", own)
            assert headers["x-trident-prompt"] == "support@1.1.0"
            assert said(replica) == [("system", "About tea, 1.1.0."), ("user", "Be short.")]
            assert replica.seen[-1].value("max_tokens") == 3 and replica.seen[-1].value("temperature") == 1.0
            # The version is in the place where it is asked for, and of another folder within a second.
            (folder / "support" / "1.2.0.toml").write_text(TEXT.replace("VERSION", "new"))
            await until(lambda: "1.2.0" in running.service.prompts.prompts["support"].versions)
            _, headers, _ = await running.post("/v1/chat/completions", {**ASK, **named(id="support@1")})
            assert headers["x-trident-prompt"] == "support@1.2.0"
            _, headers, _ = await running.post("/v1/chat/completions", ASK)
            assert "x-trident-prompt" not in headers
    roots = [span for span in exporter.get_finished_spans() if span.name == "chat demo"]
    assert [span.attributes.get("trident.prompt") for span in roots] == [
        "support@1.0.0",
        "support@1.1.0",
        "support@1.2.0",
        None,
    ]
    logged = [record.fields for record in caplog.records if "operation" in getattr(record, "fields", {})]
    assert [fields.get("prompt") for fields in logged[:2]] == ["support@1.0.0", "support@1.1.0"]


@pytest.mark.slow
async def test_responses_name_a_template_as_openai_does(folder: Path):
    async with FakeReplica(lambda seen: Script((" x",))) as replica, gateway(replica, prompts=folder) as running:
        variables = {"product": {"type": "input_text", "text": "tea"}}
        asked = {"model": "demo", "prompt": {"id": "support", "version": "1", "variables": variables}}
        status, headers, response = await running.post("/v1/responses", asked)
        assert status == 200 and headers["x-trident-prompt"] == "support@1.1.0"
        assert said(replica) == [("system", "About tea, 1.1.0."), ("user", "Be short.")]
        assert (response["temperature"], response["max_output_tokens"]) == (0.25, 7)
        assert response["prompt"] == {"id": "support", "version": "1.1.0", "variables": variables}
        more = {"model": "demo", "input": "more", "previous_response_id": response["id"], "temperature": 0.5, **named()}
        _, _, response = await running.post("/v1/responses", more)
        assert [role for role, _ in said(replica)] == ["system", "assistant", "user", "user"]
        assert response["temperature"] == 0.5


@pytest.mark.slow
async def test_a_wrong_reference_is_refused_by_its_field(folder: Path):
    wrong = (
        ({"id": "other"}, "prompt.id"),
        ({"id": "support"}, "prompt.variables.product"),
        ({"id": "support", "variables": {"product": "x" * 9}}, "prompt.variables.product"),
        ({"id": "support", "variables": {"product": "x", "y": 1}}, "prompt.variables.y"),
        ({"id": "support", "variables": {"product": "x"}, "version": "2"}, "prompt.version"),
        ({"id": "support", "variables": {"product": "x"}, "name": "2"}, "prompt.name"),
        ({"id": ""}, "prompt.id"),
        ("support", "prompt"),
    )
    async with FakeReplica() as replica, gateway(replica, prompts=folder) as running:
        for prompt, field in wrong:
            for path, body in (("/v1/chat/completions", ASK), ("/v1/responses", {"model": "demo", "input": "hi"})):
                status, _, answer = await running.post(path, {**body, "prompt": prompt})
                assert (status, answer["error"]["param"]) == (400, field), answer


@pytest.mark.slow
async def test_without_a_folder_templates_are_refused_and_messages_are_needed():
    async with FakeReplica() as replica, gateway(replica) as running:
        status, _, answer = await running.post("/v1/chat/completions", {**ASK, **named()})
        assert status == 400 and "TRIDENT_GATEWAY_PROMPTS" in answer["error"]["message"]
        status, _, answer = await running.post("/v1/chat/completions", {"model": "demo"})
        assert (status, answer["error"]["param"]) == (400, "messages")


def test_a_variable_may_be_a_text_object():
    reference = PromptReference.model_validate(
        {"id": "x", "variables": {"a": {"type": "input_text", "text": "b"}, "c": [1]}}
    )
    assert reference.values == {"a": "b", "c": [1]}


MODELS = f"""
[pools]
main = {{ replicas = "MAIN" }}
small = {{ replicas = "SMALL" }}
[models.demo]
pools = ["main"]
context_length = 150
tokenizer = "{TOKENIZER}"
[models.demo.context]
CONTEXT
[models.small]
pools = ["small"]
context_length = 150
tokenizer = "{TOKENIZER}"
"""
LONG = [
    {"role": "system", "content": "Be kind."},
    *({"role": role, "content": f"{role} {n} " + "def f(x): pass " * 3} for n in range(6) for role in TURN),
    {"role": "user", "content": "last"},
]


@contextlib.asynccontextmanager
async def serving(rules: str, small: Script, **more: Any):
    async with FakeReplica(lambda seen: Script((" x",))) as main, FakeReplica(lambda seen: small) as other:
        config = MODELS.replace("MAIN", main.url).replace("SMALL", other.url).replace("CONTEXT", rules)
        urls = {replica.url: replica.metrics_url for replica in (main, other)}
        async with gateway(config=config, metrics_urls=urls, **more) as running:
            await until(lambda: len(running.service.replicas.ready()) == 2)
            yield main, other, running


def tokens_of(replica: FakeReplica) -> int:
    counter, chat = chat_tokens(TOKENIZER), replica.seen[-1].value("messages")
    return len(counter.ids(counter.template.render(chat)))


def noted(headers: dict[str, str]) -> dict[str, str]:
    policy, *rest = headers["x-trident-context"].split("; ")
    return {"policy": policy, **dict(entry.split("=") for entry in rest)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["drop_oldest", "keep_system"])
async def test_a_chat_that_is_too_long_loses_its_oldest_turns(name: str):
    async with serving(f'policy = "{name}"', Script()) as (main, _, running):
        ask = {"model": "demo", "messages": LONG, "max_tokens": 20}
        status, headers, _ = await running.post("/v1/chat/completions", ask)
        assert status == 200 and tokens_of(main) <= 130
        sent = said(main)
        assert sent[-1] == ("user", "last") and len(sent) < len(LONG)
        assert (sent[0] == ("system", "Be kind.")) == (name == "keep_system")
        assert (LONG[1]["content"] in [text for _, text in sent]) == (name == "keep_system")
        note = noted(headers)
        assert note["policy"] == name and int(note["dropped_messages"]) == len(LONG) - len(sent)
        assert int(note["dropped_tokens"]) > 20
        # What fits is not touched, and what cannot fit is refused by its field.
        kept = [{"role": role, "content": text} for role, text in sent]
        status, headers, _ = await running.post("/v1/chat/completions", {**ask, "messages": kept})
        assert status == 200 and "x-trident-context" not in headers and said(main) == sent
        huge = [*LONG, {"role": "user", "content": "a b " * 200}]
        status, _, answer = await running.post("/v1/chat/completions", {**ask, "messages": huge})
        assert (status, answer["error"]["param"]) == (400, "messages"), answer


@pytest.mark.slow
async def test_a_summary_stands_in_place_of_what_is_left_out(caplog):
    caplog.set_level(logging.INFO)
    rules = 'policy = "summarise"\nsummary_model = "small"\nsummary_tokens = 24'
    async with serving(rules, Script((" They", " met."))) as (main, small, running):
        ask = {"model": "demo", "input": LONG, "max_output_tokens": 20}
        status, headers, response = await running.post("/v1/responses", ask)
        assert status == 200 and tokens_of(main) <= 130
        assert said(main)[0][1].endswith("Summary of the earlier conversation:\nThey met.")
        assert noted(headers)["policy"] == "summarise" and noted(headers)["summary_tokens"] == "2"
        assert tokens_of(small) <= 150 - 24 and said(small)[-1][1].count("user ") < 6
        # All of the conversation is stored, and shortened again.
        more = {"model": "demo", "input": "more", "previous_response_id": response["id"], "max_output_tokens": 20}
        status, headers, _ = await running.post("/v1/responses", more)
        assert status == 200 and int(noted(headers)["dropped_messages"]) >= 8
    logged = [record.fields for record in caplog.records if "operation" in getattr(record, "fields", {})]
    assert logged[0]["request_id"].endswith("-summary") and logged[0]["model"] == "small"
    assert logged[1]["context"].startswith("summarise; ") and logged[1]["tenant"] == logged[0]["tenant"]


@pytest.mark.slow
async def test_what_a_model_thought_is_no_part_of_its_summary():
    rules = 'policy = "summarise"\nsummary_model = "small"\nsummary_tokens = 24'
    script = Script(("<think>", "They met twice.", "</think>", "\n\nThey", " met."))
    async with serving(rules, script, reasoning_format="tagged") as (main, _, running):
        status, headers, _ = await running.post(
            "/v1/chat/completions", {"model": "demo", "messages": LONG, "max_tokens": 20}
        )
        assert status == 200 and noted(headers)["policy"] == "summarise"
        assert said(main)[0][1].endswith("Summary of the earlier conversation:\nThey met.")


@pytest.mark.slow
async def test_without_a_summary_in_time_the_turns_are_left_out():
    rules = 'policy = "summarise"\nsummary_model = "small"\nsummary_tokens = 24\nsummary_timeout_s = 0.2'
    async with serving(rules, Script((" late",), first_token_s=30.0)) as (main, small, running):
        ask = {"model": "demo", "messages": LONG, "max_tokens": 20}
        status, headers, _ = await running.post("/v1/chat/completions", ask)
        assert status == 200 and tokens_of(main) <= 130
        assert noted(headers)["policy"] == "keep_system" and noted(headers)["instead_of"] == "summarise"
        await until(lambda: small.counts.running == 0)


def test_a_policy_needs_a_limit_and_a_model_that_there_is():
    for rules, problem in (
        ('policy = "summarise"\n', "summary_model must be set"),
        ('policy = "summarise"\nsummary_model = "other"', "must be one of the models demo, small, got 'other'"),
        ('policy = "newest"\n', "models.demo.context.policy"),
    ):
        with pytest.raises(InvalidArgument) as raised:
            policy.read("f", tomllib.loads(MODELS.replace("CONTEXT", rules)), {})
        assert problem in str(raised.value)


@pytest.mark.slow
async def test_an_answer_without_max_tokens_has_what_its_prompt_leaves():
    """OpenAI's clients rarely send max_tokens: a conversation must not fail 256 tokens before its model is full."""
    async with FakeReplica(lambda seen: Script((" x",))) as replica:
        config = f'[models.demo]\npools = ["default"]\ncontext_length = 150\ntokenizer = "{TOKENIZER}"'
        async with gateway(config=config, replicas=f"default={replica.url}", metrics_port=0) as running:
            await until(lambda: bool(running.service.replicas.ready()))

            async def sent(path: str, **fields: Any) -> int:
                status, _, answer = await running.post(path, {"model": "demo", **fields})
                assert status == 200, answer
                return int(replica.seen[-1].value("max_tokens"))

            chat = {"messages": LONG[:5]}
            left = await sent("/v1/chat/completions", **chat)
            assert left == 150 - tokens_of(replica) > 0
            assert await sent("/v1/responses", input=LONG[:5]) == left
            # What a caller sends is sent on, for the replica to refuse.
            assert await sent("/v1/chat/completions", **chat, max_completion_tokens=149) == 149
            assert await sent("/v1/chat/completions", **chat, truncate_prompt_tokens=-1) == 256
            assert await sent("/v1/chat/completions", **chat, truncate_prompt_tokens=10) == 140
            assert await sent("/v1/completions", prompt=[1] * 145) == 5
            assert await sent("/v1/completions", prompt=[1] * 150) == 16  # nothing is left: the prompt is too long
            text = "def f(x): pass " * 23
            size = len(chat_tokens(TOKENIZER).ids(text, add_special_tokens=True))
            await sent("/v1/completions", prompt=["short", text], n=2)
            assert sorted(seen.value("max_tokens") for seen in replica.seen[-4:]) == [150 - size] * 2 + [16] * 2

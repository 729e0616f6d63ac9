"""The official openai client against the gateway in front of scripted replicas."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from contract.errors import EngineFailed, InvalidArgument, Overloaded, PromptTooLong
from contract.generation import FinishReason
from tests.fakes.replica import FakeReplica, Script, echo
from tests.gateway.config.test_configuration import ALICE, BOB, keys
from tests.gateway.running import Running, gateway, until

pytestmark = pytest.mark.slow

HELLO = [{"role": "user", "content": "say hello to me"}]


def client(running: Running, api_key: str = "any") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{running.base_url}/v1", api_key=api_key, max_retries=0)


def words(*tokens: str, **more: object):
    return lambda seen: Script(tokens, **more)


async def test_models_are_listed_and_one_can_be_asked_for():
    async with FakeReplica() as replica, gateway(replica) as running, client(running) as ask:
        assert [model.id async for model in ask.models.list()] == ["demo"]
        assert (await ask.models.retrieve("demo")).id == "demo"
        with pytest.raises(openai.NotFoundError):
            await ask.models.retrieve("other")


async def test_an_adapter_is_a_model_of_its_own():
    async with (
        FakeReplica(adapters=("poet", "lawyer")) as replica,
        gateway(replica) as running,
        client(running) as ask,
    ):

        async def ids() -> list[str]:
            return [model.id async for model in ask.models.list()]

        await until(lambda: len(running.service.replicas.adapters("")) == 2)
        assert await ids() == ["demo", "demo:lawyer", "demo:poet"]
        assert (await ask.models.retrieve("demo:poet")).id == "demo:poet"
        answer = await ask.chat.completions.create(model="demo:poet", messages=HELLO, prompt_cache_key="x")
        assert answer.model == "demo:poet" and replica.seen[-1].value("lora_name") == "poet"
        await ask.completions.create(model="demo", prompt="hello")
        assert replica.seen[-1].value("lora_name") is None
        with pytest.raises(openai.NotFoundError, match="there is demo, demo:lawyer, demo:poet"):
            await ask.completions.create(model="demo:nobody", prompt="hello")


async def test_a_chat_is_answered_whole():
    script = words(" Hello", ",", " you", finish_reason=FinishReason.STOP)
    async with FakeReplica(script) as replica, gateway(replica) as running, client(running) as ask:
        done = await ask.chat.completions.create(
            model="demo", messages=HELLO, max_completion_tokens=7, temperature=0, seed=3, stop=["X"]
        )
        assert done.choices[0].message.content == " Hello, you" and done.choices[0].finish_reason == "stop"
        assert done.choices[0].message.role == "assistant" and done.object == "chat.completion"
        assert done.usage.completion_tokens == 3 and done.usage.total_tokens == 3 + done.usage.prompt_tokens
        seen = replica.seen[-1]
        assert (seen.value("max_tokens"), seen.value("temperature"), seen.value("seed")) == (7, 0.0, 3)
        assert seen.inputs["stop_words"] == ["X"] and seen.value("stream") is False
        assert "say hello to me" in seen.value("messages")


async def test_a_chat_streams_its_role_its_text_its_end_and_its_usage():
    async with FakeReplica(words(" a", " b", " c")) as replica, gateway(replica) as running, client(running) as ask:
        stream = await ask.chat.completions.create(
            model="demo", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == " a b c"
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 3
        assert all(chunk.usage is None for chunk in chunks[:-1])
        assert len({chunk.id for chunk in chunks}) == 1


async def test_an_answer_can_be_sent_back_as_it_came():
    async with FakeReplica(words(" a")) as replica, gateway(replica) as running, client(running) as ask:
        message = (await ask.chat.completions.create(model="demo", messages=HELLO)).choices[0].message
        for turn in (message, message.model_dump()):
            await ask.chat.completions.create(model="demo", messages=[*HELLO, turn, *HELLO])
            assert [one["role"] for one in json.loads(replica.seen[-1].value("messages"))] == [
                "user",
                "assistant",
                "user",
            ]
        called = {"role": "assistant", "content": "", "function_call": {"name": "f"}}
        with pytest.raises(openai.BadRequestError, match="messages.0.function_call: is not supported"):
            await ask.chat.completions.create(model="demo", messages=[called])


async def test_what_the_replica_finds_wrong_has_the_callers_name():
    script = words(refuse=PromptTooLong("text_input", "has 9 tokens; allowed are 8"))
    async with FakeReplica(script) as replica, gateway(replica) as running, client(running) as ask:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as chat:
                await ask.chat.completions.create(model="demo", messages=HELLO, stream=stream)
            with pytest.raises(openai.BadRequestError) as completion:
                await ask.completions.create(model="demo", prompt="x", stream=stream)
            assert (chat.value.param, completion.value.param) == ("messages", "prompt")
            assert chat.value.code == completion.value.code == "context_length_exceeded"


async def test_completions_stream_and_answer_whole():
    async with FakeReplica() as replica, gateway(replica) as running, client(running) as ask:
        done = await ask.completions.create(model="demo", prompt="one two", max_tokens=3)
        assert done.choices[0].text == " one two one" and done.choices[0].finish_reason == "length"
        stream = await ask.completions.create(model="demo", prompt="one two", max_tokens=3, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == " one two one"


async def test_n_makes_so_many_choices_with_seeds_of_their_own():
    async with FakeReplica() as replica, gateway(replica) as running, client(running) as ask:
        done = await ask.chat.completions.create(model="demo", messages=HELLO, n=3, max_tokens=2, seed=10)
        assert [choice.index for choice in done.choices] == [0, 1, 2]
        assert sorted(seen.value("seed") for seen in replica.seen) == [10, 11, 12]
        assert done.usage.completion_tokens == 6
        stream = await ask.chat.completions.create(model="demo", messages=HELLO, n=2, max_tokens=2, stream=True)
        ends = [c.choices[0].index async for c in stream if c.choices[0].finish_reason]
        assert sorted(ends) == [0, 1]


async def test_choices_are_told_apart_whichever_has_text_first():
    def script(seen) -> Script:
        return Script((" late",), first_token_s=0.3) if seen.value("seed") == 5 else Script((" early",))

    async with FakeReplica(script) as replica, gateway(replica) as running, client(running) as ask:
        async with ask.chat.completions.stream(model="demo", messages=HELLO, n=2, seed=5) as stream:
            choices = (await stream.get_final_completion()).choices
        assert [(choice.index, choice.message.content) for choice in choices] == [(0, " late"), (1, " early")]


async def test_several_prompts_count_each_prompt_once():
    async with FakeReplica() as replica, gateway(replica) as running, client(running) as ask:
        done = await ask.completions.create(model="demo", prompt=["a b", "c d e"], n=2, max_tokens=2)
        assert [choice.text for choice in done.choices] == [" a b", " a b", " c d", " c d"]
        assert done.usage.prompt_tokens == 5 and done.usage.completion_tokens == 8


async def test_a_prompt_that_is_sent_twice_is_paid_as_it_is_counted():
    config = keys(ALICE, limits="burst_tokens = 1000\ntokens_per_minute = 1")
    async with FakeReplica() as replica, gateway(replica, config=config) as running:
        async with client(running, ALICE) as ask:
            first = await ask.completions.create(model="demo", prompt=["a b c"] * 3, n=2, max_tokens=2)
            assert first.usage.total_tokens == 3 * 3 + 6 * 2
            page = await running.metrics()
            for direction, tokens in (("input", 3 * 3), ("output", 6 * 2)):
                assert (
                    page[f'trident_gateway_tokens_total{{direction="{direction}",source="engine",tenant="o0/t"}}']
                    == tokens
                )
            raw = await ask.completions.with_raw_response.create(model="demo", prompt="x", max_tokens=1)
            reserved = 1 + 16 + 1
            assert int(raw.headers["x-ratelimit-remaining-tokens"]) == 1000 - first.usage.total_tokens - reserved


async def test_log_probs_name_every_token():
    async with FakeReplica(words(" a", " b")) as replica, gateway(replica) as running, client(running) as ask:
        done = await ask.chat.completions.create(model="demo", messages=HELLO, logprobs=True, top_logprobs=2)
        assert [one.token for one in done.choices[0].logprobs.content] == ["token_id:0", "token_id:1"]
        assert all(one.logprob == -0.5 for one in done.choices[0].logprobs.content)
        assert replica.seen[-1].value("return_log_probs") is True and replica.seen[-1].value("num_top_log_probs") == 2
        done = await ask.completions.create(model="demo", prompt="x", logprobs=0)
        assert done.choices[0].logprobs.token_logprobs == [-0.5, -0.5]
        assert done.choices[0].logprobs.text_offset == [0, len("token_id:0")]


async def test_a_refusal_of_the_engine_reaches_the_client_as_rate_limit():
    async with FakeReplica(words(refuse=Overloaded("the engine's queue is full"))) as replica:
        async with gateway(replica) as running, client(running) as ask:
            with pytest.raises(openai.RateLimitError) as caught:
                await ask.chat.completions.create(model="demo", messages=HELLO, stream=True)
            assert caught.value.response.headers["retry-after"] == "1"
            assert caught.value.body["code"] == "rate_limit_exceeded" and "queue is full" in caught.value.message


async def test_more_than_the_cap_is_refused_at_once_and_the_cap_is_free_again_afterwards():
    async with FakeReplica(words(" a", stall_after=0)) as replica:
        async with gateway(replica, max_in_flight=1) as running, client(running) as ask:
            first = asyncio.ensure_future(ask.chat.completions.create(model="demo", messages=HELLO))
            await until(lambda: replica.counts.running == 1)
            with pytest.raises(openai.RateLimitError) as caught:
                await ask.chat.completions.create(model="demo", messages=HELLO)
            headers = caught.value.response.headers
            assert headers["retry-after"] == "2" and 1000 <= int(headers["retry-after-ms"]) <= 1251
            first.cancel()
            await until(lambda: replica.counts.running == 0 and running.service.admission.running == 0)
            replica.script = echo
            await ask.chat.completions.create(model="demo", messages=HELLO, max_tokens=1)


async def test_an_engine_that_fails_midway_ends_the_stream_with_an_error():
    script = words(" a", " b", " c", fail_after=2, error=EngineFailed("the worker died"))
    async with FakeReplica(script) as replica, gateway(replica) as running, client(running) as ask:
        stream = await ask.chat.completions.create(model="demo", messages=HELLO, stream=True)
        text = ""
        with pytest.raises(openai.APIError, match="the engine failed .*; quote request"):
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
        assert text == " a b"
        with pytest.raises(openai.InternalServerError, match="the engine failed .*; quote request"):
            await ask.chat.completions.create(model="demo", messages=HELLO)


async def test_what_is_not_supported_is_refused_by_name():
    async with FakeReplica() as replica, gateway(replica) as running, client(running) as ask:
        for request_body, name in (
            ({"functions": [{"name": "f"}]}, "functions"),
            ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
            ({"response_format": {"type": "json_object"}, "extra_body": {"guided_regex": "a"}}, "guided_regex"),
            ({"logit_bias": {"5": 1}}, "logit_bias"),
            ({"reasoning_effort": "low"}, "reasoning_effort"),
            ({"n": 17}, "n"),
            ({"top_logprobs": 2}, "top_logprobs"),
            ({"temperature": 3}, "temperature"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                await ask.chat.completions.create(model="demo", messages=HELLO, **request_body)
            assert caught.value.param == name and name in caught.value.message
        with pytest.raises(openai.NotFoundError) as missing:
            await ask.chat.completions.create(model="gpt-9", messages=HELLO)
        assert missing.value.code == "model_not_found"
        assert replica.counts.started == 0


async def test_a_client_that_leaves_frees_the_replica():
    script = words(*" a" * 500, gap_s=0.01)
    async with FakeReplica(script) as replica, gateway(replica) as running, client(running) as ask:
        stream = await ask.chat.completions.create(model="demo", messages=HELLO, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await until(lambda: replica.counts.running == 0)
        assert replica.counts.cancelled == 1
        await until(lambda: not running.service.live)


async def test_every_refusal_is_the_clients_own_type_with_what_it_needs_to_know():
    config = keys(ALICE, BOB, limits="requests_per_minute = 1")
    team = "[orgs.o1.teams.t.keys.k]"
    config = config.replace(team, f'[orgs.o1.teams.t]\nmodels = ["other"]\n{team}')
    async with FakeReplica() as replica, gateway(replica, config=config) as running:
        async with client(running) as nobody, client(running, ALICE) as alice, client(running, BOB) as bob:
            with pytest.raises(openai.AuthenticationError) as unknown:
                await nobody.chat.completions.create(model="demo", messages=HELLO)
            assert unknown.value.code == "invalid_api_key"
            with pytest.raises(openai.NotFoundError):
                await bob.chat.completions.create(model="demo", messages=HELLO)
            raw = await alice.chat.completions.with_raw_response.create(model="demo", messages=HELLO)
            assert raw.headers["x-ratelimit-remaining-requests"] == "0"
            with pytest.raises(openai.RateLimitError) as limited:
                await alice.chat.completions.create(model="demo", messages=HELLO)
            headers = limited.value.response.headers
            assert 30 < int(headers["retry-after"]) <= 76 and headers["x-ratelimit-limit-requests"] == "1"
            with pytest.raises(openai.BadRequestError) as wide:
                await bob.chat.completions.create(model="demo", messages=HELLO, n=17)
            assert wide.value.param == "n"


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]
CALLS = '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>\n<tool_call>{"name": "g"}</tool_call>'


def joined(chunks: list) -> tuple[str, list[tuple[str, str]], set[str]]:
    """(content, calls, finish reasons) of a stream."""
    content, calls = "", {}
    for delta in (chunk.choices[0].delta for chunk in chunks if chunk.choices):
        content += delta.content or ""
        for call in delta.tool_calls or ():
            if call.id:
                calls[call.index] = [call.function.name, ""]
            calls[call.index][1] += call.function.arguments
    reasons = {chunk.choices[0].finish_reason for chunk in chunks if chunk.choices} - {None}
    return content, [tuple(calls[index]) for index in sorted(calls)], reasons


async def test_tool_calls_come_streamed_and_whole_and_their_results_go_back():
    script = words("Let me", " see.\n", *CALLS)
    async with FakeReplica(script) as replica, gateway(replica) as running, client(running) as ask:
        whole = (await ask.chat.completions.create(model="demo", messages=HELLO, tools=TOOLS)).choices[0]
        assert whole.finish_reason == "tool_calls" and whole.message.content == "Let me see."
        calls = whole.message.tool_calls
        assert [(one.function.name, one.function.arguments) for one in calls] == [("f", '{"x": "é"}'), ("g", "{}")]
        stream = await ask.chat.completions.create(model="demo", messages=HELLO, tools=TOOLS, stream=True, n=1)
        assert joined([chunk async for chunk in stream]) == (
            "Let me see.",
            [("f", '{"x": "é"}'), ("g", "{}")],
            {"tool_calls"},
        )
        assert json.loads(replica.seen[-1].value("tools")) == TOOLS
        results = [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in calls]
        await ask.chat.completions.create(model="demo", messages=[*HELLO, whole.message, *results], tools=TOOLS)
        roles = [one["role"] for one in json.loads(replica.seen[-1].value("messages"))]
        assert roles == ["user", "assistant", "tool", "tool"]
        with pytest.raises(openai.BadRequestError, match="entry 2 must be the tool message that answers the call"):
            await ask.chat.completions.create(model="demo", messages=[*HELLO, whole.message, *HELLO], tools=TOOLS)


async def test_every_choice_has_calls_and_a_cached_response_has_them_too():
    config = "[reuse]\ncache_bytes = 1000000\nengine = 'e'\n"
    async with FakeReplica(words(*CALLS)) as replica, gateway(replica, config=config) as running:
        async with client(running) as ask:
            found = await ask.chat.completions.create(model="demo", messages=HELLO, tools=TOOLS, n=2)
            ids = [call.id for choice in found.choices for call in choice.message.tool_calls]
            assert len(set(ids)) == 4
            seen = []
            for tools in (TOOLS, TOOLS, TOOLS[:1]):
                raw = await ask.chat.completions.with_raw_response.create(
                    model="demo", messages=HELLO, tools=tools, temperature=0
                )
                message = raw.parse().choices[0].message
                assert message.tool_calls[0].function.name == "f" and message.content is None
                seen.append(raw.headers["x-trident-cache"])
            assert seen == ["miss", "hit", "miss"]


async def test_a_stream_that_is_replayed_and_resumed_has_the_same_calls():
    async with FakeReplica(words(*CALLS)) as replica, gateway(replica) as running, client(running) as ask:
        asked = {"model": "demo", "messages": HELLO, "tools": TOOLS, "stream": True}
        streams = []
        for headers in ({}, {}, {"last-event-id": "40"}):
            stream = await ask.chat.completions.create(**asked, extra_headers={"idempotency-key": "k", **headers})
            streams.append([chunk.model_dump() async for chunk in stream])
        first, again, rest = streams
        assert first == again and len(rest) < len(first) and rest[-3:] == first[-3:]


async def test_reasoning_is_apart_counted_and_can_be_left_out():
    script = words("<think>", "why ", "so?", "</think>", "so it is")
    async with FakeReplica(script) as replica, gateway(replica, reasoning_format="tagged") as running:
        async with client(running) as ask:
            asked = {"model": "demo", "messages": HELLO}
            whole = await ask.chat.completions.create(**asked, extra_body={"chat_template_kwargs": {"x": None}})
            message = whole.choices[0].message
            assert (message.content, message.reasoning_content) == ("so it is", "why so?")
            # Without the tokenizer, by the share of the text.
            assert whole.usage.completion_tokens_details.reasoning_tokens == 5 * 7 // 30
            assert replica.seen[-1].value("chat_template_kwargs") == '{"x":null}'
            stream = await ask.chat.completions.create(**asked, stream=True)
            deltas = [chunk.choices[0].delta async for chunk in stream]
            assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "why so?"
            assert "".join(delta.content or "" for delta in deltas) == "so it is"
            silent = await ask.chat.completions.create(**asked, extra_body={"include_reasoning": False})
            assert not hasattr(silent.choices[0].message, "reasoning_content")
            assert silent.usage.completion_tokens_details.reasoning_tokens == 1


async def test_a_grammar_holds_the_engine_to_the_tools_and_its_refusal_names_them():
    async with FakeReplica(words(*CALLS)) as replica, gateway(replica) as running, client(running) as ask:
        for choice in ("required", {"type": "function", "function": {"name": "g"}}):
            await ask.chat.completions.create(model="demo", messages=HELLO, tools=TOOLS, tool_choice=choice)
            assert replica.seen[-1].value("guided_decoding_guide_type") == "structural_tag"
            held = replica.seen[-1].value("guided_decoding_guide").replace("\\", "")
            assert ('"name": "f"' in held, '"name": "g"' in held) == (choice == "required", True)
        replica.script = words(refuse=InvalidArgument("guided_decoding_guide", "must not have the keyword not"))
        with pytest.raises(openai.BadRequestError, match="tools: must not have the keyword not") as caught:
            await ask.chat.completions.create(model="demo", messages=HELLO, tools=TOOLS)
        assert caught.value.param == "tools"
        place = "(in #/format/tags/1/content)"
        replica.script = words(refuse=InvalidArgument("guided_decoding_guide", f"#/not/x is not supported {place}"))
        with pytest.raises(openai.BadRequestError, match="#/not/x is not supported") as caught:
            await ask.chat.completions.create(model="demo", messages=HELLO, tools=TOOLS)
        assert caught.value.param == "tools.1.function.parameters.not.x" and "format" not in caught.value.message


async def test_a_limit_that_the_engine_refuses_is_named_as_the_caller_sent_it():
    script = words(refuse=InvalidArgument("max_tokens", "must be 1 to 8, got 9"))
    async with FakeReplica(script) as replica, gateway(replica) as running, client(running) as ask:
        for name in ("max_tokens", "max_completion_tokens"):
            with pytest.raises(openai.BadRequestError) as caught:
                await ask.chat.completions.create(model="demo", messages=HELLO, **{name: 9})
            assert caught.value.param == name


async def test_a_stop_string_that_the_engine_refuses_is_named_with_its_place():
    script = words(refuse=InvalidArgument("stop_words[1]", "must hold no NUL character, got one at position 0"))
    async with FakeReplica(script) as replica, gateway(replica) as running, client(running) as ask:
        with pytest.raises(openai.BadRequestError, match="stop.1: must hold no NUL") as caught:
            await ask.chat.completions.create(model="demo", messages=HELLO, stop=["a", "\0"])
        assert caught.value.param == "stop.1"


async def test_without_grammars_a_model_may_call_and_cannot_be_made_to():
    strict = [{"type": "function", "function": {"name": "f", "strict": True}}]
    async with FakeReplica(words(*CALLS)) as replica, gateway(replica, tool_guides=False) as running:
        async with client(running) as ask:
            found = await ask.chat.completions.create(model="demo", messages=HELLO, tools=TOOLS)
            assert found.choices[0].message.tool_calls and "guided_decoding_guide" not in replica.seen[-1].inputs
            for more, name in (
                ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
                ({"tools": strict}, "tools.0.function.strict"),
            ):
                with pytest.raises(openai.BadRequestError, match="TRIDENT_GATEWAY_TOOL_GUIDES") as caught:
                    await ask.chat.completions.create(model="demo", messages=HELLO, **more)
                assert caught.value.param == name

"""Guided requests on the real server: what they say, what they may not do to others, and a killed checker."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from pathlib import Path

import jsonschema
import pytest

from clients import AsyncClient
from contract.errors import InvalidArgument
from contract.generation import FinishReason, Guide

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GUIDES = [
    Guide("json_schema", json.dumps(PERSON)),
    Guide("regex", r"\d{3}-[a-f]{4}"),
    Guide("choice", '["yes","no","perhaps"]'),
    Guide("ebnf_grammar", 'root ::= "(" [a-z]{2,5} ")"'),
    None,
]
# Each text can be read in so many ways that a token takes seconds.
AMBIGUOUS = 'root ::= c12\nc0 ::= [a-z] | ""\n' + "\n".join(f"c{n} ::= c{n - 1} c{n - 1}" for n in range(1, 13))
HOSTILE = [
    Guide("ebnf_grammar", "root ::= nowhere"),
    Guide("ebnf_grammar", 'root ::= ("a"'),
    Guide("regex", "(a"),
    Guide("json_schema", '{"$ref": "#"}'),
    Guide("structural_tag", "{}"),
    Guide("ebnf_grammar", AMBIGUOUS),
    Guide("json_schema", json.dumps({"properties": {f"property {n}": {"type": "string"} for n in range(2000)}})),
]  # fmt: skip


def checkers(replica) -> list[int]:
    """The pids of the server's grammar compilers."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if b"python_backends.grammar.compiler" in command and str(replica.server_pid).encode() in _parents(entry.name):
            found.append(int(entry.name))
    return found


def _parents(pid: str) -> set[bytes]:
    """The pids of a process's ancestors."""
    found: set[bytes] = set()
    while pid not in ("0", ""):
        found.add(pid.encode())
        try:
            pid = re.search(r"PPid:\s+(\d+)", (Path("/proc") / pid / "status").read_text())[1]
        except OSError:
            break
    return found


@pytest.fixture
async def client(replica):
    async with AsyncClient(replica.grpc_url) as connection:
        yield connection


async def complete(client, guide, **options):
    arguments = {"max_tokens": 120, "temperature": 1.0, "timeout_s": 60.0, **options}
    return await client.complete("def f(x):", guide=guide, **arguments)


def check(guide: Guide | None, text: str) -> None:
    if guide is None:
        return
    if guide.kind == "json_schema":
        jsonschema.validate(json.loads(text), json.loads(guide.text))
    pattern = {"regex": guide.text, "choice": "yes|no|perhaps", "ebnf_grammar": r"\([a-z]{2,5}\)"}.get(guide.kind)
    assert pattern is None or re.fullmatch(pattern, text), text


async def test_forty_mixed_requests_at_once_match_their_guides(client):
    guides = GUIDES * 8
    done = await asyncio.gather(*(complete(client, guide, seed=place) for place, guide in enumerate(guides)))
    for guide, completion in zip(guides, done, strict=True):
        if guide is not None:
            assert completion.finish_reason is FinishReason.STOP
        check(guide, completion.text)


async def test_an_output_that_max_tokens_cuts_says_length(client):
    done = await complete(client, Guide("regex", "a{50}b"), max_tokens=5)
    assert done.finish_reason is FinishReason.LENGTH and done.text == "a" * len(done.text)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 11}])
async def test_a_guided_output_goes_on_behind_ids_that_were_generated(client, sampling):
    asked = {"guide": GUIDES[0], "max_tokens": 200, **sampling}
    whole = await client.generate("A person:", **asked).complete()
    for cut in sorted({1, len(whole.token_ids) // 2, len(whole.token_ids) - 1}):
        rest = await client.generate("A person:", continue_ids=whole.token_ids[:cut], **asked).complete()
        assert whole.text.endswith(rest.text) and rest.token_ids == whole.token_ids[cut:], cut
        assert rest.usage.output_tokens == whole.usage.output_tokens and rest.finish_reason is whole.finish_reason
    with pytest.raises(InvalidArgument, match="guided_decoding_guide: must be left out with continue_ids, unless"):
        await client.generate("A person:", continue_ids=[1], guide=GUIDES[0], temperature=1.0).complete()


async def test_log_probabilities_stop_strings_and_choices_go_with_a_guide(client):
    done = await complete(client, GUIDES[1], log_probs=True, top_log_probs=2)
    assert len(done.log_probs) == len(done.token_ids)
    stopped = await complete(client, Guide("choice", '["one-two"]'), stop="-")
    assert stopped.text == "one" and stopped.finish_reason is FinishReason.STOP


async def test_bad_and_exploding_grammars_are_refused_and_harm_no_other_stream(client):
    await complete(client, GUIDES[1])  # the checker runs
    gaps: list[float] = []

    async def free() -> int:
        tokens, last_s = 0, None
        async for delta in client.generate("def fibonacci(n):", max_tokens=400, ignore_eos=True, temperature=0.0):
            now_s = time.monotonic()
            if last_s is not None and delta.token_ids:
                gaps.append(now_s - last_s)
            last_s = now_s
            tokens += len(delta.token_ids)
        return tokens

    streams = [asyncio.create_task(free()) for _ in range(8)]
    results = await asyncio.gather(*(complete(client, guide) for guide in HOSTILE * 2), return_exceptions=True)
    assert await asyncio.gather(*streams) == [400] * 8
    assert all(isinstance(result, InvalidArgument) for result in results), results
    assert all(result.field == "guided_decoding_guide" for result in results)
    assert max(gaps) < 5.0  # a stall of an engine that compiles them itself lasts 20 s and more


async def test_a_killed_checker_only_delays(client, replica):
    await complete(client, Guide("regex", "[5-9]{4}"))  # a new one: the process that checked others may have ended
    (pid,) = checkers(replica)
    os.kill(pid, signal.SIGKILL)
    done = await complete(client, Guide("regex", r"[0-4]{4}"))
    assert re.fullmatch("[0-4]{4}", done.text)
    assert checkers(replica) not in ([], [pid])


async def test_a_schemas_problem_is_named_with_its_place(client):
    schema = {"type": "object", "properties": {"a": {"type": "integer", "unevaluatedItems": False}}}
    with pytest.raises(InvalidArgument, match="#/properties/a/unevaluatedItems is not supported"):
        await complete(client, Guide("json_schema", json.dumps(schema)))

"""The ensemble's variant for the C++ backend, on the real server, around a stand-in that sends bare ids as it does."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import shutil
import time
from pathlib import Path

import gpu_machine
import pytest
import tritonclient.grpc.aio as triton
from triton_requests import Answer, ask, responses, take

from contract import manifest as manifests
from contract import tensors
from server.replica import running
from tests.end_to_end.watching import PATIENCE_S, TRIES

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "def area(width, height):\n    return width * height\n"
TRITON_TYPES = {"BYTES": "TYPE_STRING"}


def request_id_engine_config() -> str:
    """The engine's contract without what only a Python engine knows."""

    def rows(table, optional: bool) -> str:
        return ",".join(
            f'{{ name: "{t.name}" data_type: {TRITON_TYPES.get(t.datatype, "TYPE_" + t.datatype)} '
            f"dims: [ {', '.join(map(str, t.dims))} ]{' optional: true' if optional and t.optional else ''} }}"
            for t in table
            if not t.ours
        )

    return (
        'name: "engine" backend: "python" max_batch_size: 1 '
        f"input [ {rows(tensors.ENGINE_INPUTS, True)} ] output [ {rows(tensors.ENGINE_OUTPUTS, False)} ] "
        "model_transaction_policy { decoupled: true } instance_group [ { kind: KIND_CPU count: 1 } ]"
    )


@pytest.fixture(scope="module")
def replica(engine_dir, tmp_path_factory):
    engines = tmp_path_factory.mktemp("engines")
    shutil.copytree(engine_dir, engines / "demo")
    manifest = dataclasses.replace(manifests.load(engine_dir), kind="trtllm", sm=90, image="the image it was built in")
    manifest.save(engines / "demo")
    repository = tmp_path_factory.mktemp("repository") / "models"
    shutil.copytree(ROOT / "model_repository", repository)
    for model in ("ensemble", "detokenizer", "engine"):
        (repository / model / "configs").mkdir(exist_ok=True)
    for model in ("ensemble", "detokenizer"):
        config = (ROOT / "build" / "trtllm" / f"{model}.pbtxt").read_text()
        # This server is older than the setting.
        config = re.sub(r"^ *max_inflight_requests: \d+\n", "", config, flags=re.MULTILINE)
        (repository / model / "configs" / "demo.pbtxt").write_text(config)
    (repository / "engine" / "configs" / "demo.pbtxt").write_text(request_id_engine_config())
    shutil.copy(ROOT / "tests" / "fakes" / "request_id_engine_model.py", repository / "engine" / "1" / "model.py")
    # Preflight asks for the GPU that such an engine needs: this machine has one in miniature.
    machine = tmp_path_factory.mktemp("machine")
    gpu_machine.driver(machine / "bin", [("NVIDIA H100 80GB HBM3", "9.0", 81559)])
    package = machine / "packages" / "tensorrt_llm-1.2.1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: 1.2.1\n")
    env = {"PATH": f"{machine / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(package.parent)}
    # The liveness probe of the supervisor sends an id of its own with each request, as this engine insists on.
    with running("demo", env=env, engines_dir=str(engines), model_repository=str(repository)) as server:
        yield server


@pytest.fixture
async def client(replica):
    async with triton.InferenceServerClient(replica.grpc_url) as connection:
        yield connection


async def test_text_streams_and_ends_with_length_and_usage(client):
    inputs = {"text_input": PROMPT, "max_tokens": 30, "ignore_eos": True}
    streamed = await ask(client, {**inputs, "stream": True}, request_id="a")
    whole = await ask(client, inputs, request_id="b")
    assert streamed.text == whole.text and "area" in streamed.text
    assert streamed.responses > 5 and whole.responses == 1
    for answer in (streamed, whole):
        assert answer.finish_reasons == ["length"]
        assert answer.outputs["num_output_tokens"].item() == 30


async def test_an_end_id_and_a_stop_string_end_it(client):
    six = {"text_input": PROMPT, "max_tokens": 6, "ignore_eos": True, "stream": True}
    echoed = await ask(client, six, request_id="c")
    end_id = echoed.ids[-1]
    ended = await ask(client, {"text_input": PROMPT, "max_tokens": 99, "end_id": end_id}, request_id="d")
    assert ended.finish_reasons == ["stop"] and ended.ids[-1] == end_id and len(ended.ids) < 99
    stopped = await ask(
        client,
        {"text_input": PROMPT, "max_tokens": 900, "ignore_eos": True, "stop_words": ["height):"], "stream": True},
        request_id="e",
    )
    assert stopped.finish_reasons == ["stop"]
    assert stopped.outputs["stop_reason"].item() == b"height):"
    assert "height):" not in stopped.text
    assert stopped.outputs["num_output_tokens"].item() < 100


async def test_a_request_without_an_id_or_with_one_in_use_is_refused_by_name(client):
    assert "request_id: must be unique" in (await ask(client, {"text_input": PROMPT, "max_tokens": 3})).error
    long = {"text_input": PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True}
    for _ in range(TRIES):  # who stands still for as long as the first takes sends the second too late
        first, begun = Answer(), None
        async for result, error in responses(client, long, request_id="same"):
            assert not error
            take(first, result)
            begun = begun or asyncio.create_task(ask(client, long, request_id="same"))
        assert first.finish_reasons == ["length"]
        second = await begun
        if second.error:
            break
    assert "request_id: must be unique" in second.error
    again = await ask(client, {**long, "max_tokens": 3}, request_id="same")
    assert again.finish_reasons == ["length"]


async def test_a_client_that_goes_away_stops_the_engine_by_request_id(client, replica):
    long = {"text_input": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True}
    for n in range(TRIES):  # who stands still for as long as all of it takes leaves too late
        async for _result, error in responses(client, long, request_id=f"gone-{n}"):
            assert not error
            break
        deadline_s = time.monotonic() + PATIENCE_S
        while not (ends := re.findall(rf"request id engine: gone-{n} (\w+) after (\d+) of 900", replica.log())):
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.02)
        if ends[0][0] == "stopped":
            break
    assert ends[0][0] == "stopped" and int(ends[0][1]) < 900
    answer = await ask(client, {**long, "max_tokens": 2}, request_id=f"gone-{n}")  # the id is free again
    assert answer.finish_reasons == ["length"]


async def ask_guided(client, inputs, request_id):
    """As a client does that is told to send the request again."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        answer = await ask(client, inputs, request_id=request_id)
        if "send the request again" not in str(answer.error) or time.monotonic() > deadline_s:
            return answer
        await asyncio.sleep(0.05)


async def test_a_guide_reaches_the_backend_as_a_grammar_that_compiled(client, replica):
    base = {"text_input": PROMPT, "max_tokens": 3}
    schema = {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": '{"type": "integer", "minimum": 7}'}
    free = [ask(client, {**base, "ignore_eos": True}, request_id=f"free-{n}") for n in range(4)]
    guided = [ask_guided(client, {**base, **schema}, f"guided-{n}") for n in range(4)]
    answers = await asyncio.gather(*guided, *free)
    assert all(not answer.error and answer.finish_reasons for answer in answers)
    grammars = re.findall(r"request id engine: guided-\d guide (\w+) ([0-9a-f]+)", replica.log())
    kind, grammar = grammars[0][0], bytes.fromhex(grammars[0][1]).decode()
    assert len(grammars) == 4 and kind == "ebnf_grammar" and grammar.startswith("root ::= ")
    assert "request id engine: free-0 guide" not in replica.log()


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("json_schema", '{"minLenght": 3}', "guided_decoding_guide: must be a schema that can be followed"),
        ("ebnf_grammar", "root ::= (", "guided_decoding_guide: must be a grammar that compiles"),
        ("structural_tag", "{}", "guided_decoding_guide_type: must be one of json, json_schema, regex, ebnf_grammar"),
        ("yaml", "{}", "guided_decoding_guide_type: must be one of"),
    ],
)
async def test_a_guide_that_the_backend_could_not_follow_never_reaches_it(client, replica, kind, text, problem):
    inputs = {"text_input": PROMPT, "max_tokens": 3, "guided_decoding_guide_type": kind, "guided_decoding_guide": text}
    for _n in range(2):  # a refused request does not take its id
        assert problem in (await ask_guided(client, inputs, f"bad-{kind}")).error
    assert f"bad-{kind} guide" not in replica.log()


async def test_what_the_backend_cannot_do_is_refused_by_name(client):
    base = {"text_input": PROMPT, "max_tokens": 3}
    assert "min_p: must be 0, got 0.5" in (await ask(client, {**base, "min_p": 0.5}, request_id="f")).error
    assert "num_top_log_probs" in (await ask(client, {**base, "num_top_log_probs": 3}, request_id="g")).error

"""The ensemble's variant for the C++ backend, on the real server, around a stand-in that sends bare ids as it does."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import re
import shutil
import signal
import time
from pathlib import Path

import gpu_machine
import gpu_recipes
import numpy as np
import openai
import pytest
import tritonclient.grpc.aio as triton
from triton_requests import Answer, ask, metric, metrics, responses, take, tensor

from build.base.checkpoint import open_checkpoint
from build.model import lora_adapter
from build.package import gpu_adapters
from build.recipe import recipe as recipes
from clients import NO_RETRY, AsyncClient
from clients.wire import failures
from clients.wire.completion import join
from contract import manifest as manifests
from contract import tensors
from contract.errors import TridentError, Unavailable
from server.replica import running
from tests.end_to_end.watching import PATIENCE_S, TRIES
from tests.fakes import adapters
from tests.gateway.running import gateway

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "def area(width, height):\n    return width * height\n"
MODEL = ROOT / "build" / "demo_model" / "checkpoint"
ADAPTERS, ADAPTER_CACHE = ("poet", "lawyer", "pirate"), 2
STEPS = ("ensemble", "ensemble_packed", "detokenizer", "detokenizer_packed")
TRITON_TYPES = {"BYTES": "TYPE_STRING"}


def adapter_folders(folder: Path) -> list[dict[str, str]]:
    values = {name: np.array(tensor.f32()) for name, tensor in open_checkpoint(MODEL).tensors.items()}
    for seed, name in enumerate(ADAPTERS):
        adapters.write(folder / name, values, rank=seed + 2, seed=seed)
    return [{"name": name, "path": str(folder / name)} for name in ADAPTERS]


def request_id_engine_config() -> str:
    """The engine's contract without what only a Python engine knows."""

    def rows(table, optional: bool) -> str:
        return ",".join(
            f'{{ name: "{t.name}" data_type: {TRITON_TYPES.get(t.datatype, "TYPE_" + t.datatype)} '
            f"dims: [ {', '.join(map(str, t.dims))} ]{' optional: true' if optional and t.optional else ''} }}"
            for t in table
            if not t.ours
        )

    weights = (
        '{ name: "lora_weights" data_type: TYPE_BF16 dims: [ -1, -1 ] optional: true }, '
        '{ name: "lora_config" data_type: TYPE_INT32 dims: [ -1, 3 ] optional: true }'
    )
    cache = f'parameters {{ key: "lora_cache" value {{ string_value: "{ADAPTER_CACHE}" }} }}'
    return (
        f'name: "engine" backend: "python" max_batch_size: 1 {cache} '
        f"input [ {rows(tensors.ENGINE_INPUTS, True)}, {weights} ] output [ {rows(tensors.ENGINE_OUTPUTS, False)} ] "
        "model_transaction_policy { decoupled: true } instance_group [ { kind: KIND_CPU count: 1 } ]"
    )


@pytest.fixture(scope="module")
def replica(engine_dir, tmp_path_factory):
    engines = tmp_path_factory.mktemp("engines")
    shutil.copytree(engine_dir, engines / "demo")
    listed = adapter_folders(tmp_path_factory.mktemp("adapters"))
    recipe = recipes.parse(gpu_recipes.table(model=str(MODEL), precision="bf16", adapters=listed), "demo.toml")
    gpu_adapters.package(recipe, open_checkpoint(MODEL), engines / "demo", "bfloat16")
    built = manifests.load(engine_dir)
    manifest = dataclasses.replace(
        built,
        kind="trtllm",
        sm=90,
        image="the image it was built in",
        adapters=tuple(lora_adapter.record(one["name"], one["path"]) for one in listed),
        recipe=dict(built.recipe) | {"adapter_cache": ADAPTER_CACHE},
        files=manifests.hash_files(engines / "demo"),
    )
    manifest.save(engines / "demo")
    repository = tmp_path_factory.mktemp("repository") / "models"
    shutil.copytree(ROOT / "model_repository", repository)
    for model in (*STEPS, "engine"):
        (repository / model / "configs").mkdir(exist_ok=True)
    for model in STEPS:
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
    # The id is free again, once the detokenizer has the engine's end, too.
    while (answer := await ask(client, {**long, "max_tokens": 2}, request_id=f"gone-{n}")).error:
        assert time.monotonic() < deadline_s, answer.error
        await asyncio.sleep(0.02)
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


async def adapted(client, replica, request_id, adapter, max_tokens=3, **inputs):
    """(the answer, "sent" or "cached") of one request; the digests of what was sent are checked."""
    base = {"text_input": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, "lora_name": adapter, **inputs}
    answer = await ask(client, base, request_id=request_id)
    deadline_s = time.monotonic() + PATIENCE_S  # the supervisor copies the log and may lag behind
    while not (found := re.findall(rf"request id engine: {request_id} lora (\d) ([\w-]+)", replica.log())):
        assert not answer.error and time.monotonic() < deadline_s, (answer.error, request_id)
        await asyncio.sleep(0.02)
    number, what = found[0]
    assert int(number) == ADAPTERS.index(adapter) + 1
    if what != "cached":
        files = replica.settings.engines_dir / "demo" / "adapters" / number
        stored = [np.load(files / f"model.lora_{name}.npy").tobytes() for name in ("weights", "config")]
        assert what == "-".join(hashlib.sha256(data).hexdigest() for data in stored)
    return answer, "cached" if what == "cached" else "sent"


async def test_an_adapter_is_sent_when_first_used_and_again_once_it_may_be_gone(client, replica):
    """The backend holds two adapters: in no order of use does it miss one, and none is sent in vain twice."""
    order = "poet poet lawyer poet lawyer pirate pirate lawyer poet poet pirate".split()
    wanted = "sent cached sent cached cached sent cached cached sent cached sent".split()
    seen = []
    for n, adapter in enumerate(order):
        answer, how = await adapted(client, replica, f"use-{n}", adapter)
        assert not answer.error and answer.finish_reasons == ["length"]
        seen.append(how)
    assert seen == wanted
    plain = await ask(client, {"text_input": PROMPT, "max_tokens": 2}, request_id="plain")
    assert not plain.error and "plain lora" not in replica.log()
    page = metrics(replica.metrics_url)
    sends = {
        (adapter, cause): metric(page, "trident_adapter_sends_total", adapter=adapter, cause=cause)
        for adapter in ADAPTERS
        for cause in ("first", "again")
    }
    assert sends == {
        ("poet", "first"): 1,
        ("poet", "again"): 1,
        ("lawyer", "first"): 1,
        ("lawyer", "again"): 0,
        ("pirate", "first"): 1,
        ("pirate", "again"): 1,
    }
    assert metric(page, "trident_adapter_requests_total", adapter="poet") == 5
    # By this the gateway learns that it may be asked for "<model>:poet".
    assert metric(page, "vllm:lora_requests_info", running_lora_adapters=",".join(ADAPTERS)) > 0


async def test_many_first_uses_at_once_all_succeed(client, replica):
    """After the other two were used no request under poet can know that the backend has it."""
    for n, adapter in enumerate(("lawyer", "pirate")):
        await adapted(client, replica, f"before-{n}", adapter)
    answers = await asyncio.gather(*(adapted(client, replica, f"burst-{n}", "poet", 40) for n in range(12)))
    assert all(not answer.error and answer.finish_reasons == ["length"] for answer, _ in answers)
    assert (await adapted(client, replica, "after", "poet"))[1] == "cached"


async def test_a_backend_that_lost_its_adapters_has_them_again_with_the_next_try(client, replica):
    await adapted(client, replica, "held", "poet")
    stop = [tensor(name, 1, "INT32") for name in ("input_ids", "input_lengths", "request_output_len")]
    stop.append(tensor("stop", True, "BOOL"))
    await ask(client, stop, request_id="forget adapters", model="engine")
    failed = await ask(client, {"text_input": PROMPT, "max_tokens": 2, "lora_name": "poet"}, request_id="lost-0")
    assert "Please send LoRA weights with request" in failed.error
    assert isinstance(failures.from_error_message(failed.error), Unavailable)
    await asyncio.sleep(0.3)
    answer, how = await adapted(client, replica, "lost-1", "poet")
    assert not answer.error and how == "sent"
    assert (await adapted(client, replica, "lost-2", "poet"))[1] == "cached"


async def test_an_unknown_adapter_is_refused_with_those_there_are(client):
    for inputs in ({"lora_name": "nobody"}, {"lora_task_id": 4}):
        answer = await ask(client, {"text_input": PROMPT, "max_tokens": 2, **inputs}, request_id="unknown")
        assert "pirate" in answer.error


async def test_at_the_gateway_an_adapter_is_part_of_the_models_name(replica, engine_dir):
    url = replica.grpc_url
    asked = {"prompt": PROMPT, "extra_body": {"ignore_eos": True}}
    settings = {"replicas": url, "metrics_urls": {url: replica.metrics_url}, "model": "demo"}
    async with gateway(**settings, tokenizer=engine_dir / "tokenizer.json") as running:
        async with openai.AsyncOpenAI(base_url=f"{running.base_url}/v1", api_key="none", max_retries=0) as client:
            deadline_s = time.monotonic() + PATIENCE_S
            while "demo:poet" not in (ids := [model.id async for model in client.models.list()]):
                assert time.monotonic() < deadline_s, ids
                await asyncio.sleep(0.05)
            before = len(re.findall(r"request id engine: \S+ lora 3 ", replica.log()))
            for model in ("demo", "demo:pirate"):
                completion = await client.completions.create(model=model, max_tokens=3, **asked)
                assert completion.model == model and completion.usage.completion_tokens == 3
            assert len(re.findall(r"request id engine: \S+ lora 3 ", replica.log())) == before + 1
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(model="demo:nobody", **asked)


STREAMS = (
    {"max_tokens": 30, "ignore_eos": True},
    {"max_tokens": 60, "ignore_eos": True, "stop": ("height):",)},
    {"max_tokens": 9, "ignore_eos": True, "skip_special_tokens": False},
    {"max_tokens": 5, "adapter": "poet", "ignore_eos": True},
    {"max_tokens": 10**6},
    {"max_tokens": 4, "top_log_probs": 2},
)


async def test_both_ensembles_say_the_same_of_many_streams_at_once_under_ids_that_are_used_again(replica):
    async def answers(url: str, model: str, n: int) -> list:
        found = []
        async with AsyncClient(url, model=model, retry=NO_RETRY) as client:
            for arguments in STREAMS:
                try:
                    stream = client.generate(PROMPT, temperature=0.0, request_id=f"again-{n}", **arguments)
                    deltas = [delta async for delta in stream]
                    found.append(dataclasses.replace(join(deltas, ""), ttft_s=None))
                except TridentError as error:
                    found.append((type(error), str(error).replace("ensemble_packed", "ensemble")))
        return found

    for _ in range(2):  # the ids of the first turn, at the other ensemble
        models = ("ensemble", "ensemble_packed") * 6
        whole = await asyncio.gather(*(answers(replica.grpc_url, model, n) for n, model in enumerate(models)))
        assert all(one == whole[0] for one in whole[1:])
        assert [getattr(one, "stop_reason", "error") for one in whole[0]] == ["", "height):", "", "", "error", "error"]


async def test_a_client_that_leaves_the_packed_ensemble_stops_the_engine_and_an_id_is_one_streams_in_both(replica):
    async with AsyncClient(replica.grpc_url, model="ensemble_packed", retry=NO_RETRY) as packed:
        for n in range(TRIES):  # who stands still for as long as all of it takes leaves too late
            stream = packed.generate(PROMPT, max_tokens=900, ignore_eos=True, request_id=f"left-{n}")
            await anext(aiter(stream))
            async with AsyncClient(replica.grpc_url, model="ensemble", retry=NO_RETRY) as plain:
                second = [error async for error in refusals(plain, f"left-{n}")]
            await stream.aclose()
            deadline_s = time.monotonic() + PATIENCE_S
            while not (ends := re.findall(rf"request id engine: left-{n} (\w+) after (\d+) of 900", replica.log())):
                assert time.monotonic() < deadline_s
                await asyncio.sleep(0.02)
            if ends[0][0] == "stopped" and second:
                break
        assert ends[0][0] == "stopped" and "request_id: must be unique" in second[0]
        # The id is free again, once the detokenizer has the engine's end, too.
        while refused := [error async for error in refusals(packed, f"left-{n}")]:
            assert time.monotonic() < deadline_s, refused
            await asyncio.sleep(0.02)


async def refusals(client, request_id):
    try:
        await client.generate(PROMPT, max_tokens=2, request_id=request_id).complete()
    except TridentError as error:
        yield str(error)


async def test_a_new_server_is_sent_every_adapter_anew(client, replica):
    assert (await adapted(client, replica, "old-server", "poet"))[0].error == ""
    os.kill(replica.server_pid, signal.SIGKILL)
    replica.wait_until_ready(restarts=1)
    async with triton.InferenceServerClient(replica.grpc_url) as connection:
        answer, how = await adapted(connection, replica, "new-server", "poet")
        assert not answer.error and how == "sent"
        assert (await adapted(connection, replica, "new-server-2", "poet"))[1] == "cached"

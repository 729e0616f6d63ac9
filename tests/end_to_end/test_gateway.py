"""The gateway as a process of its own in front of the real server, met with the callers' own clients."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from clients import Client
from contract.errors import Unauthenticated
from evals import command_line, task
from gateway.samples.store import SampleStore, new_key
from server.replica import Replica

ROOT = Path(__file__).resolve().parents[2]
ALICE, SALT = "tri-alice-alice-alice-alice", "00112233445566778899aabbccddeeff"
CONFIG = f"""
salt = "{SALT}"
[orgs.acme.teams.research]
requests_per_minute = 6000
tokens_per_minute = 600000
samples = true
[orgs.acme.teams.research.keys.alice]
hash = "{hmac.new(bytes.fromhex(SALT), ALICE.encode(), hashlib.sha256).hexdigest()}"
[samples]
fraction = 1.0
per_minute = 1000
[samples.checks]
"""
CHAT = [{"role": "user", "content": "What is two plus two?"}]


@pytest.fixture(scope="module")
def endpoints(
    replica: Replica, engine_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str, Path]]:
    """(URL of the OpenAI endpoint, HOST:PORT of the KServe endpoint, and the folder of its files)."""
    environ = {
        **os.environ,
        "TRIDENT_GATEWAY_HTTP_PORT": "0",
        "TRIDENT_GATEWAY_GRPC_PORT": "0",
        "TRIDENT_GATEWAY_REPLICAS": replica.grpc_url,
        "TRIDENT_GATEWAY_METRICS_URLS": f"{replica.grpc_url}={replica.metrics_url}",
        "TRIDENT_GATEWAY_TOKENIZER": str(ROOT / "build" / "demo_model" / "checkpoint" / "tokenizer.json"),
    }
    folder = tmp_path_factory.mktemp("gateway")
    (folder / "gateway.toml").write_text(CONFIG)
    environ["TRIDENT_GATEWAY_CONFIG"] = str(folder / "gateway.toml")
    (folder / "keys").write_text(new_key())
    environ["TRIDENT_GATEWAY_SAMPLES"] = str(folder / "samples")
    environ["TRIDENT_GATEWAY_SAMPLES_KEYS"] = str(folder / "keys")
    log = folder / "log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway"], cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        words = process.stdout.readline().split()
        assert words[::2] == ["http", "grpc"], log.read_text()
        yield f"http://{words[1]}", words[3], folder
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def ask(endpoints: tuple[str, str, Path]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{endpoints[0]}/v1", api_key=ALICE, max_retries=0) as client:
        yield client


def test_a_stream_and_a_whole_answer_say_the_same_as_the_server_itself(ask: openai.OpenAI, replica: Replica):
    with Client(replica.grpc_url) as direct:
        expected = direct.complete("The cat", max_tokens=12, temperature=0.0).text
    request_body = {"model": "demo", "prompt": "The cat", "max_tokens": 12, "temperature": 0}
    assert ask.completions.create(**request_body).choices[0].text == expected
    chunks = list(ask.completions.create(**request_body, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == expected
    assert chunks[-1].usage.completion_tokens <= 12 and chunks[-1].usage.prompt_tokens > 0


def test_a_chat_counts_its_tokens_and_repeats_itself_with_a_seed(ask: openai.OpenAI):
    request_body = {"model": "demo", "messages": CHAT, "max_completion_tokens": 16, "seed": 7}
    anew = {"cache-control": "no-cache"}  # by the engine, not by the cache
    one, two = (ask.chat.completions.create(**request_body, extra_headers=anew) for _ in range(2))
    assert one.id != two.id
    assert one.choices[0].message.content == two.choices[0].message.content
    assert 0 < one.usage.completion_tokens <= 16 and one.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize("text_shown", [{}, {"temperature": 1}])
def test_a_temperature_of_one_samples_whether_it_is_said_or_not(ask: openai.OpenAI, text_shown: dict):
    done = ask.chat.completions.create(model="demo", messages=CHAT, max_tokens=16, n=8, seed=1, **text_shown)
    assert len({choice.message.content for choice in done.choices}) > 1


def test_log_probs_spell_the_answer(ask: openai.OpenAI):
    done = ask.chat.completions.create(
        model="demo", messages=CHAT, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    tokens = done.choices[0].logprobs.content
    assert tokens and all(len(one.top_logprobs) == 3 and one.logprob <= 0 for one in tokens)
    assert all(one.token == one.top_logprobs[0].token for one in tokens)
    spelt = b"".join(bytes(one.bytes) for one in tokens).decode(errors="replace")
    assert spelt.startswith(done.choices[0].message.content)


class Answer(BaseModel):
    word: Literal["four", "five"]
    number: Annotated[int, Field(ge=0, le=99)]
    reasons: Annotated[list[Annotated[str, Field(max_length=10)]], Field(max_length=2)]


def test_the_official_clients_parsed_answers_are_of_their_type(ask: openai.OpenAI):
    done = ask.chat.completions.parse(
        model="demo", messages=CHAT, response_format=Answer, max_tokens=200, temperature=1.2, n=2
    )
    assert all(isinstance(choice.message.parsed, Answer) for choice in done.choices)
    anything = ask.chat.completions.create(
        model="demo", messages=CHAT, response_format={"type": "json_object"}, max_tokens=200, seed=4
    )
    if anything.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(anything.choices[0].message.content), dict)
    chosen = ask.completions.create(model="demo", prompt="x", extra_body={"guided_choice": ["left", "right"]})
    assert chosen.choices[0].text in ("left", "right")


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_followed_is_a_400_with_its_place(ask: openai.OpenAI, stream: bool):
    schema = {"type": "object", "properties": {"a": {"unevaluatedItems": False}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask.chat.completions.create(model="demo", messages=CHAT, response_format=form, stream=stream)
    assert caught.value.param == "response_format.json_schema.schema.properties.a.unevaluatedItems"


def test_a_prompt_that_does_not_fit_is_refused_by_the_engine_as_a_bad_request(ask: openai.OpenAI):
    with pytest.raises(openai.BadRequestError):
        ask.completions.create(model="demo", prompt="word " * 3000, max_tokens=10)


def test_our_own_client_streams_over_kserve(endpoints: tuple[str, str, Path], replica: Replica):
    with Client(replica.grpc_url) as direct, Client(endpoints[1], api_key=ALICE) as through:
        assert through.health().ok
        expected = direct.complete("The cat", max_tokens=12, temperature=0.0)
        found = [delta for delta in through.generate("The cat", max_tokens=12, temperature=0.0)]
        assert "".join(delta.text for delta in found) == expected.text
        assert found[-1].usage.output_tokens == expected.usage.output_tokens


def test_the_real_engine_says_which_it_is_so_that_its_answers_are_cached(ask: openai.OpenAI):
    request_body = {"model": "demo", "prompt": "Once more", "max_tokens": 8, "temperature": 0}
    first = ask.completions.with_raw_response.create(**request_body)
    again = ask.completions.with_raw_response.create(**request_body)
    assert [one.headers["x-trident-cache"] for one in (first, again)] == ["miss", "hit"]
    assert first.parse().choices == again.parse().choices
    left = int(first.headers["x-ratelimit-remaining-tokens"])
    assert first.headers["x-ratelimit-limit-tokens"] == "600000" and 599_000 < left < 600_000


def test_a_stream_that_was_left_goes_on_where_it_was_under_its_idempotency_key(ask: openai.OpenAI):
    request_body = {"model": "demo", "prompt": "A long story", "max_tokens": 200, "stream": True, "temperature": 1}
    request_body["extra_body"] = {"ignore_eos": True}  # a random text may end after a few tokens
    key = {"idempotency-key": "story-1"}
    with ask.completions.with_streaming_response.create(**request_body, extra_headers=key) as answer:
        lines = answer.iter_lines()
        seen = [next(line for line in lines if line.startswith("id: ")) for _ in range(3)]
    rest = {**key, "last-event-id": seen[-1].removeprefix("id: ")}
    with ask.completions.with_streaming_response.create(**request_body, extra_headers=rest) as answer:
        lines = [line for line in answer.iter_lines() if line]
        assert answer.headers["x-trident-cache"] == "replayed"
    assert seen[-1] not in lines and lines[-1] == "data: [DONE]"
    numbers = [int(line.removeprefix("id: ")) for line in [*seen, *lines] if line.startswith("id: ")]
    assert numbers == sorted(set(numbers))


def test_without_a_key_neither_protocol_opens(endpoints: tuple[str, str, Path]):
    with openai.OpenAI(base_url=f"{endpoints[0]}/v1", api_key="any", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
    with Client(endpoints[1]) as through, pytest.raises(Unauthenticated):
        through.complete("x", max_tokens=1)


def test_a_gateway_that_the_server_starts_counts_with_the_engines_tokenizer(engine_dir: Path):
    read = "print(Settings.from_environment(os.environ).tokenizer)"
    script = f"import os; from gateway.config.settings import Settings; {read}"
    command = [sys.executable, "-m", "server", "--engine", "demo", "--free-ports", "--", sys.executable, "-c", script]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == str(engine_dir / "tokenizer.json")


def test_an_answer_is_kept_rated_curated_and_deleted(
    ask: openai.OpenAI, endpoints: tuple[str, str, Path], tmp_path: Path
):
    folder = endpoints[2]
    chat = [{"role": "user", "content": "Write to carol@example.org about fifty-one bananas."}]
    answer = ask.chat.completions.create(model="demo", messages=chat, max_tokens=8)
    sent = {"response_id": answer.id, "rating": "down", "labels": ["bananas"]}
    assert ask.post("/feedback", body=sent, cast_to=dict)["rating"] == "down"
    store = SampleStore(folder / "samples", folder / "keys")
    [sample] = [one for one in store.samples("acme/research") if one.get("feedback")]
    assert sample["messages"][0]["content"] == "Write to [EMAIL] about fifty-one bananas."
    assert sample["output"] == answer.choices[0].message.content and sample["reasons"] == ["fraction", "down"]
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    words = [
        "curate",
        str(tmp_path / "samples.jsonl"),
        "--name",
        "e2e",
        "--out",
        str(tmp_path / "sets"),
        "--reason",
        "down",
    ]
    assert command_line.main(words) == 0
    [curated] = task.read(tmp_path / "sets")
    assert curated.cases[0]["prompt"] == sample["messages"][0]["content"]
    written = [path.read_bytes() for path in (folder / "samples").rglob("*.jsonl")]
    assert written and not any(b"bananas" in content for content in written)
    store.delete("acme/research")
    assert not list((folder / "samples").rglob("*.jsonl"))
    with pytest.raises(openai.NotFoundError):
        ask.post("/feedback", body=sent, cast_to=dict)

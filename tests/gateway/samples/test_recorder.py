"""Which requests are kept and checked, over the whole gateway: redacted, off the hot path, by their tenants' leave."""

from __future__ import annotations

import asyncio
import json
import logging
import time

import pytest

from contract.errors import EngineFailed, InvalidArgument
from contract.generation import FinishReason
from gateway.config.tenants import digest
from gateway.samples import recorder
from gateway.samples.store import SampleStore
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.running import gateway, until

KEYS = {"in": "tri-" + "a" * 30, "also": "tri-" + "c" * 30, "out": "tri-" + "b" * 30}
REQUEST = {"model": "demo", "prompt": "write to ann@example.org", "max_tokens": 4, "temperature": 0}


def config(rules: str) -> str:
    salt = bytes(16)
    teams = "".join(
        f"[orgs.acme.teams.{team}]\nsamples = {str(team != 'out').lower()}\n"
        f'[orgs.acme.teams.{team}.keys.k]\nhash = "{digest(salt, key).hex()}"\n'
        for team, key in KEYS.items()
    )
    return f'salt = "{salt.hex()}"\n{teams}[samples]\n{rules}\n'


def sampled(tmp_path, *replicas, rules: str = 'fraction = 1.0\nkeep = ["up", "down"]', **options):
    return gateway(*replicas, config=config(rules), samples=tmp_path / "samples", **options)


async def complete(running, team: str = "in", **more):
    headers = {name: more.pop(name) for name in list(more) if name.startswith("x_")}
    return await running.post("/v1/completions", {**REQUEST, **more}, authorization=f"Bearer {KEYS[team]}", **headers)


def kept(tmp_path, tenant: str = "acme/in") -> list[dict]:
    return list(SampleStore(tmp_path / "samples", None).samples(tenant))


async def flushed(running) -> None:
    await until(lambda: not len(running.service.live))
    await asyncio.to_thread(running.service.samples.flush)


async def test_only_tenants_that_opted_in_are_kept_redacted_and_only_where_the_caller_lets(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    async with FakeReplica(lambda seen: Script(("call", " +49 30 1234567", "!"))) as replica:
        async with sampled(tmp_path, replica) as running:
            assert "prompts and answers of acme/also, acme/in are kept in" in caplog.text
            assert "NOT ENCRYPTED" in caplog.text
            assert (await complete(running))[0] == 200
            assert (await complete(running, "out"))[0] == 200
            assert (await complete(running, x_trident_no_store="true"))[0] == 200
            await flushed(running)
            [sample] = kept(tmp_path)
            assert sample["text_input"] == "write to [EMAIL]" and sample["output"] == "call [PHONE]!"
            assert sample["reasons"] == ["fraction"] and sample["finish_reason"] == "stop"
            assert sample["tenant"] == "acme/in" and sample["input_tokens"] > 0 and sample["duration_s"] > 0
            assert SampleStore(tmp_path / "samples", None).tenants() == ["acme/in"]


async def test_token_ids_in_which_no_pattern_finds_anything_are_not_kept(tmp_path):
    async with FakeReplica(lambda seen: Script(("call", " +49 30 1234567", "!"))) as replica:
        async with sampled(tmp_path, replica) as running:
            assert (await complete(running, prompt=[71901, 71902]))[0] == 200
            await flushed(running)
            [sample] = kept(tmp_path)
            assert sample["output"] == "call [PHONE]!"
            # Ids and times may have these digits by chance.
            said = {name: value for name, value in sample.items() if not isinstance(value, float)}
            told = json.dumps({name: value for name, value in said.items() if name not in ("id", "request_id")})
            assert "text_input" not in sample and "7190" not in told


async def test_a_deletion_holds_for_requests_that_wait_for_a_slot(tmp_path):
    gate, rules = asyncio.Event(), "fraction = 1.0\n[admission]\nmax_running = 1"
    async with FakeReplica(lambda seen: Script((" a",), gate=gate)) as replica:
        async with sampled(tmp_path, replica, rules=rules) as running:
            store, admission = running.service.samples.store, running.service.admission
            both = [asyncio.create_task(complete(running, prompt=prompt)) for prompt in ("one", "two")]
            await until(lambda: admission.running == admission.waiting == 1)
            store.delete("acme/in")
            gate.set()
            assert [status for status, *_ in await asyncio.gather(*both)] == [200, 200]
            await complete(running, prompt="three")
            await flushed(running)
            assert [sample["text_input"] for sample in kept(tmp_path)] == ["three"]


@pytest.mark.slow
async def test_a_deletion_holds_for_requests_that_are_refused_after_it(tmp_path):
    gate, rules = asyncio.Event(), 'keep = ["refused", "failure"]\n[admission]\nmax_running = 1\nmax_wait_s = 1'
    async with FakeReplica(lambda seen: Script((" a",), gate=gate)) as replica:
        async with sampled(tmp_path, replica, rules=rules) as running:
            store, admission = running.service.samples.store, running.service.admission
            first = asyncio.create_task(complete(running))
            await until(lambda: admission.running == 1)
            second = asyncio.create_task(complete(running, prompt="two"))
            await until(lambda: admission.waiting == 1)
            store.delete("acme/in")
            assert (await second)[0] == 504
            gate.set()
            await first
            await flushed(running)
            assert kept(tmp_path) == []
            assert (await running.metrics())['trident_gateway_samples_lost_total{reason="deleted"}'] == 1


async def test_the_log_names_a_team_whose_callers_have_tokens(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    text = '[identity.issuers.corp]\nissuer = "https://corp.example"\naudience = "a"\nteam = { claim = "team" }\n'
    text += f'jwks_file = "{tmp_path}/jwks.json"\n[orgs.acme.teams.in]\nsamples = true\n[samples]\nfraction = 1.0\n'
    async with gateway(config=text, samples=tmp_path / "samples"):
        assert "prompts and answers of acme/in are kept in" in caplog.text


@pytest.mark.slow
async def test_each_rule_keeps_what_it_names_and_nothing_else(tmp_path):
    rules = 'keep = ["failure", "refused", "length", "refusal", "empty", "schema", "loop"]\nduration_s = 0.2'
    scripts = {
        "fine": Script(("all good",)),
        "cut": Script(("a",), finish_reason=FinishReason.LENGTH),
        "no": Script(("I'm sorry, but I can't help with that.",)),
        "nothing": Script(("  ",)),
        "round": Script(("la la la ",) * 30),
        "slow": Script(("late",), first_token_s=0.25),
        "broken": Script(("a",), fail_after=0),
        "json": Script(('{"a": "x"}',)),
    }
    async with FakeReplica(lambda seen: scripts[seen.value("text_input")]) as replica:
        async with sampled(tmp_path, replica, rules=rules) as running:
            for prompt in scripts:
                await complete(running, prompt=prompt)
            schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
            form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
            await complete(running, prompt="json", response_format=form)
            await flushed(running)
            found = {(sample["text_input"], *sample["reasons"]) for sample in kept(tmp_path)}
            expected = {("cut", "length"), ("no", "refusal"), ("nothing", "empty"), ("round", "loop"), ("slow", "slow")}
            assert found == expected | {("broken", "failure"), ("json", "schema")}


@pytest.mark.slow
async def test_requests_refused_at_admission_are_kept_where_a_rule_says_so(tmp_path):
    text = config('keep = ["refused"]').replace("samples = true", "samples = true\ntokens_per_minute = 10", 1)
    async with FakeReplica() as replica, gateway(replica, config=text, samples=tmp_path / "samples") as running:
        assert (await complete(running, max_tokens=500))[0] == 400
        await flushed(running)
        [sample] = kept(tmp_path)
        assert sample["reasons"] == ["refused"] and sample["output"] == "" and sample["error"] == "InvalidArgument"


@pytest.mark.slow
async def test_a_fault_of_the_gateway_before_a_generation_is_a_failure(tmp_path):
    gate, rules = asyncio.Event(), 'keep = ["failure"]\n[admission]\nmax_running = 1\nmax_wait_s = 1'
    async with FakeReplica(lambda seen: Script((" a",), gate=gate)) as replica:
        async with sampled(tmp_path, replica, rules=rules) as running:
            first = asyncio.create_task(complete(running))
            await until(lambda: running.service.admission.running == 1)
            assert (await complete(running, prompt="two"))[0] == 504
            gate.set()
            await first
            await flushed(running)
            [sample] = kept(tmp_path)
            assert sample["reasons"] == ["failure"] and sample["error"] == "DeadlineExceeded"


@pytest.mark.slow
async def test_a_fraction_is_of_all_generations_whatever_their_end(tmp_path):
    script = Script(("a",), fail_after=1, error=EngineFailed("broken"))
    async with FakeReplica(lambda seen: script) as replica:
        async with sampled(tmp_path, replica, rules="fraction = 1.0") as running:
            assert (await complete(running))[0] == 500
            await flushed(running)
            [sample] = kept(tmp_path)
            assert sample["reasons"] == ["fraction"] and sample["error"] == "EngineFailed" and sample["output"] == "a"


@pytest.mark.slow
async def test_bounds_of_rate_and_size_are_kept_and_losses_counted(tmp_path):
    rules = "fraction = 1.0\nper_minute = 2\nsample_characters = 256"
    async with FakeReplica() as replica, sampled(tmp_path, replica, rules=rules) as running:
        for _ in range(4):
            await complete(running)
        await complete(running, prompt="x" * 300)
        await flushed(running)
        assert len(kept(tmp_path)) == 2
        metrics = await running.metrics()
        assert metrics['trident_gateway_samples_lost_total{reason="rate"}'] == 2
        assert metrics['trident_gateway_samples_lost_total{reason="size"}'] == 1
        assert metrics['trident_gateway_samples_total{result="kept"}'] == 2


@pytest.mark.slow
async def test_a_full_queue_and_a_full_disk_lose_samples_and_no_request(tmp_path, monkeypatch):
    async with FakeReplica() as replica, sampled(tmp_path, replica) as running:
        monkeypatch.setattr(recorder, "QUEUE_LENGTH", 0)
        assert (await complete(running))[0] == 200
        monkeypatch.setattr(recorder, "QUEUE_LENGTH", 10)

        def full(*arguments):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(SampleStore, "_write", full)
        assert (await complete(running))[0] == 200
        await flushed(running)
        metrics = await running.metrics()
        assert metrics['trident_gateway_samples_lost_total{reason="queue"}'] == 1
        assert metrics['trident_gateway_samples_lost_total{reason="disk"}'] == 1


def shout(text: str) -> str:
    if "boom" in text:
        raise RuntimeError("a fault of the operator's function")
    return text.upper()


@pytest.mark.slow
async def test_a_redaction_of_ones_own_runs_last_and_where_it_fails_nothing_is_kept(tmp_path):
    rules = f'fraction = 1.0\nredact = "{__name__}:shout"\npatterns = {{ TICKET = "ABC-[0-9]+" }}'
    async with FakeReplica() as replica, sampled(tmp_path, replica, rules=rules) as running:
        await complete(running, prompt="see ABC-12")
        await complete(running, prompt="boom")
        await flushed(running)
        assert [sample["text_input"] for sample in kept(tmp_path)] == ["SEE [TICKET]"]
        assert (await running.metrics())['trident_gateway_samples_lost_total{reason="failed"}'] == 1


async def test_a_rating_is_taken_from_the_tenant_that_asked_once_and_keeps_a_held_request(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "FLUSH_S", 0.02)
    rules = 'keep = ["down"]'
    async with FakeReplica() as replica, sampled(tmp_path, replica, rules=rules) as running:

        async def rate(team: str = "in", **fields):
            return await running.post("/v1/feedback", fields, authorization=f"Bearer {KEYS[team]}")

        _, headers, answer = await complete(running, x_request_id="mine")
        assert kept(tmp_path) == []
        for team in ("also", "out"):
            status, _, refused = await rate(team, request_id="mine", rating="down")
            assert status == 404 and "no sample of yours" in refused["error"]["message"]
            assert (refused["error"]["param"], refused["error"]["code"]) == (None, "not_found")
        told = {"response_id": answer["id"], "rating": "down", "comment": "wrong, ask bob@example.org", "labels": ["a"]}
        first = await rate(**told)
        assert first[0] == 200 and (await rate(**told))[2] == first[2]
        [sample] = kept(tmp_path)
        assert sample["feedback"]["comment"] == "wrong, ask [EMAIL]" and sample["reasons"] == ["down"]
        assert (await rate(request_id="mine", score=0.9))[0] == 200
        [sample] = kept(tmp_path)
        assert sample["feedback"]["rating"] == "up" and sample["feedback"]["score"] == 0.9
        metrics = await running.metrics()
        assert metrics['trident_gateway_feedback_total{rating="down"}'] == 1
        assert metrics['trident_gateway_samples_total{result="held"}'] == 1
        _, _, refused = await rate(request_id="mine", rating="up", choice=5)
        assert refused["error"]["message"].endswith("has the id mine and the choice 5")
        for wrong, field in (
            ({"rating": "down"}, "request_id"),
            ({"request_id": "mine"}, "rating"),
            ({"request_id": "mine", "score": 2}, "score"),
            ({"request_id": "mine", "rating": "up", "labels": ["a b"]}, "labels"),
            ({"request_id": "mine", "rating": "up", "more": 1}, "more"),
        ):
            status, _, refused = await rate(**wrong)
            assert status == 400 and field in refused["error"]["param"], refused
        assert (await running.post("/v1/feedback", {"request_id": "mine", "rating": "up"}))[0] == 401


@pytest.mark.slow
async def test_a_shadow_copy_of_a_tenant_that_opted_in_is_kept_as_a_pair(tmp_path):
    async with FakeReplica() as usual, FakeReplica(lambda seen: Script((" other",))) as shadow:
        text = config('keep = ["pair"]') + '[shadow]\npool = "next"\nfraction = 1.0\n'
        places = {"replicas": f"usual={usual.url};next={shadow.url}", "pool_weights": {"usual": "1"}}
        async with gateway(usual, shadow, config=text, samples=tmp_path / "samples", **places) as running:
            await complete(running)
            await complete(running, "out")
            counter = running.service.metrics.shadow.labels("differ")
            await until(lambda: counter._value.get() == 2)
            await flushed(running)
            [sample] = kept(tmp_path)
            assert sample["pair"] == {"pool": "next", "output": " other"} and sample["output"]
            assert sample["pool"] == "usual" and sample["reasons"] == ["pair"]


@pytest.mark.slow
async def test_checks_need_no_folder_and_count_by_model_and_pool():
    text = "[samples.checks]\nmin_answers = 10\nwindow_s = 1\n"
    async with (
        FakeReplica(lambda seen: Script((seen.value("text_input"),))) as replica,
        gateway(replica, config=text) as running,
    ):
        for prompt in ("hello there", "I cannot help you with that"):
            await running.post("/v1/completions", {**REQUEST, "prompt": prompt})
        await flushed(running)
        metrics = await running.metrics()
        for finding in ("ok", "refusal"):
            name = f'trident_gateway_quality_answers_total{{finding="{finding}",model="demo",pool=""}}'
            assert metrics[name] == 1
        assert metrics['trident_gateway_quality_languages_total{language="en",model="demo",pool=""}'] == 1
        assert metrics['trident_gateway_quality_length_count{model="demo",pool=""}'] == 2
        status, _, _ = await running.post("/v1/feedback", {"request_id": "a", "rating": "up"})
        assert status == 404


@pytest.mark.slow
async def test_answers_that_drift_are_measured_and_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "FLUSH_S", 0.02)
    rules = 'keep = ["drift"]\n[samples.checks]\nmin_answers = 10\nwindow_s = 1\n'
    said = "The answer is that it is so, and that is all."
    async with FakeReplica(lambda seen: Script((said,))) as replica:
        async with sampled(tmp_path, replica, rules=rules) as running:
            samples = running.service.samples
            for language in ("en", "fr"):
                for _ in range(30):
                    samples._drift.add("demo", "", 9, language, "ok")
                samples._drift._windows["demo", ""][-1] = (-100.0, samples._drift._windows["demo", ""][-1][1])
            samples._drift._windows["demo", ""][-1] = (
                time.monotonic() + 60,
                samples._drift._windows["demo", ""][-1][1],
            )
            await until(lambda: bool(samples._drifted))
            labels = 'feature="language",model="demo",pool=""'
            assert (await running.metrics())[f"trident_gateway_quality_drift{{{labels}}}"] > 1
            await complete(running)
            await flushed(running)
            assert [sample["reasons"] for sample in kept(tmp_path)] == [["drift"]]
            samples.change(None, False, ())
            await until(lambda: not samples._drifted)
            assert "trident_gateway_quality_drift{" not in await running.metrics_page()


@pytest.mark.slow
async def test_a_folder_that_fails_is_an_answer_and_no_fault(tmp_path, monkeypatch):
    async with FakeReplica() as replica, sampled(tmp_path, replica) as running:
        await complete(running, x_request_id="mine")
        await flushed(running)

        def broken(*arguments):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(SampleStore, "_read", broken)
        key = f"Bearer {KEYS['in']}"
        status, headers, _ = await running.post(
            "/v1/feedback", {"request_id": "mine", "rating": "up"}, authorization=key
        )
        assert status == 503 and headers["retry-after"] == "5"


async def test_nothing_runs_and_nothing_is_recorded_where_nothing_is_configured():
    async with FakeReplica() as replica, gateway(replica) as running:
        samples = running.service.samples
        assert samples._thread is None and samples.store is None
        await running.post("/v1/completions", REQUEST)
        assert not samples._queued
        assert (await running.post("/v1/feedback", {"request_id": "a", "rating": "up"}))[0] == 404
        assert "trident_gateway_quality" not in await running.metrics_page()


@pytest.mark.slow
def test_text_without_a_folder_is_refused_at_start():
    with pytest.raises(InvalidArgument, match="samples: keeps text and needs TRIDENT_GATEWAY_SAMPLES"):
        asyncio.run(_start("fraction = 0.5"))


async def _start(rules: str) -> None:
    async with gateway(config=config(rules)):
        raise AssertionError("it started")


async def test_a_file_of_another_name_does_not_end_the_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "FLUSH_S", 0.01)
    monkeypatch.setattr(recorder, "ROUND_S", 0.01)
    folder = tmp_path / "samples" / "tenant=acme%2Fin" / "kept"
    folder.mkdir(parents=True)
    (folder / "export.jsonl").touch()
    (folder / "20000101T00-000000.jsonl").touch()
    async with FakeReplica() as replica, sampled(tmp_path, replica) as running:
        await until(lambda: [path.name for path in folder.iterdir()] == ["export.jsonl"])
        await complete(running)
        await until(lambda: bool(kept(tmp_path)))

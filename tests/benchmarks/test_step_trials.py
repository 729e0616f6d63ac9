"""Trials of single steps against a scripted engine: known steps in, the same steps out."""

import asyncio
import dataclasses
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import calibrate, step_trials
from benchmarks.measurement import ServerUnderTest
from benchmarks.step_trials import Experiment, Outcome, Trial
from contract import step_model
from contract.errors import EngineFailed
from contract.prometheus import parse
from contract.scheduling import RESUME_TOKENS, RETRY_AFTER, UNDRAFTED_FROM
from contract.step_model import Point
from tests.contract.test_step_model import SOME
from tests.fakes.scripted_steps import Scripted, Words, small

KEY = {"manifest_sha256": "a" * 64, "machine": "a machine, 2 cores"}


def test_the_design_stays_within_the_engines_limits():
    usual = small(), small(1, 64, 128, None), small(300, 8192, 4096, 40_000), small(drafts=8)
    for engine in (*usual, small(32, 128, 64, drafts=4)):
        trials = step_trials.design(engine)
        assert len(trials) == len(set(trials)) and any(trial.prefill for trial in trials)
        assert {trial.sequences for trial in trials if not trial.prefill} >= {1, engine.max_batch_size}
        for trial in trials:
            assert trial.sequences <= engine.max_batch_size and trial.prefill + trial.sequences <= engine.max_num_tokens
            assert (
                trial.sequences * trial.prompt <= (engine.kv_cache_tokens or 1e9) and trial.prompt < engine.max_seq_len
            )


def test_a_run_goes_on_where_it_was_ended(tmp_path: Path):
    target = Scripted(SOME)
    trials = [Trial(1, 32, 0), Trial(0, 0, 128)]

    def experiment():
        return Experiment(small(), KEY, target, Words(), tmp_path / "points")

    asyncio.run(experiment().run(trials, 1, time.monotonic() - 1))
    assert not experiment().outcomes
    first = experiment()
    asyncio.run(first.run(trials[:1], 1, time.monotonic() + 60))
    kept = (tmp_path / "points").read_text()
    (tmp_path / "points").write_text(kept + '\n{"trial": {"seq')  # killed meanwhile
    second = experiment()
    assert second.outcomes == first.outcomes
    sent = len(target.requests)
    asyncio.run(second.run(trials, 1, time.monotonic() + 60))
    assert len(target.requests) - sent == step_trials.PROBES and len(experiment().outcomes) == 2
    decode, prefill = (outcome.point for outcome in second.outcomes)
    assert decode.seconds == pytest.approx(SOME.seconds(1, 32, 0), rel=1e-3)
    assert prefill == Point(0, 0, 128, pytest.approx(SOME.seconds(0, 0, 128), rel=1e-3))
    other = Experiment(small(), KEY | {"manifest_sha256": "b" * 64}, target, Words(), tmp_path / "points")
    assert not other.outcomes


def test_prompts_beside_streams_are_measured_and_the_streams_are_ended(tmp_path: Path):
    target = Scripted(SOME)
    one = Experiment(small(), KEY, target, Words(), tmp_path / "points")
    asyncio.run(one.run([Trial(4, 16, 60)], 1, time.monotonic() + 60))
    assert one.outcomes[0].point.sequences == 4 and one.outcomes[0].request_s is None


def test_what_is_sent_during_a_prompt_is_known_whatever_the_clock_of_the_replica(tmp_path: Path):
    class Streaming(Scripted):
        async def send(self, request, record):
            if request.max_tokens > 900:
                record.messages += [(10.0 - 1e-3, 1), (10.0 - 1e-4, 1), (11.0, 1)]  # the prompt's first token: 10.0
            await super().send(request, record)

    one = Experiment(small(), KEY, Streaming(SOME), Words(), tmp_path / "points")
    asyncio.run(one.run([Trial(4, 16, 60)], 1, time.monotonic() + 60))
    assert one.outcomes[0].sent == 2.0


def test_what_an_engine_is_too_short_for_is_left_out_and_a_busy_one_fails(tmp_path: Path, monkeypatch, capsys):
    """Streams of one of two requests begin when the other's have ended."""
    monkeypatch.setattr(step_trials, "PAUSE_S", 0.0)

    class InTurns(Scripted):
        async def send(self, request, record):
            await super().send(request, record)
            late_s = 100.0 * (len(self.requests) % 2)
            record.messages = [(at_s + late_s, tokens) for at_s, tokens in record.messages]

    for engine, left_out in ((small(longest=64), {Trial(2, 16, 0)}), (small(longest=512), None)):
        one = Experiment(engine, KEY, InTurns(SOME), Words(), tmp_path / f"{engine.max_seq_len}")
        work = one.run([Trial(2, 16, 0), Trial(1, 16, 0)], 1, time.monotonic() + 60)
        if left_out is None:
            with pytest.raises(step_trials.NotTogether, match="may be busy"):
                asyncio.run(work)
            continue
        asyncio.run(work)
        assert one.left_out == left_out and [outcome.trial for outcome in one.outcomes] == [Trial(1, 16, 0)]
        assert "left out, as max_seq_len is 64: Trial(sequences=2" in capsys.readouterr().out


def test_a_server_without_timings_cannot_be_calibrated(tmp_path: Path):
    class Plain(Scripted):
        async def send(self, request, record):
            await super().send(request, record)
            record.timings = None

    one = Experiment(small(), KEY, Plain(SOME), Words(), tmp_path / "points")
    with pytest.raises(EngineFailed, match="timings"):
        asyncio.run(one.run([Trial(0, 0, 60)], 1, time.monotonic() + 60))


@pytest.mark.parametrize(("drafts", "fewest"), [(0, 4), (8, UNDRAFTED_FROM + 4)])
def test_prompts_are_measured_beside_streams_that_are_not_drafted_for(drafts, fewest):
    engine = dataclasses.replace(small(drafts=drafts, longest=4096), max_batch_size=64, max_num_tokens=512)
    work = step_trials.design(engine)
    assert len(work) == len(set(work)), "each is measured once in a round"
    assert sorted({trial.sequences for trial in work if trial.sequences and trial.prefill}) == [fewest, 16, 32]


def test_steps_with_drafts_are_measured_apart_from_plain_ones(tmp_path: Path, monkeypatch):
    """An engine that accepts two of eight drafts of every step."""
    monkeypatch.setattr(step_trials, "PAUSE_S", 0.0)
    drafted = [0, 0]

    class Drafting(Scripted):
        plain = 0  # requests that are not drafted for

        async def send(self, request, record):
            await super().send(request, record)
            self.plain -= 1
            if self.plain >= 0:
                return
            steps = (request.max_tokens + 1) // 3
            record.messages = [(10.0, 1)] + [(10.0 + 0.05 * n, 3) for n in range(1, steps + 1)]
            drafted[0], drafted[1] = drafted[0] + steps, drafted[1] + 2 * steps

    engine = small(drafts=8)
    work = step_trials.design(engine)
    assert [trial.sequences for trial in work if trial.drafted] == [1, 2, 4, 8]
    undrafted = [trial for trial in work if trial.sequences and not trial.drafted]
    assert {1, 2} < {trial.sequences for trial in undrafted}
    alone = next(trial for trial in work if trial.drafted)
    # The second engine rejected earlier drafts, and tries them again after some requests.
    for name, plain in (("points", 0), ("retried", RETRY_AFTER)):
        replica = Drafting(SOME)
        one, replica.plain = Experiment(engine, KEY, replica, Words(), tmp_path / name), plain
        one.drafted = lambda: tuple(drafted)
        asyncio.run(one.run([alone], 1, time.monotonic() + 60))
        [outcome] = one.outcomes
        assert outcome.point.seconds == pytest.approx(0.05) and outcome.point.drafted == 1 and outcome.sent == 1.0
        accepted = round(step_trials.acceptance_of(3.0, 8), 3)
        assert outcome.stretches == [[accepted] * len(step_model.STRETCHES)] * step_trials.TEXTS
    others = [Outcome(Trial(n, 32, 0), Point(n, 32 * n, 0, 0.02 * n)) for n in (1, 4)]
    model = calibrate.fitted([outcome, *others], KEY)
    assert model.acceptance == tuple(map(tuple, outcome.stretches))
    # Beside so many others nothing is drafted, and they end before the steps that count.
    target = Scripted(SOME)
    plain = Experiment(engine, KEY, target, Words(), tmp_path / "plain")
    asyncio.run(plain.run([Trial(1, 32, 0)], 1, time.monotonic() + 60))
    assert len(target.requests) % (UNDRAFTED_FROM + 1) == 0 and plain.outcomes[0].point.drafted == 0
    # Nor is it drafted for when they have ended.
    assert max(request.max_tokens for request in target.requests) - step_trials.SHORT < RESUME_TOKENS
    # An engine that never drafts for them ends it, too.
    never = Experiment(engine, KEY, Scripted(SOME), Words(), tmp_path / "never")
    asyncio.run(never.run([alone], 1, time.monotonic() + 60))
    assert never.outcomes[0].point.drafted == 0 and never.outcomes[0].stretches[0] == [0.0] * 5


@given(st.floats(0, 1), st.integers(1, 16))
def test_acceptance_is_found_from_the_tokens_of_a_step(part, drafts):
    made = step_model.tokens_per_step(part, drafts)
    found = step_trials.acceptance_of(made, drafts)
    assert step_model.tokens_per_step(found, drafts) == pytest.approx(made, abs=1e-3)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=5, max_size=5), st.integers(1, 4))
def test_the_acceptances_of_the_stretches_make_as_many_steps_as_the_messages_took(accepted, together):
    """together: steps whose tokens come in one message, which begins at most so many steps before a stretch."""
    messages, position, steps = [(0.0, 1)], 1, 0
    while position < 400:
        made = round(step_model.tokens_per_step(step_model.accepted_at(accepted, position), 3)) * together
        messages, position, steps = [*messages, (0.0, made)], position + made, steps + together
    found = step_trials.stretches(messages, steps, 3)
    whole, end = steps - together, position - messages[-1][1]  # the last message may be cut off
    bounds = zip(step_model.STRETCHES, (*step_model.STRETCHES[1:], end), strict=True)
    made = [
        (until - max(1, begin)) / step_model.tokens_per_step(part, 3)
        for (begin, until), part in zip(bounds, found, strict=True)
    ]
    assert sum(made) == pytest.approx(whole, rel=0.005)


def test_a_text_that_ends_early_tells_of_what_it_reached():
    assert step_trials.stretches([(0.0, 1)], 0, 8) == [0.0]
    assert step_trials.stretches([(0.0, 1), (0.1, 1), (0.2, 1)], 2, 8) == [0.0]
    # The second step went beyond three stretches, and the last one was cut off.
    messages = [(0.0, 1), (0.1, 1), (0.2, 33), (0.3, 33), (0.4, 2)]
    assert step_trials.stretches(messages, 4, 32) == pytest.approx([0.832, 1.0, 1.0, 1.0, 1.0], abs=0.001)


@pytest.mark.slow  # makes the prompts of two experiments
def test_texts_whose_acceptance_is_measured_are_the_same_in_every_run(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(step_trials, "TEXTS", 3)

    def texts(path):
        target = Scripted(SOME)
        experiment = Experiment(small(drafts=4), KEY, target, Words(), path)
        experiment.drafted = lambda: (float(len(target.requests)), 0.0)
        asyncio.run(experiment.run([Trial(1, 32, 0, drafted=True)], 1, time.monotonic() + 60))
        return [request.prompt for request in target.requests]

    first = texts(tmp_path / "first")
    assert len(set(first)) > 1 and texts(tmp_path / "second") == first


def test_streams_that_end_before_they_decode_together_are_measured_with_longer_answers(tmp_path: Path):
    class Slow(Scripted):
        async def send(self, request, record):
            """The second stream's first token comes 60 steps after the first one's."""
            await super().send(request, record)
            late = 60 * (len(self.requests) % 2)
            record.messages = [(at_s + late * SOME.seconds(2, 64, 0), n) for at_s, n in record.messages]

    target = Slow(SOME)
    target.running = 2
    experiment = Experiment(small(), KEY, target, Words(), tmp_path / "points")
    asyncio.run(experiment.run([Trial(2, 32, 0)], 1, time.monotonic() + 60))
    assert experiment.outcomes[0].sent == 1.0
    assert [request.max_tokens for request in target.requests][::2][:2] == [41, 82]


def test_steps_are_measured_once_the_requests_before_have_ended(monkeypatch):
    pages = []
    monkeypatch.setattr(step_trials.scrape, "fetch", lambda url: parse(pages.pop(0) if len(pages) > 1 else pages[0]))
    busy, free = ('nv_trt_llm_request_metrics{request_type="active"} ' + count for count in "10")
    server = ServerUnderTest("127.0.0.1:1", "http://127.0.0.1:2/metrics")
    pages[:] = [busy, busy, free]
    step_trials.check_serves(server, "small", "a" * 64)
    monkeypatch.setattr(step_trials, "ENDING_S", 0.0)
    pages[:] = [busy]
    with pytest.raises(EngineFailed, match="has 1 requests; steps are measured on a replica without other clients"):
        step_trials.check_serves(server, "small", "a" * 64)
    pages[:] = ['trident_engine_info{manifest_sha256="b"} 1']
    with pytest.raises(EngineFailed, match="serves another engine, or another build, than small"):
        step_trials.check_serves(server, "small", "a" * 64)


def test_the_reference_is_a_few_trials_of_the_design():
    for engine in (small(), small(1, 64, 128, None), small(300, 8192, 4096, 40_000), small(drafts=8), small(4, 8, 64)):
        trials = step_trials.reference(engine)
        assert set(trials) <= set(step_trials.design(engine)) and len(trials) <= 4
        assert not any(trial.drafted for trial in trials)
        decoding = [trial for trial in trials if trial.sequences]
        assert decoding and decoding[-1].sequences == engine.max_batch_size
        assert {trial.prompt for trial in decoding} == {decoding[0].prompt}  # the short one

"""Calibration against a scripted engine: known steps in, the same steps out."""

import asyncio
import dataclasses
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import calibrate
from benchmarks.calibrate import Experiment, Outcome, Trial, compared
from benchmarks.measurement import ServerUnderTest
from benchmarks.record import Record
from contract import step_model
from contract.errors import EngineFailed, InvalidArgument
from contract.generation import Timings
from contract.scheduling import RETRY_AFTER
from contract.step_model import Point, StepModel
from tests.contract.test_step_model import SOME
from tests.fakes.manifests import manifest

KEY = {"manifest_sha256": "a" * 64, "machine": "a machine, 2 cores"}


def small(slots: int = 8, step: int = 256, longest: int = 1024, cache: int | None = 8192, drafts: int = 0):
    recipe = {"speculative_decoding": {"max_draft_len": drafts}} if drafts else {}
    sizes = {"max_batch_size": slots, "max_num_tokens": step, "max_seq_len": longest, "kv_cache_tokens": cache}
    return manifest(recipe=recipe, **sizes)


class Words:
    def text(self, rng, tokens, prefix=""):
        return " ".join([str(rng.random())] * tokens)


class Scripted:
    """Answers at once, with the instants that an engine of the model would have."""

    def __init__(self, model: StepModel) -> None:
        self.model, self.requests = model, []

    async def send(self, request, record):
        words = len(request.prompt.split())
        self.requests.append(request)
        if request.max_tokens > 900:  # a background stream: its answer goes on for ever
            record.messages.append((time.monotonic(), 1))
            await asyncio.sleep(3600)
        step_s = self.model.seconds(self.running, self.running * words, 0)
        record.input_tokens = words
        prefill_s = self.model.prompt_s(words, 10_000)
        record.messages = [(10.0 + step_s * n, 1) for n in range(request.max_tokens)]
        record.timings = Timings(0, 1_000_000_000, 1_000_000_000 + round(prefill_s * 1e9), 0)
        record.finish_reason = "length"

    running = 1


def test_the_design_stays_within_the_engines_limits():
    usual = small(), small(1, 64, 128, None), small(300, 8192, 4096, 40_000), small(drafts=8)
    for engine in (*usual, small(32, 128, 64, drafts=4)):
        trials = calibrate.design(engine)
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
    assert len(target.requests) - sent == calibrate.PROBES and len(experiment().outcomes) == 2
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


def test_what_an_engine_is_too_short_for_is_left_out_and_a_busy_one_fails(tmp_path: Path, monkeypatch, capsys):
    """Streams of one of two requests begin when the other's have ended."""
    monkeypatch.setattr(calibrate, "PAUSE_S", 0.0)

    class InTurns(Scripted):
        async def send(self, request, record):
            await super().send(request, record)
            late_s = 100.0 * (len(self.requests) % 2)
            record.messages = [(at_s + late_s, tokens) for at_s, tokens in record.messages]

    for engine, left_out in ((small(longest=64), {Trial(2, 16, 0)}), (small(longest=512), None)):
        one = Experiment(engine, KEY, InTurns(SOME), Words(), tmp_path / f"{engine.max_seq_len}")
        work = one.run([Trial(2, 16, 0), Trial(1, 16, 0)], 1, time.monotonic() + 60)
        if left_out is None:
            with pytest.raises(calibrate.NotTogether, match="may be busy"):
                asyncio.run(work)
            continue
        asyncio.run(work)
        assert one.left_out == left_out and [outcome.trial for outcome in one.outcomes] == [Trial(1, 16, 0)]
        assert "left out, as max_seq_len is 64: Trial(sequences=2" in capsys.readouterr().out


def test_an_engine_of_too_few_positions_is_refused(tmp_path: Path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    small(longest=48).save(folder)
    with pytest.raises(InvalidArgument, match="engine: must have a max_seq_len of 64 at least .*; tiny has 48"):
        calibrate.run(ServerUnderTest("127.0.0.1:1", None, folder), 1, 1.0, None)


def test_a_server_without_timings_cannot_be_calibrated(tmp_path: Path):
    class Plain(Scripted):
        async def send(self, request, record):
            await super().send(request, record)
            record.timings = None

    one = Experiment(small(), KEY, Plain(SOME), Words(), tmp_path / "points")
    with pytest.raises(EngineFailed, match="timings"):
        asyncio.run(one.run([Trial(0, 0, 60)], 1, time.monotonic() + 60))


def test_the_model_of_known_steps_is_found_and_says_how_far_the_points_are():
    steps = [(n, n * c, 0) for n in (1, 2, 4, 8, 16) for c in (32, 500)] + [
        (n, n * 40, p) for n in (0, 8) for p in (16, 200)
    ]
    outcomes = [Outcome(Trial(n, c, p), Point(n, c, p, SOME.seconds(n, c, p)), 0.004) for n, c, p in steps]
    model = calibrate.fitted(outcomes, KEY)
    assert model.error_p95_percent < 0.5 and model.request_s == 0.004 and model.points == len(steps)
    assert model.seconds(6, 1000, 50) == pytest.approx(SOME.seconds(6, 1000, 50), rel=0.02)
    disturbed = [*outcomes, dataclasses.replace(outcomes[0], point=Point(1, 32, 0, 3 * SOME.seconds(1, 32, 0)))]
    noisy = calibrate.fitted(disturbed, KEY)
    assert noisy.seconds(6, 1000, 50) == pytest.approx(model.seconds(6, 1000, 50)) and noisy.points == len(steps) + 1
    text = calibrate.described(noisy, disturbed)
    assert "error p50" in text and "-67 %" in text and step_model.TERMS[0] in text


def test_steps_with_drafts_are_measured_apart_from_plain_ones(tmp_path: Path, monkeypatch):
    """An engine that accepts two of eight drafts of every step."""
    monkeypatch.setattr(calibrate, "PAUSE_S", 0.0)
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
    work = calibrate.design(engine)
    assert [trial.draft_tokens for trial in work if trial.draft_tokens] == [8, 11, 17]
    assert min(trial.sequences for trial in work if trial.sequences and not trial.draft_tokens) == 4
    alone = next(trial for trial in work if trial.draft_tokens == 8)
    # The second engine rejected earlier drafts, and tries them again after some requests.
    for name, plain in (("points", 0), ("retried", RETRY_AFTER)):
        replica = Drafting(SOME)
        one, replica.plain = Experiment(engine, KEY, replica, Words(), tmp_path / name), plain
        one.drafted = lambda: tuple(drafted)
        asyncio.run(one.run([alone], 1, time.monotonic() + 60))
        [outcome] = one.outcomes
        assert outcome.point.seconds == pytest.approx(0.05) and outcome.point.draft_tokens == 8 and outcome.sent == 1.0
        accepted = round(calibrate.acceptance_of(3.0, 8), 3)
        assert outcome.stretches == [[accepted] * len(step_model.STRETCHES)] * calibrate.TEXTS
    others = [Outcome(Trial(n, 32, 0), Point(n, 32 * n, 0, 0.02 * n)) for n in (1, 4)]
    model = calibrate.fitted([outcome, *others], KEY)
    assert model.acceptance == tuple(map(tuple, outcome.stretches))
    # Beside four others nothing is drafted, and they end before the steps that count.
    target = Scripted(SOME)
    plain = Experiment(engine, KEY, target, Words(), tmp_path / "plain")
    asyncio.run(plain.run([Trial(1, 32, 0)], 1, time.monotonic() + 60))
    assert len(target.requests) % 5 == 0 and plain.outcomes[0].point.draft_tokens == 0
    # An engine that never drafts for them ends it, too.
    never = Experiment(engine, KEY, Scripted(SOME), Words(), tmp_path / "never")
    asyncio.run(never.run([alone], 1, time.monotonic() + 60))
    assert never.outcomes[0].point.draft_tokens == 0 and never.outcomes[0].stretches[0] == [0.0] * 5


@given(st.floats(0, 1), st.integers(1, 16))
def test_acceptance_is_found_from_the_tokens_of_a_step(part, drafts):
    made = step_model.tokens_per_step(part, drafts)
    found = calibrate.acceptance_of(made, drafts)
    assert step_model.tokens_per_step(found, drafts) == pytest.approx(made, abs=1e-3)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=5, max_size=5), st.integers(1, 4))
def test_the_acceptances_of_the_stretches_make_as_many_steps_as_the_messages_took(accepted, together):
    """together: steps whose tokens come in one message, which begins at most so many steps before a stretch."""
    messages, position, steps = [(0.0, 1)], 1, 0
    while position < 400:
        made = round(step_model.tokens_per_step(step_model.accepted_at(accepted, position), 3)) * together
        messages, position, steps = [*messages, (0.0, made)], position + made, steps + together
    found = calibrate.stretches(messages, steps, 3)
    whole, end = steps - together, position - messages[-1][1]  # the last message may be cut off
    bounds = zip(step_model.STRETCHES, (*step_model.STRETCHES[1:], end), strict=True)
    made = [
        (until - max(1, begin)) / step_model.tokens_per_step(part, 3)
        for (begin, until), part in zip(bounds, found, strict=True)
    ]
    assert sum(made) == pytest.approx(whole, rel=0.005)


def test_a_text_that_ends_early_tells_of_what_it_reached():
    assert calibrate.stretches([(0.0, 1)], 0, 8) == [0.0]
    assert calibrate.stretches([(0.0, 1), (0.1, 1), (0.2, 1)], 2, 8) == [0.0]
    # The second step went beyond three stretches, and the last one was cut off.
    messages = [(0.0, 1), (0.1, 1), (0.2, 33), (0.3, 33), (0.4, 2)]
    assert calibrate.stretches(messages, 4, 32) == pytest.approx([0.832, 1.0, 1.0, 1.0, 1.0], abs=0.001)


def test_what_a_step_takes_is_compared_by_trial():
    trials = [Outcome(Trial(4, 32, 0), Point(4, 100, 0, seconds)) for seconds in (0.01, 0.012)]
    assert compared(trials) == {
        "a step, ms: 4 sequences, prompts of 32, 0 read beside them": {"better": "lower", "values": [10.0, 12.0]}
    }


def test_steps_in_service_change_the_designed_ones(capsys):
    """Requests in pairs: the first one meets an idle engine and decodes, the second one is read beside it."""
    records, at_s, known = [], 100.0, dataclasses.replace(SOME, request_s=0.001)
    for index, prompt in enumerate((20, 200, 50, 100)):
        begin_s = at_s + 0.01
        plain_s = 1.2 * known.seconds(0, 0, 0)
        alone_s = plain_s + 1.1 * (known.seconds(0, 0, prompt) - known.seconds(0, 0, 0)) + 0.003
        step_s = 1.2 * known.seconds(1, 92.5 + 7.75, 0)  # prompts and half of the answers, in the mean
        streams_s = known.seconds(1, 100.25, 0)
        beside_s = 1.2 * streams_s + 1.1 * (known.seconds(1, 100.25, prompt) - streams_s)
        first = Record(2 * index, at_s, at_s, input_tokens=prompt)
        first.messages = [(begin_s + alone_s + 0.002 + n * step_s, 1) for n in range(30)]
        second_s = first.messages[-1][0] + step_s / 2
        second = Record(2 * index + 1, second_s, second_s, [(second_s + beside_s + 0.002, 1)], input_tokens=prompt)
        first.ended_s, second.ended_s = second_s + beside_s + 0.001, second_s + beside_s + 0.002
        for record, from_s, took_s in ((first, begin_s, alone_s), (second, second_s, beside_s)):
            record.finish_reason = "length"
            instants = (0.0, from_s, from_s + took_s, record.ended_s)
            record.timings = Timings(*(round(1e9 * instant_s) for instant_s in instants))
        records += [first, second]
        at_s = second.ended_s + 0.5
    found = calibrate.in_service(known, records)
    assert "streams 1 x 1.20; prompts x 1.10, 3.0 ms after a pause, spread 0.00" in capsys.readouterr().out
    assert found.sequence_s == pytest.approx(1.2 * known.sequence_s, rel=1e-3)
    assert found.prefill_token_s == pytest.approx(1.1 * known.prefill_token_s, rel=1e-3)
    assert found.request_s == pytest.approx(0.012, abs=1e-4)
    assert calibrate.in_service(known, []) == known


@given(st.dictionaries(st.sampled_from((1, 2, 4, 8)), st.floats(0.6, 1.9), min_size=1))
def test_steps_in_service_are_known_by_how_many_streams_they_have(factors):
    """Those of other numbers of streams are between, or as of the nearest."""
    records = []
    for streams, factor in factors.items():
        step_s, begin_s = factor * SOME.seconds(streams, streams * 62, 0), 1000.0 * streams
        for _ in range(streams):
            record = Record(len(records), begin_s, begin_s, [(begin_s + n * step_s, 1) for n in range(60)])
            record.input_tokens, record.ended_s, record.finish_reason = 32, begin_s + 59 * step_s, "length"
            record.timings = Timings(0, *(round(1e9 * at_s) for at_s in (begin_s - 0.1, begin_s, record.ended_s)))
            records.append(record)
    found, known = calibrate.in_service(SOME, records), [factor for _, factor in sorted(factors.items())]
    for streams in (1, 2, 3, 6, 8, 20, 32):
        ratio = found.seconds(streams, 62 * streams, 0) / SOME.seconds(streams, 62 * streams, 0)
        # What rises less than in proportion is exact; steps that get shorter with more streams are no step model.
        assert 0.8 * min(known) <= ratio <= 1.2 * max(known)
        if len(known) == 1:
            assert ratio == pytest.approx(known[0])


@given(st.floats(0.55, 1.95), st.integers(3, 300))
def test_prompts_beside_streams_are_as_long_as_with_the_sending_that_the_model_counts(factor, many):
    """Tokens are sent once in a window, not after every step; and many steps beside 32 streams do not decide alone."""
    model = dataclasses.replace(SOME, cores=2, burst_cpu_s=0.0004, message_cpu_s=0.0005)
    longer = {name: factor * getattr(model, name) for name in calibrate.PROMPTS}
    served = dataclasses.replace(model, **longer)
    work = [(n, 80.0 * n, tokens) for n in (1, 4) for tokens in (20, 60, 90)]
    steps = [Point(*one, served.seconds(*one)) for one in work]
    assert calibrate._prompts_factor(model, steps) == pytest.approx(factor, abs=1e-3)
    slower = [Point(32, 2560.0, 60, 1.2 * served.seconds(32, 2560.0, 60))] * many
    assert calibrate._prompts_factor(model, steps + slower) == calibrate._prompts_factor(model, steps + slower[:3])


def test_texts_whose_acceptance_is_measured_are_the_same_in_every_run(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(calibrate, "TEXTS", 3)

    def texts(path):
        target = Scripted(SOME)
        experiment = Experiment(small(drafts=4), KEY, target, Words(), path)
        experiment.drafted = lambda: (float(len(target.requests)), 0.0)
        asyncio.run(experiment.run([Trial(1, 32, 0, 4)], 1, time.monotonic() + 60))
        return [request.prompt for request in target.requests]

    first = texts(tmp_path / "first")
    assert len(set(first)) > 1 and texts(tmp_path / "second") == first


def test_a_step_beside_something_else_of_the_machine_tells_nothing():
    gaps = [(1.1, 1.0)] * 30
    assert calibrate._ratio([*gaps, (50.0, 1.0), (90.0, 1.0)]) == pytest.approx(1.1)


def test_steps_with_drafts_in_service_are_known_by_messages_of_several_tokens(capsys):
    model = dataclasses.replace(SOME, draft_token_s=0.001, draft_tokens=8, acceptance=((0.5,),))
    steps_s = 1.3 * model.seconds(1, 32 + 45, 0, 8), 7.0
    record = Record(0, 10.0, 10.0, [(10.0, 1)], input_tokens=32, finish_reason="length")
    for nth in range(60):
        several = nth % 2 == 0
        record.messages.append((record.messages[-1][0] + steps_s[not several], 2 if several else 1))
    record.ended_s = record.messages[-1][0]
    record.timings = Timings(0, *(round(1e9 * at_s) for at_s in (9.9, 10.0, record.ended_s)))
    found = calibrate.in_service(model, [record])
    assert "streams 1 x 1.30, with drafts x 1.30;" in capsys.readouterr().out
    assert found.draft_token_s == pytest.approx(0.0013, rel=0.01)


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

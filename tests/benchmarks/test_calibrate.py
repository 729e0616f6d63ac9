"""Calibration against a scripted engine: known steps in, the same steps out."""

import asyncio
import dataclasses
import time
from pathlib import Path

import pytest

from benchmarks import calibrate
from benchmarks.calibrate import Experiment, Outcome, Trial, compared
from benchmarks.record import Record
from contract import step_model
from contract.errors import EngineFailed
from contract.generation import Timings
from contract.step_model import Point, StepModel
from tests.contract.test_step_model import SOME

KEY = {"manifest_sha256": "a" * 64, "machine": "a machine, 2 cores"}


@dataclasses.dataclass
class Engine:
    """As much of a manifest as the experiment reads."""

    max_batch_size: int = 8
    max_num_tokens: int = 256
    max_seq_len: int = 1024
    kv_cache_tokens: int | None = 8192


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
    for engine in (Engine(), Engine(1, 64, 128, None), Engine(300, 8192, 4096, 40_000)):
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
        return Experiment(Engine(), KEY, target, Words(), tmp_path / "points")

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
    other = Experiment(Engine(), KEY | {"manifest_sha256": "b" * 64}, target, Words(), tmp_path / "points")
    assert not other.outcomes


def test_prompts_beside_streams_are_measured_and_the_streams_are_ended(tmp_path: Path):
    target = Scripted(SOME)
    one = Experiment(Engine(), KEY, target, Words(), tmp_path / "points")
    asyncio.run(one.run([Trial(4, 16, 60)], 1, time.monotonic() + 60))
    assert one.outcomes[0].point.sequences == 4 and one.outcomes[0].request_s is None


def test_a_server_without_timings_cannot_be_calibrated(tmp_path: Path):
    class Plain(Scripted):
        async def send(self, request, record):
            await super().send(request, record)
            record.timings = None

    one = Experiment(Engine(), KEY, Plain(SOME), Words(), tmp_path / "points")
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


def test_what_a_step_takes_is_compared_by_trial():
    trials = [Outcome(Trial(4, 32, 0), Point(4, 100, 0, seconds)) for seconds in (0.01, 0.012)]
    assert compared(trials) == {
        "a step, ms: 4 sequences, prompts of 32, 0 read beside them": {"better": "lower", "values": [10.0, 12.0]}
    }


def test_steps_in_service_change_the_designed_ones_by_two_factors(capsys):
    """Requests one after the other, whose streams take 1.2 times as long and whose prompts 1.1 times."""
    records, at_s, known = [], 100.0, dataclasses.replace(SOME, request_s=0.001)
    plain_s = known.seconds(0, 0, 0)
    for index, prompt in enumerate((20, 200, 50, 100)):
        begin_s = at_s + 0.01
        first_s = begin_s + plain_s + 1.1 * (known.seconds(0, 0, prompt) - plain_s)
        step_s = 1.2 * known.seconds(1, 92.5 + 15, 0)  # prompts and half of the answers, in the mean
        record = Record(index, at_s, at_s, [(first_s + 0.002 + n * step_s, 1) for n in range(30)], input_tokens=prompt)
        record.ended_s, record.finish_reason = record.messages[-1][0], "length"
        record.timings = Timings(0, round(begin_s * 1e9), round(first_s * 1e9), round(record.ended_s * 1e9))
        records.append(record)
        at_s = record.ended_s + 0.5
    found = calibrate.in_service(known, records)
    assert "streams x 1.20, prompts x 1.10" in capsys.readouterr().out
    assert found.sequence_s == pytest.approx(1.2 * known.sequence_s, rel=1e-3)
    assert found.prefill_token_s == pytest.approx(1.1 * known.prefill_token_s, rel=1e-3)
    assert found.request_s == pytest.approx(0.012, abs=1e-4)
    assert calibrate.in_service(known, []) == known

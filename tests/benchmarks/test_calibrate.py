"""Calibration against a scripted engine: known steps in, the same steps out."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import calibrate, step_trials
from benchmarks.calibrate import compared
from benchmarks.measurement import ServerUnderTest
from benchmarks.step_trials import Outcome, Trial
from benchmarks.target import Target
from contract import manifest as manifests
from contract import step_model
from contract.errors import EngineFailed, InvalidArgument, NotFound
from contract.step_model import Point
from tests.contract.test_step_model import SOME
from tests.fakes.scripted_steps import Scripted, Words, small

KEY = {"manifest_sha256": "a" * 64, "machine": "a machine, 2 cores"}


def test_an_engine_of_too_few_positions_is_refused(tmp_path: Path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    small(longest=48).save(folder)
    with pytest.raises(InvalidArgument, match="engine: must have a max_seq_len of 64 at least .*; tiny has 48"):
        calibrate.run(ServerUnderTest("127.0.0.1:1", None, folder), 1, 1.0, None, None)


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


class Closing(Scripted, Target):
    """Its steps take ``times`` as long as by the model."""

    times = 1.0

    async def send(self, request, record):
        await super().send(request, record)
        begin_s = record.messages[0][0]
        record.messages = [(begin_s + self.times * (at_s - begin_s), n) for at_s, n in record.messages]
        timings = record.timings
        took = round(self.times * (timings.first_token_ns - timings.first_scheduled_ns))
        record.timings = dataclasses.replace(timings, first_token_ns=timings.first_scheduled_ns + took)


@pytest.fixture
def replica(tmp_path, monkeypatch):
    """A calibrated engine's folder, a server of it, and its target."""
    small().save(tmp_path)
    digest = manifests.sha256_file(tmp_path / manifests.FILE_NAME)
    target = Closing(SOME)
    monkeypatch.setattr(step_trials, "PAUSE_S", 0.0)
    monkeypatch.setattr(calibrate, "EnsembleTarget", lambda url: target)
    monkeypatch.setattr(calibrate.Prompts, "for_engine", lambda folder: Words())
    server = ServerUnderTest("127.0.0.1:1", None, tmp_path)
    known = dataclasses.replace(SOME, manifest_sha256=digest, machine=step_model.machine_kind())
    known = dataclasses.replace(known, reference_s=calibrate.reference_s(server, tmp_path, small()))
    known.save(tmp_path)
    return server, target, known


@pytest.mark.parametrize("times", [0.5, 1.0, 1.3])
def test_a_machine_that_became_slower_is_told(replica, tmp_path, capsys, times):
    server, target, _ = replica
    target.times = times
    assert calibrate.speed(server, tmp_path / "results") == 0
    [written] = (tmp_path / "results").glob("*speed.json")
    assert json.loads(written.read_text())["steps_take"] == pytest.approx(times, rel=1e-3)
    told = capsys.readouterr().out
    assert f"steps take {times:.2f} times" in told and ("calibrate again" in told) == (times != 1.0)


@pytest.mark.parametrize("rounds", [1, 2])
def test_each_trial_runs_once_a_round(replica, rounds):
    server, target, _ = replica
    target.requests.clear()
    assert calibrate.steps_take(server, rounds=rounds) == pytest.approx(1.0, rel=1e-3)
    probes = [request for request in target.requests if request.max_tokens == 1]
    assert len(probes) == rounds * step_trials.PROBES


def test_what_was_not_measured_has_no_speed(replica, tmp_path):
    server, _, known = replica
    with pytest.raises(InvalidArgument, match="^engine: must name the replica's engine"):
        calibrate.steps_take(ServerUnderTest(server.url))
    dataclasses.replace(known, source="roofline", reference_s=0.0).save(tmp_path)
    with pytest.raises(InvalidArgument, match="^engine: must have been measured; .* is an estimate"):
        calibrate.steps_take(server)
    (tmp_path / step_model.FILE_NAME).unlink()
    with pytest.raises(NotFound, match="was not calibrated"):
        calibrate.steps_take(server)
    with pytest.raises(EngineFailed, match="no step was measured within"):
        calibrate.middle_s([])


@given(
    seconds=st.lists(st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=4), min_size=1, max_size=4),
    times=st.floats(0.1, 10.0),
)
def test_every_trial_counts_alike(seconds, times):
    def outcomes(factors):
        return [
            Outcome(Trial(n, 32, 0), Point(n, 32.0 * n, 0, factor * one))
            for n, (each, factor) in enumerate(zip(seconds, factors, strict=True), 1)
            for one in each
        ]

    whole = calibrate.middle_s(outcomes([1.0] * len(seconds)))
    for slower in range(len(seconds)):
        factors = [times if n == slower else 1.0 for n in range(len(seconds))]
        assert calibrate.middle_s(outcomes(factors)) == pytest.approx(whole * times ** (1 / len(seconds)))

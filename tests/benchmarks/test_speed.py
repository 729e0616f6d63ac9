"""How fast an engine is beside when it was calibrated, against scripted ones."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import speed, step_trials
from benchmarks.measurement import ServerUnderTest
from benchmarks.step_trials import Outcome, Trial
from benchmarks.target import Target
from contract import manifest as manifests
from contract import step_model
from contract.errors import EngineFailed, InvalidArgument, NotFound
from contract.step_model import Point
from tests.contract.test_step_model import SOME
from tests.fakes.scripted_steps import Scripted, Words, small


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
    monkeypatch.setattr(speed, "EnsembleTarget", lambda url: target)
    monkeypatch.setattr(speed.Prompts, "for_engine", lambda folder: Words())
    server = ServerUnderTest("127.0.0.1:1", None, tmp_path)
    known = dataclasses.replace(SOME, manifest_sha256=digest, machine=step_model.machine_kind())
    known = dataclasses.replace(known, reference_s=speed.reference_s(server, tmp_path, small()))
    known.save(tmp_path)
    return server, target, known


@pytest.mark.parametrize("times", [0.5, 1.0, 1.3])
def test_a_machine_that_became_slower_is_told(replica, tmp_path, capsys, times):
    server, target, _ = replica
    target.times = times
    assert speed.run(server, tmp_path / "results") == 0
    [written] = (tmp_path / "results").glob("*speed.json")
    assert json.loads(written.read_text())["steps_take"] == pytest.approx(times, rel=1e-3)
    told = capsys.readouterr().out
    assert f"steps take {times:.2f} times" in told and ("calibrate again" in told) == (times != 1.0)


@pytest.mark.parametrize("rounds", [1, 2])
def test_each_trial_runs_once_a_round(replica, rounds):
    server, target, _ = replica
    target.requests.clear()
    assert speed.steps_take(server, rounds=rounds) == pytest.approx(1.0, rel=1e-3)
    probes = [request for request in target.requests if request.max_tokens == 1]
    assert len(probes) == rounds * step_trials.PROBES


def test_what_was_not_measured_has_no_speed(replica, tmp_path):
    server, _, known = replica
    with pytest.raises(InvalidArgument, match="^engine: must name the replica's engine"):
        speed.steps_take(ServerUnderTest(server.url))
    dataclasses.replace(known, source="roofline", reference_s=0.0).save(tmp_path)
    with pytest.raises(InvalidArgument, match="^engine: must have been measured; .* is an estimate"):
        speed.steps_take(server)
    (tmp_path / step_model.FILE_NAME).unlink()
    with pytest.raises(NotFound, match="was not calibrated"):
        speed.steps_take(server)
    with pytest.raises(EngineFailed, match="no step was measured within"):
        speed.middle_s([])


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

    whole = speed.middle_s(outcomes([1.0] * len(seconds)))
    for slower in range(len(seconds)):
        factors = [times if n == slower else 1.0 for n in range(len(seconds))]
        assert speed.middle_s(outcomes(factors)) == pytest.approx(whole * times ** (1 / len(seconds)))


def test_the_reference_is_a_few_trials_of_the_design():
    for engine in (small(), small(1, 64, 128, None), small(300, 8192, 4096, 40_000), small(drafts=8), small(4, 8, 64)):
        trials = step_trials.reference(engine)
        assert set(trials) <= set(step_trials.design(engine)) and len(trials) <= 4
        assert not any(trial.drafted for trial in trials)
        decoding = [trial for trial in trials if trial.sequences]
        assert decoding and decoding[-1].sequences == engine.max_batch_size
        assert {trial.prompt for trial in decoding} == {decoding[0].prompt}  # the short one

"""Calibration against a scripted engine: known steps in, the same steps out."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks import calibrate
from benchmarks.calibrate import compared
from benchmarks.measurement import ServerUnderTest
from benchmarks.step_trials import Outcome, Trial
from contract import step_model
from contract.errors import InvalidArgument
from contract.step_model import Point
from tests.contract.test_step_model import SOME
from tests.fakes.scripted_steps import small

KEY = {"manifest_sha256": "a" * 64, "machine": "a machine, 2 cores"}


def test_an_engine_of_too_few_positions_is_refused(tmp_path: Path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    small(longest=48).save(folder)
    with pytest.raises(InvalidArgument, match="engine: must have a max_seq_len of 64 at least .*; tiny has 48"):
        calibrate.run(ServerUnderTest("127.0.0.1:1", None, folder), 1, 1.0, None)


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

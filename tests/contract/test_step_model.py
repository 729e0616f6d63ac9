import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract import manifest, step_model
from contract.errors import EngineFailed, InvalidArgument, NotFound
from contract.step_model import Point, StepModel

SOME = StepModel(
    manifest_sha256="a" * 64,
    machine="a machine, 2 cores",
    source="measured",
    made="2026-11-23T04:00:00+00:00",
    step_s=0.01,
    first_sequence_s=0.0005,
    sequence_s=0.001,
    context_token_s=1e-6,
    prefill_s=0.002,
    prefill_token_s=0.0002,
    prefill_square_s=1e-8,
    request_s=0.004,
)
counts = st.integers(0, 4096)
times = st.floats(0.0, 1.0)


@st.composite
def models(draw):
    terms = {name: draw(times) for name in step_model.TERMS}
    return dataclasses.replace(SOME, **terms | {"step_s": draw(st.floats(1e-6, 1.0))})


@settings(max_examples=30)
@given(models(), counts, counts, counts, counts, st.integers(0, 2))
def test_no_argument_shortens_a_step(model, sequences, context, prefill, more, which):
    arguments = [sequences, context, prefill]
    before = model.seconds(*arguments)
    arguments[which] += more
    assert model.seconds(*arguments) >= before > 0


points = st.builds(Point, st.integers(0, 64), st.integers(0, 50_000), st.integers(0, 512), st.floats(1e-4, 2.0))


@settings(max_examples=15)
@given(st.lists(points, min_size=3, max_size=12))
def test_fit_never_has_a_negative_term(measured):
    terms, p50, p95 = step_model.fit(measured)
    assert min(terms.values()) >= 0 and 0 <= p50 <= p95


@settings(max_examples=10)
@given(models())
def test_fit_finds_the_seconds_of_a_model_from_its_own_steps(model):
    steps = [(n, n * c, p) for n in (1, 4, 8, 16, 64) for c in (32, 900) for p in (0, 64, 400)]
    terms, _, p95 = step_model.fit([Point(*step, model.seconds(*step)) for step in steps])
    assert p95 < 0.1
    found = dataclasses.replace(model, **terms)
    assert found.seconds(32, 32 * 500, 100) == pytest.approx(model.seconds(32, 32 * 500, 100), rel=0.01)


def test_fit_refuses_what_tells_nothing():
    with pytest.raises(InvalidArgument, match="points: must be 3 at least, got 1"):
        step_model.fit([Point(1, 1, 1, 1.0)])
    with pytest.raises(InvalidArgument, match="seconds: must be above 0"):
        step_model.fit([Point(1, 1, 1, 0.0)] * 3)


def test_rates_follow_from_the_seconds_of_a_step():
    assert SOME.decode_tokens_per_s(0, 100) == 0
    assert SOME.decode_tokens_per_s(8, 100) == pytest.approx(8 / SOME.seconds(8, 800, 0))
    whole, parts = SOME.prompt_s(512, 512), SOME.prompt_s(512, 128)
    assert parts == pytest.approx(4 * SOME.seconds(0, 0, 128)) and parts > whole == SOME.seconds(0, 0, 512)
    assert SOME.prompt_s(100, 64, sequences=32, context_tokens=10) == pytest.approx(
        3 * SOME.seconds(32, 320, 32) + SOME.seconds(32, 320, 4)
    )
    assert SOME.prefill_weight(8, 100) == pytest.approx(SOME.prefill_token_s * SOME.decode_tokens_per_s(8, 100))


@settings(max_examples=30)
@given(models(), st.floats(0.0, 3.0), st.integers(1, 256), st.integers(0, 2000), st.floats(0, 10))
def test_the_operating_point_is_the_last_one_within_the_limit(model, limit_s, most, context, prefill):
    n = model.operating_point(limit_s, most, context, prefill)
    assert 0 <= n <= most
    assert n == 0 or model.seconds(n, n * context, n * prefill) <= limit_s
    assert n == most or model.seconds(n + 1, (n + 1) * context, (n + 1) * prefill) > limit_s


def engine(tmp_path, **changes):
    (tmp_path / manifest.FILE_NAME).write_text("{}")
    digest = manifest.sha256_file(tmp_path / manifest.FILE_NAME)
    known = {"manifest_sha256": digest, "machine": step_model.machine_kind()}
    dataclasses.replace(SOME, **known | changes).save(tmp_path)


def test_a_model_is_read_as_it_was_written(tmp_path):
    assert step_model.load(SOME.save(tmp_path)) == SOME and not SOME.estimated
    engine(tmp_path)
    assert step_model.of_engine(tmp_path).step_s == SOME.step_s


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"manifest_sha256": "b" * 64}, "is of another build"),
        ({"machine": "another, 8 cores"}, "was measured on anoth"),
    ],
)
def test_a_model_of_another_build_or_machine_is_refused(tmp_path, changes, problem):
    engine(tmp_path, **changes)
    with pytest.raises(NotFound, match=problem):
        step_model.of_engine(tmp_path)


def test_an_estimate_holds_on_any_machine(tmp_path):
    engine(tmp_path, machine="NVIDIA L40S", source="roofline")
    assert step_model.of_engine(tmp_path).estimated


def test_an_engine_without_a_model_says_how_to_get_one(tmp_path):
    with pytest.raises(NotFound, match=f"benchmarks calibrate --engine {tmp_path.name}"):
        step_model.of_engine(tmp_path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"sequence_s": -1.0}, "sequence_s: must be a finite number from 0, got -1.0"),
        ({"sequence_s": float("nan")}, "sequence_s: must be a finite number from 0, got nan"),
        ({"step_s": "fast"}, "step_s: must be a number, got 'fast'"),
        ({"points": True}, "points: must be a number, got True"),
        ({"machine": 2}, "machine: must be a text, got 2"),
        ({"source": "guessed"}, "source: must be one of measured, published, roofline, got 'guessed'"),
        ({"manifest_sha256": "abc"}, "manifest_sha256: must be 64 hex digits or empty, got 'abc'"),
        ({"format": 2}, "format: must be 1, got 2"),
        ({"speed": 1.0}, "speed: is no field of a step model"),
        ({"made": None}, "made: must be a text"),
        ({"step_s": 0, "sequence_s": 0, "first_sequence_s": 0}, "step_s: or sequence_s must be above 0"),
    ],
)
def test_a_damaged_file_names_the_field(tmp_path, change, problem):
    path = tmp_path / step_model.FILE_NAME
    path.write_text(json.dumps(SOME.to_json() | change))
    with pytest.raises(EngineFailed, match=problem):
        step_model.load(path)


def test_a_file_without_a_field_or_without_json_says_so(tmp_path):
    path, table = tmp_path / step_model.FILE_NAME, SOME.to_json()
    del table["step_s"]
    path.write_text(json.dumps(table))
    with pytest.raises(EngineFailed, match="step_s: is missing"):
        step_model.load(path)
    for text in ("[]", "{", ""):
        path.write_text(text)
        with pytest.raises(EngineFailed, match="step_model.json: "):
            step_model.load(path)


def test_the_kind_of_a_machine_names_its_processor_and_cores():
    assert step_model.processor() and step_model.machine_kind().startswith(f"{step_model.processor()}, ")

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract import manifest, step_model
from contract.errors import EngineFailed, InvalidArgument, NotFound
from contract.scheduling import LEAST_SPEEDUP, TIMED_TOGETHER, UNDRAFTED_FROM
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


@given(models(), counts, counts, counts, counts, st.integers(0, 2))
def test_no_argument_shortens_a_step(model, sequences, context, prefill, more, which):
    arguments = [sequences, context, prefill]
    before = model.seconds(*arguments)
    arguments[which] += more
    assert model.seconds(*arguments) >= before > 0


points = st.builds(Point, st.integers(0, 64), st.integers(0, 50_000), st.integers(0, 512), st.floats(1e-4, 2.0))


@given(st.lists(points, min_size=3, max_size=12))
def test_fit_never_has_a_negative_term(measured):
    terms, p50, p95 = step_model.fit(measured)
    assert min(terms.values()) >= 0 and 0 <= p50 <= p95


@settings(max_examples=10)
@given(models())
def test_fit_finds_the_seconds_of_a_model_from_its_own_steps(model):
    steps = [(n, n * c, p) for n in (1, 4, 8, 16, 64) for c in (32, 900) for p in (0, 64, 150, 400)]
    terms, _, p95 = step_model.fit([Point(*step, model.seconds(*step)) for step in steps])
    assert p95 < 0.1
    found = dataclasses.replace(model, **terms)
    assert found.seconds(32, 32 * 500, 100) == pytest.approx(model.seconds(32, 32 * 500, 100), rel=0.01)


CORES = dataclasses.replace(
    SOME, cores=2, burst_cpu_s=0.001, message_cpu_s=0.001, gateway_burst_cpu_s=0.001, gateway_message_cpu_s=0.0014,
    response_cpu_s=0.0006,
)  # fmt: skip


@given(models(), st.integers(1, 512), counts, st.floats(0.0, 0.01))
def test_tokens_of_short_steps_are_sent_together(model, sequences, context, response_cpu_s):
    model = dataclasses.replace(model, cores=2, burst_cpu_s=0.001, message_cpu_s=0.001, response_cpu_s=response_cpu_s)
    own_s, sent_s = model.engine_s(sequences, context, 0), model.sent_s(sequences)
    step_s = model.seconds(sequences, context, 0)
    window_s = min(0.018 if sequences <= 32 else 0.044, sequences * response_cpu_s / (0.15 * 2))
    assert sent_s == pytest.approx(0.0005 + sequences * 0.0005)
    assert step_s == pytest.approx(own_s + sent_s / max(1.0, window_s / step_s + step_model._PART))
    assert model.seconds(0, 0, 64) == model.engine_s(0, 0, 64)


def test_a_gateway_on_the_machine_makes_steps_longer():
    assert CORES.behind_gateway.seconds(8, 100, 0) > CORES.seconds(8, 100, 0) > SOME.seconds(8, 100, 0)


@given(models(), counts, counts, counts, st.floats(0.5, 2.0))
def test_at_another_pace_all_takes_as_many_times_as_long(model, sequences, context, prefill, pace):
    slower = model.at_pace(pace)
    assert slower.engine_s(sequences, context, prefill) == pytest.approx(
        pace * model.engine_s(sequences, context, prefill)
    )
    assert (slower.request_s, slower.spread, slower.cores) == (pace * SOME.request_s, SOME.spread, SOME.cores)
    assert CORES.at_pace(pace).sent_s(8) == pytest.approx(pace * CORES.sent_s(8))


def test_what_a_server_exports_makes_the_same_steps():
    for model in (SOME, CORES):
        again = StepModel.of_exported("b" * 64, model.exported)
        assert again.seconds(8, 300, 20) == pytest.approx(model.seconds(8, 300, 20))
        assert again.manifest_sha256 == "b" * 64 and not again.estimated


def test_sending_is_fitted_apart_from_the_engine():
    steps = [(n, n * c, p) for n in (1, 4, 8, 16, 64) for c in (32, 900) for p in (0, 64, 400)]
    points = [Point(*step, CORES.seconds(*step)) for step in steps]
    sent_s = [point.seconds - CORES.engine_s(*step) for point, step in zip(points, steps, strict=True)]
    terms, _, p95 = step_model.fit(points, sent_s)
    assert p95 < 0.1 and terms["sequence_s"] == pytest.approx(CORES.sequence_s, rel=0.01)


@settings(max_examples=10)
@given(models(), st.floats(0.001, 0.1))
def test_prompts_alone_meet_an_idle_engine_which_their_terms_do_not_hold(model, idle_s):
    beside = [(n, n * c, p) for n in (1, 4, 8, 64) for c in (32, 900) for p in (0, 64, 150, 400)]
    points = [Point(*step, model.seconds(*step)) for step in beside]
    points += [Point(0, 0, p, model.seconds(0, 0, p) + idle_s) for p in (64, 150, 400)]
    terms, _, p95 = step_model.fit(points)
    assert p95 < 0.1 and terms["idle_s"] == pytest.approx(idle_s, rel=0.05, abs=1e-3)
    found = dataclasses.replace(model, **terms)
    assert found.seconds(16, 500, 100) == pytest.approx(model.seconds(16, 500, 100), rel=0.02)


def test_prompts_measured_alone_only_keep_what_all_of_them_take():
    points = [Point(n, 32 * n, 0, SOME.seconds(n, 32 * n, 0)) for n in (1, 2, 8, 64)]
    points += [Point(0, 0, p, SOME.seconds(0, 0, p)) for p in (64, 150, 400)]
    terms, *_ = step_model.fit(points)
    assert terms["idle_s"] == 0 and terms["prefill_s"] > 0


def test_steps_with_drafts_are_fitted_apart_from_those_without():
    # The second sequence costs more than those after it, as was measured with AVX2.
    longer = {"draft_1_s": 0.009, "draft_2_s": 0.025, "draft_4_s": 0.01, "draft_8_s": 0.001}
    drafting = dataclasses.replace(SOME, **longer)
    work = [(n, n * c, p, 0) for n in (1, 2, 4, 16) for c in (32, 900) for p in (0, 64)]
    work += [(n, n * 64, 0, n) for n in TIMED_TOGETHER]
    steps = [Point(*one[:3], drafting.seconds(*one), one[3]) for one in work]
    terms, _, p95 = step_model.fit(steps)
    assert p95 < 0.1 and {name: terms[name] for name in longer} == pytest.approx(longer, rel=0.01)
    extra_s = [drafting.engine_s(n, 0, 0, n) - SOME.engine_s(n, 0, 0) for n in (1, 2, 3, 4, 6, 8, 9)]
    assert extra_s == pytest.approx([0.009, 0.034, 0.044, 0.054, 0.056, 0.058, 0.059])


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 16))
def test_tokens_of_a_step_follow_the_acceptance(one, other, drafts):
    low, high = sorted((one, other))
    made = step_model.tokens_per_step(low, drafts)
    assert 1 <= made <= step_model.tokens_per_step(high, drafts) <= drafts + 1
    assert step_model.tokens_per_step(low, 0) == 1


def test_drafts_speed_up_by_the_tokens_of_a_step_over_its_longer_time():
    model = dataclasses.replace(SOME, draft_1_s=0.0215, draft_4_s=0.002, draft_tokens=8, acceptance=((1.0,),))
    plain_s = SOME.engine_s(1, 0, 0)
    assert model.drafts_speedup() == pytest.approx(9 * plain_s / (plain_s + 0.0215))
    # Beside others a sequence has three drafts.
    plain_s = SOME.engine_s(4, 0, 0)
    assert model.drafts_speedup(4) == pytest.approx(4 * plain_s / (plain_s + 0.0215 + 2 * 0.002))
    assert SOME.drafts_speedup() == 1 and SOME.drafted_up_to == 0


@given(st.floats(0, 1), st.floats(0, 0.1), st.floats(0, 0.1))
def test_no_more_are_drafted_for_than_that_gains_for(accepted, first_s, others_s):
    terms = {"draft_1_s": first_s, "draft_2_s": others_s, "draft_8_s": others_s, "draft_tokens": 8}
    model = dataclasses.replace(SOME, acceptance=((accepted,),), **terms)
    most = model.drafted_up_to
    assert 0 <= most <= UNDRAFTED_FROM and (not most or model.drafts_speedup(most) >= LEAST_SPEEDUP)
    assert all(model.drafts_speedup(n) < LEAST_SPEEDUP for n in range(most + 1, UNDRAFTED_FROM + 1))


def test_acceptance_is_given_where_the_engine_drafts_and_nowhere_else():
    drafting = dataclasses.replace(SOME, draft_tokens=8, acceptance=((0.5,),))
    assert drafting.of_texts((), "acceptance") == drafting and SOME.of_texts((), "acceptance") == SOME
    assert drafting.of_texts(((0.7,), (0.9,)), "acceptance").acceptance == ((0.7,), (0.9,))
    assert 1 < drafting.tokens_per_step < 2 and SOME.tokens_per_step == 1
    with pytest.raises(InvalidArgument, match=r"pools.a: must be left out: the engine does not draft, got \[\[0.5\]\]"):
        SOME.of_texts(((0.5,),), "pools.a")
    for drafts in (2.5, 10**9):
        with pytest.raises(InvalidArgument, match="draft_tokens: must be a whole number from 0 to 1024, got"):
            dataclasses.replace(SOME, draft_tokens=drafts, acceptance=((0.5,),))
    with pytest.raises(InvalidArgument, match=r"acceptance: must be given, got \[\]"):
        dataclasses.replace(SOME, draft_tokens=8).of_texts((), "acceptance")


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


@given(models(), st.floats(0.0, 3.0), st.integers(1, 256), st.integers(0, 2000), st.floats(0, 10))
def test_the_operating_point_is_the_last_one_within_the_limit(model, limit_s, most, context, prefill):
    n = model.operating_point(limit_s, most, context, prefill)
    assert 0 <= n <= most
    assert n == 0 or model.seconds(n, n * context, n * prefill) <= limit_s
    assert n == most or model.seconds(n + 1, (n + 1) * context, (n + 1) * prefill) > limit_s


def test_the_operating_point_may_be_beyond_the_streams_whose_tokens_wait_least():
    model = dataclasses.replace(CORES, first_sequence_s=0.0, sequence_s=0.0002)
    assert model.seconds(32, 3200, 0) > 0.031 > model.seconds(33, 3300, 0)
    assert model.operating_point(0.031, 64, 100) == max(n for n in range(65) if model.seconds(n, n * 100, 0) <= 0.031)


def engine(tmp_path, **changes):
    (tmp_path / manifest.FILE_NAME).write_text("{}")
    digest = manifest.sha256_file(tmp_path / manifest.FILE_NAME)
    known = {"manifest_sha256": digest, "machine": step_model.machine_kind()}
    dataclasses.replace(SOME, **known | changes).save(tmp_path)


def test_a_model_is_read_as_it_was_written(tmp_path):
    for model in (SOME, dataclasses.replace(SOME, draft_tokens=8, acceptance=((0.25, 1.0), (0.75,)))):
        assert step_model.load(model.save(tmp_path)) == model and not model.estimated
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
        ({"format": 5}, "format: must be 6, got 5"),
        ({"acceptance": "all"}, "acceptance: must be a list of numbers for each text, got 'all'"),
        ({"acceptance": ["all"]}, "acceptance: must be a number, got 'all'"),
        (
            {"acceptance": [0.5, [0.5, 1.5]]},
            r"acceptance: must be 1 to 5 numbers from 0 to 1 for each text, got \[0.5, 1.5\]",
        ),
        ({"acceptance": [[]]}, r"acceptance: must be 1 to 5 numbers from 0 to 1 for each text, got \[\]"),
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

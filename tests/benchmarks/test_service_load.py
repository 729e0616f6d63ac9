import asyncio
import dataclasses
import statistics

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks import service_load
from benchmarks.record import Record
from contract.generation import Timings
from contract.scheduling import UNDRAFTED_FROM
from contract.step_model import Point
from tests.contract.test_step_model import SOME
from tests.fakes.scripted_steps import Scripted, Words, small


@pytest.mark.parametrize("ahead_s", [0.0, 5000.0, -90.0])
def test_steps_in_service_change_the_designed_ones(ahead_s, capsys):
    """Requests in pairs: the first one meets an idle engine and decodes, the second one is read beside it.

    ahead_s: of the clock of the replica's machine.
    """
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
            record.timings = Timings(*(round(1e9 * (instant_s + ahead_s)) for instant_s in instants))
        records += [first, second]
        at_s = second.ended_s + 0.5
    found = service_load.in_service(known, records)
    assert "streams 1 x 1.20; prompts x 1.10, 3.0 ms after a pause, spread 0.00" in capsys.readouterr().out
    assert found.sequence_s == pytest.approx(1.2 * known.sequence_s, rel=1e-3)
    assert found.prefill_token_s == pytest.approx(1.1 * known.prefill_token_s, rel=1e-3)
    assert found.request_s == pytest.approx(0.012, abs=1e-4)
    assert service_load.in_service(known, []) == known


@given(st.dictionaries(st.sampled_from((1, 2, 4, 8)), st.floats(0.6, 1.9), min_size=1))
def test_steps_in_service_are_known_by_how_many_streams_they_have(factors):
    """Those of other numbers of streams are between, or as of the nearest."""
    # Steps of four that take three times as much more than those of two are none that an engine makes; the terms then
    # miss the least factor by 22 %.
    assume(max(factors.values()) <= 2.5 * min(factors.values()))
    records = []
    for streams, factor in factors.items():
        step_s, begin_s = factor * SOME.seconds(streams, streams * 62, 0), 1000.0 * streams
        for _ in range(streams):
            record = Record(len(records), begin_s, begin_s, [(begin_s + n * step_s, 1) for n in range(60)])
            record.input_tokens, record.ended_s, record.finish_reason = 32, begin_s + 59 * step_s, "length"
            record.timings = Timings(0, *(round(1e9 * at_s) for at_s in (begin_s - 0.1, begin_s, record.ended_s)))
            records.append(record)
    found, known = service_load.in_service(SOME, records), [factor for _, factor in sorted(factors.items())]
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
    longer = {name: factor * getattr(model, name) for name in service_load.PROMPTS}
    served = dataclasses.replace(model, **longer)
    work = [(n, 80.0 * n, tokens) for n in (1, 4) for tokens in (20, 60, 90)]
    steps = [Point(*one, served.seconds(*one)) for one in work]
    assert service_load._prompts_factor(model, steps) == pytest.approx(factor, abs=1e-3)
    slower = [Point(32, 2560.0, 60, 1.2 * served.seconds(32, 2560.0, 60))] * many
    few, all_of_them = (service_load._prompts_factor(model, steps + slower[:count]) for count in (3, many))
    assert few == all_of_them


def test_a_step_beside_something_else_of_the_machine_tells_nothing():
    gaps = [(1.1, 1.0)] * 30
    assert service_load._ratio([*gaps, (50.0, 1.0), (90.0, 1.0)]) == pytest.approx(1.1)


def test_steps_with_drafts_in_service_are_known_by_messages_of_several_tokens(capsys):
    model = dataclasses.replace(SOME, draft_1_s=0.008, draft_tokens=8, acceptance=((0.8,),))
    steps_s = 1.3 * model.seconds(1, 32 + 45, 0, 1), 7.0
    record = Record(0, 10.0, 10.0, [(10.0, 1)], input_tokens=32, finish_reason="length")
    for nth in range(60):
        several = nth % 2 == 0
        record.messages.append((record.messages[-1][0] + steps_s[not several], 2 if several else 1))
    record.ended_s = record.messages[-1][0]
    record.timings = Timings(0, *(round(1e9 * at_s) for at_s in (9.9, 10.0, record.ended_s)))
    found = service_load.in_service(model, [record])
    assert "streams 1 x 1.30, with drafts x 1.30;" in capsys.readouterr().out
    assert found.draft_1_s == pytest.approx(0.0104, rel=0.01)


def test_steps_of_more_than_the_model_drafts_for_may_be_drafted_all_the_same(capsys):
    """The engine drafts by what it sees accepted, so that several tokens may be of one step."""
    longer = {"draft_1_s": 0.024, "draft_2_s": 0.009, "draft_4_s": 0.009, "draft_8_s": 0.009}
    model = dataclasses.replace(SOME, **longer, draft_tokens=8, acceptance=((0.9,),))
    few = model.drafted_up_to + 1
    assert 1 < few <= UNDRAFTED_FROM
    records = []
    for streams, gap_s in ((few, 0.3), (16, model.seconds(16, 16 * 77, 0))):
        for _ in range(streams):
            record = Record(0, 100.0 * streams, 100.0 * streams, [(100.0 * streams, 1)], input_tokens=32)
            record.finish_reason = "length"
            for _ in range(60):
                record.messages.append((record.messages[-1][0] + gap_s, 1))
            record.ended_s = record.messages[-1][0] + 1e-3
            instants = (record.sent_s - 0.1, record.sent_s, record.ended_s)
            record.timings = Timings(0, *(round(1e9 * at_s) for at_s in instants))
            records.append(record)
    service_load.in_service(model, records)
    said = capsys.readouterr().out
    assert "streams 16 x " in said and "streams 2 x" not in said and f"{few} x" not in said


def test_loads_are_sent_until_two_in_turn_agree(monkeypatch, capsys):
    """The machine is 1.5 times as slow while it serves the first load."""

    def slower(model, records):
        return dataclasses.replace(model, **{name: records[0].sent_s * value for name, value in model.terms.items()})

    monkeypatch.setattr(service_load, "in_service", slower)
    for times, used, differ in (
        ((1.0, 1.1), 2, "10%"),
        ((1.5, 1.0, 1.05), 3, "5%"),
        ((1.0, 1.5, 1.0, 1.5, 1.0), 4, "41%"),
    ):
        loads = [([Record(0, ratio, ratio)], 0.001 * ratio) for ratio in times]
        sent = iter(loads)
        references = iter([0.9, *times])  # before the first load and after each
        rounds = []
        found = service_load.settled(
            SOME,
            lambda sent=sent: next(sent),
            lambda *count, references=references, rounds=rounds: rounds.append(count) or next(references),
        )
        assert rounds == [()] + [(1,)] * used  # the usual ones: the server may not have met the reference trials before
        assert len(list(sent)) == len(list(references)) == len(times) - used
        around = [0.9, *times][used - 2 : used + 1]  # the two that count
        assert found.reference_s == pytest.approx(statistics.geometric_mean(around))
        assert found.response_cpu_s == pytest.approx(0.001 * (times[used - 2] + times[used - 1]) / 2)
        said = capsys.readouterr().out
        assert f"differ by {differ} at most" in said and ("doubtful" in said) == (differ == "41%")


@pytest.mark.slow  # tokenizes the prompts of all loads
def test_no_load_in_service_sends_a_prompt_of_another_one(monkeypatch):
    """It would be in the prefix cache, and prompts would seem to take no time."""
    for name in ("LEAST_S", "MOST_S"):
        monkeypatch.setattr(service_load, name, 0.05)
    target = Scripted(dataclasses.replace(SOME, step_s=1e-4))
    for _ in range(2):
        sent = service_load.served(target.model, small(), target, Words(), lambda: 0.0)
        records, _ = asyncio.run(sent)
        assert records
    prompts = [request.prompt for request in target.requests]
    assert len(prompts) == len(set(prompts))

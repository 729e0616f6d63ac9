"""Scenario files: what they say, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract.errors import InvalidArgument
from gateway.routing.registrations import MAX_REGISTERED
from simulator.scenario import of, read

ROOT = Path(__file__).resolve().parents[2]
POOLS = {"m": {"step": {"step_s": 0.1}}}
PEOPLE = {"a": {"users": 1}}
FAULT = {"kind": "kill", "at_s": 1.0, "pool": "m"}
WHOLE = {"duration_s": 6.0, "pools": POOLS, "personas": PEOPLE}


def test_files_are_relative_to_the_scenario(tmp_path):
    (tmp_path / "trace.jsonl").write_text('{"at_s": 1}\n')
    (tmp_path / "s.toml").write_text(
        'duration_s = 6\n[gateway]\npolicy = "p.toml"\n[pools.m]\nstep = { step_s = 0.1 }\n'
        '[personas.a]\narrivals = "trace:trace.jsonl,2"\n'
    )
    found = read(tmp_path / "s.toml")
    assert found.gateway.policy == str(tmp_path / "p.toml") and found.name == "s"
    assert found.personas["a"].arrivals.speed == 2


@pytest.mark.parametrize(
    "change, field, problem",
    [
        ({"pools": {}}, "pools", "at least 1 item"),
        ({"pools": {"m": 3}}, "pools.m", "must be a table, got 3"),
        ({"pools": {"m": {"engine": 3}}}, "pools.m.engine", "must be a valid string, got 3"),
        ({"scaling": 3}, "scaling", "must be a table, got 3"),
        ({"personas": {"a": 3}}, "personas.a", "must be a table, got 3"),
        ({"duration_s": "x"}, "duration_s", "must be a valid number, got 'x'"),
        ({"pools": {"m": {"step": {"fixed": 1}}}}, "pools.m.step", "fixed: is no field of a step model"),
        ({"pools": {"m": {"step": {}}}}, "pools.m.step", "step_s: is missing"),
        ({"pools": {"m": {"step": 3}}}, "pools.m.step", "must be a table of a step model's terms, got 3"),
        ({"pools": {"m": {"step": "x"}}}, "pools.m.step", "must be a table of a step model's terms, got 'x'"),
        ({"personas": {"a": {"users": 10**7}}}, "personas.a.users", "less than or equal to 100000, got 10000000"),
        ({"personas": {"a": {"users": 1, "input": "1" + "0" * 9}}}, "personas.a.input", "lengths from 1 to 1,000,000"),
        ({"pools": {"m": {"engine": "no-such"}}}, "pools.m.engine", "there is no engine at"),
        ({"pools": {"m": {}}}, "pools.m.step", "must be set if engine is not, else left out"),
        ({"pools": {"m": {**POOLS["m"], "slot": 1}}}, "pools.m.slot", "is not known: must be one of engine, step, "),
        ({"personas": {"a": {"users": 0}}}, "personas.a.users", "must be greater than or equal to 1, got 0"),
        ({"personas": {"a": {}}}, "personas.a.users", "must be set if arrivals is not, else left out"),
        ({"personas": {"a": {"users": 1, "output": "x"}}}, "personas.a.output", "must be N, lognormal:"),
        ({"personas": {"a": {"arrivals": "often"}}}, "personas.a.arrivals", "must be poisson:RATE, "),
        ({"personas": {"a": {"arrivals": "poisson:1e12"}}}, "personas.a.arrivals", "above 0 and up to 1e+06, got"),
        (
            {"duration_s": 20_000.0, "personas": {"a": {"arrivals": "poisson:1e3"}}},
            "personas.a.arrivals",
            "must be at most 10,000,000 requests in all, got 20,000,000 in 20000 s",
        ),
        ({"interval_s": 1e-9}, "interval_s", "greater than or equal to 0.1, got 1e-09"),
        ({"personas": {"a": {"users": 1, "day": [1.0]}}}, "personas.a.day", "at least 24 items"),
        (
            {"faults": [{"kind": "x", "at_s": 1, "pool": "m"}]},
            "faults.0.kind",
            "must be 'kill', 'hang', 'fail', 'slow', ",
        ),
        ({"faults": [{"kind": "kill", "at_s": 1.0, "pool": "n"}]}, "faults.0.pool", "must be one of the pools m, got"),
        ({"scaling": {"pools": {"n": {}}}}, "scaling.pools", "must be one of the pools m, got 'n'"),
        ({"scaling": {"defaults": {"max_replicas": 0}}}, "scaling.defaults.max_replicas", "greater than or equal to 1"),
        (
            {"pools": {"m": POOLS["m"] | {"replicas": 1001}}},
            "pools.m.replicas",
            "must be at most 1000, 1000 in all pools",
        ),
        (
            {"pools": {"m": POOLS["m"] | {"replicas": 600}, "n": POOLS["m"] | {"replicas": 401}}},
            "pools.n.replicas",
            "must be at most 400, 1000 in all pools, got 401",
        ),
        (
            {"scaling": {"pools": {"m": {"max_replicas": 1001}}}},
            "scaling.pools.m.max_replicas",
            "must be at most 1000, 1000 in all pools, got 1001",
        ),
        (
            {"pools": {"m": POOLS["m"], "n": POOLS["m"]}, "scaling": {"defaults": {"max_replicas": 501}}},
            "scaling.defaults.max_replicas",
            "must be at most 499, 1000 in all pools, got 501",
        ),
        ({"warmup_s": 6.0}, "warmup_s", "must be less than duration_s, got 6"),
        (
            {"faults": [{"kind": "kill", "at_s": 9.0, "pool": "m"}]},
            "faults.0.at_s",
            "must be less than duration_s, got 9",
        ),
        ({"personas": {"a": {"users": 1, "from_s": 9.0}}}, "personas.a.from_s", "must be less than duration_s, got 9"),
        ({"personas": {"a": {"users": 1, "from_s": 3.0, "until_s": 3.0}}}, "personas.a.until_s", "more than from_s"),
        ({"personas": {"a": {"users": 1, "prefix_groups": 2}}}, "personas.a.prefix_tokens", "set with prefix_groups"),
        ({"faults": [FAULT, FAULT | {"replica": 1}]}, "faults.1.replica", "must be less than 1, got 1"),
        ({"faults": [FAULT | {"factor": 2.0}]}, "faults.0.factor", "must be left out, since kind is not slow"),
        ({"changes": [{"at_s": 7.0, "release": "a", "action": "finish"}]}, "changes.0.at_s", "less than duration_s"),
        ({"personas": {"a": {"users": 1, "think_s": float("nan")}}}, "personas.a.think_s", "got nan"),
        ({"personas": {"a": {"users": 1, "day": [float("nan")] * 24}}}, "personas.a.day.0", "got nan"),
        ({"personas": {"a": {"users": 1, "colour": "red"}}}, "personas.a.colour", "is not known: must be one of "),
        ({"pools": {"m": {"step": {"step_s": 10**400}}}}, "pools.m.step", "too large"),
        ({"gateway": {"count": 0}}, "gateway.count", "greater than or equal to 1, got 0"),
        ({"duration_s": 1e9}, "duration_s", "must be less than or equal to 2678400, got 1000000000"),
        ({"pools": {"a;b": POOLS["m"]}}, "pools.a;b", "must match pattern"),
        (
            {"personas": {"a": {"arrivals": "poisson:1", "think_s": 3.0}}},
            "personas.a.think_s",
            "must be left out, since users is not set",
        ),
    ],
)
def test_what_is_wrong_is_named(change: dict, field: str, problem: str):
    with pytest.raises(InvalidArgument) as caught:
        of({**WHOLE, **change}, "s.toml")
    assert caught.value.field == f"s.toml: {field}" and problem in caught.value.problem


def test_as_many_replicas_as_gateways_register_are_allowed():
    most = {"m": POOLS["m"] | {"replicas": 1}, "n": POOLS["m"] | {"replicas": MAX_REGISTERED // 2}}
    half = {"pools": {"m": {"max_replicas": MAX_REGISTERED // 2}, "n": {}}}
    assert of({**WHOLE, "pools": most, "scaling": half}).scaling is not None


def test_a_file_that_a_field_names_is_wrong_by_that_field(tmp_path):
    (tmp_path / "empty").touch()
    for field, kind, problem in (
        ("arrivals", "trace", "must have one request at least"),
        ("input", "histogram", "must have JSON"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            of({**WHOLE, "personas": {"a": {field: f"{kind}:empty"}}}, "s.toml", tmp_path)
        assert caught.value.field == f"s.toml: personas.a.{field}" and caught.value.problem.startswith(problem)
        assert f"got {tmp_path / 'empty'}" in caught.value.problem


@pytest.mark.parametrize("path", sorted((ROOT / "simulator" / "scenarios").glob("*.toml")), ids=lambda path: path.stem)
def test_the_scenarios_that_ship_can_be_read(path):
    if 'engine = "' not in path.read_text():
        assert read(path).personas


def test_acceptance_of_drafts_is_a_number_or_one_for_each_text():
    step = {"step_s": 0.01, "draft_tokens": 8, "acceptance": [0.5]}

    def pool(**given):
        table = {"duration_s": 1.0, "personas": {"all": {"users": 1}}, "pools": {"main": {"step": step, **given}}}
        return of(table).pools["main"].kind.step

    assert pool().acceptance == ((0.5,),) and pool(acceptance=0.7).acceptance == ((0.7,),)
    assert pool(acceptance=[0.2, [0, 1]]).acceptance == ((0.2,), (0.0, 1.0))
    with pytest.raises(InvalidArgument, match=r"pools.main.acceptance: must be left out: the engine does not draft"):
        pool(step={"step_s": 0.01}, acceptance=0.7)
    with pytest.raises(InvalidArgument, match="pools.main.acceptance.0.0: must be less than or equal to 1, got 1.5"):
        pool(acceptance=1.5)


@pytest.mark.parametrize("person", [{"from_s": 2.0}, {"until_s": 4.0}, {}])
def test_a_trace_that_begins_after_its_end_is_refused(tmp_path, person):
    trace, sent_s = tmp_path / "trace.jsonl", 6 - person.get("from_s", 0) if "until_s" not in person else 4
    table = WHOLE | {"personas": {"a": {"arrivals": "trace:trace.jsonl,10", **person}}}
    trace.write_text('{"at_s": 90}\n{"at_s": %s}' % (10 * sent_s))
    with pytest.raises(InvalidArgument) as caught:
        of(table, folder=tmp_path)
    assert caught.value.field == "scenario: personas.a.arrivals"
    assert caught.value.problem == f"must have a request in its {sent_s:g} s, got the first at {sent_s:g} s"
    trace.write_text('{"at_s": 90}\n{"at_s": %s}' % (10 * sent_s - 1))
    assert of(table, folder=tmp_path)


@pytest.mark.parametrize("rows", ['{"at_s": 1, "output_tokens": 9}', '{"at_s": 1}\n{"at_s": 2, "output_tokens": 9}'])
def test_lengths_that_every_request_of_a_trace_has_are_not_taken_from_the_persona(tmp_path, rows):
    (tmp_path / "trace.jsonl").write_text(rows)
    chat = {"arrivals": "trace:trace.jsonl", "input": 7, "output": 3}
    table = WHOLE | {"personas": {"a": chat}}
    if "\n" in rows:
        assert of(table, folder=tmp_path).personas["a"].output.tokens == 3
        return
    with pytest.raises(InvalidArgument, match="personas.a.output: must be left out, since every request of the trace"):
        of(table, folder=tmp_path)

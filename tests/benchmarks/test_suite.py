"""The comparison of a run with the kept one, and the parts as processes of their own."""

import json
import math
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import suite
from benchmarks.suite import PARTS, Figure, Part, plan
from contract.errors import InvalidArgument

ROOT = Path(__file__).resolve().parents[2]


def test_a_figure_regresses_when_it_is_worse_by_more_than_the_rounds_differ():
    before = Figure("lower", [100.0, 104.0, 102.0])
    assert not Figure("lower", [103.0, 106.0, 105.0]).regressed(before)
    assert Figure("lower", [110.0, 113.0, 112.0]).regressed(before)
    assert not Figure("lower", [100.0, 140.0, 112.0]).regressed(before)  # within its own noise
    assert not Figure("lower", [50.0]).regressed(before)
    assert Figure("higher", [90.0]).regressed(Figure("higher", [100.0]))
    assert not Figure("higher", [96.0]).regressed(Figure("higher", [100.0]))


def test_the_worst_and_the_best_outcome_are_compared():
    never, at_once, soon = (Figure("lower", [seconds]) for seconds in (math.inf, 0.0, 0.5))
    assert never.regressed(soon) and never.regressed(at_once) and soon.regressed(at_once)
    assert not never.regressed(never) and not at_once.regressed(at_once)
    assert at_once.worse_by(soon) == soon.worse_by(never) == -1
    nothing, some = Figure("higher", [0.0]), Figure("higher", [100.0])
    assert nothing.regressed(some) and not some.regressed(nothing) and not nothing.regressed(nothing)
    # A round that failed is no noise that would hide it.
    assert Figure("lower", [0.5, math.inf]).regressed(Figure("lower", [0.5, 0.5]))
    assert Figure("higher", [100.0, 0.0]).regressed(Figure("higher", [100.0, 100.0]))


def test_every_part_is_planned_within_an_hour_and_names_differ():
    planned = plan(PARTS, suite.BUDGET_S)
    assert all(rounds is not None for rounds in planned.values()) and len(planned) == len(PARTS)
    assert all(rounds >= 2 for part, rounds in zip(PARTS, planned.values(), strict=True) if part.rounds)


@given(st.floats(0, 5000), st.booleans(), st.floats(1, 3))
def test_a_plan_fits_and_leaves_out_only_what_does_not(left_s, quick, slower):
    planned = plan(PARTS, left_s, quick, slower)
    took_s = sum(part.estimate_s(planned[part.name], quick) for part in PARTS if planned[part.name] is not None)
    assert took_s * slower <= left_s + 1e-6
    for part in PARTS:
        rounds = planned[part.name]
        least_s = part.estimate_s(min(part.rounds, 1), quick) * slower
        assert rounds is not None or least_s > left_s - took_s * slower - 1e-6
        assert rounds is None or rounds <= part.rounds


def test_the_first_parts_get_their_rounds_first():
    parts = (Part("one", "hops", "", 10.0, 10.0, 3), Part("two", "hops", "", 10.0, 10.0, 3))
    assert plan(parts, 70.0) == {"one": 3, "two": 2}
    assert plan(parts, 59.0) == {"one": 2, "two": 1} and plan(parts, 39.0) == {"one": 2, "two": None}
    assert plan((*parts, Part("more", "hops", "", 5.0, 0.0, 0, extra=True)), 64.0) == {"one": 2, "two": 2, "more": None}


def test_half_an_hour_has_every_table_but_the_extras():
    planned = plan(PARTS, 1800.0 - suite.STOP_S - 2, slower=suite.SLACK)
    assert all(planned[part.name] for part in PARTS if not part.extra)
    assert planned["peers-8bit"] == planned["peers-bf16"] == planned["efficiency"] == planned["clients"] == 2


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "BASELINE", tmp_path / "baseline.json")
    monkeypatch.setattr(suite.page, "write", lambda kind, entry: None)
    return tmp_path / "baseline.json"


def _done(out, name, values, better="lower", options="", model="", goals=(), **noted):
    folder = out / name
    folder.mkdir(parents=True)
    table = {"compared": {"µs: x": {"better": better, "values": values}}, "goals": goals}
    (folder / "hops.json").write_text(json.dumps(table))
    command = {"command": f".venv/bin/python -m benchmarks hops{options}", "model": model}
    (folder / "done.json").write_text(json.dumps(command | noted))


def _strictly(path):
    """Read a file that must be JSON, which has no nan and no infinity."""

    def refuse(constant):
        raise AssertionError(f"{path} has {constant}")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_a_regression_is_told_and_fails_the_run(kept, tmp_path, capsys):
    parts = (Part("one", "hops", "", 5.0),)
    _done(tmp_path / "first", "one", [10.0, 10.5])
    assert suite.run([], False, True, tmp_path / "first", parts) == 0
    assert len(json.loads(kept.read_text())) == 1
    _done(tmp_path / "second", "one", [20.0, 20.5])
    assert suite.run([], False, False, tmp_path / "second", parts) == 3
    assert "-98% WORSE" in capsys.readouterr().out
    written = json.loads((tmp_path / "second" / "all.json").read_text())
    assert written["regressed"] == ["one: µs: x"] and not written["failed"]
    (tmp_path / "second" / "one" / "hops.json").write_text(
        json.dumps({"compared": {"µs: y": {"better": "lower", "values": [1.0]}}})
    )
    assert suite.run([], False, False, tmp_path / "second", parts) == 0
    assert "not measured" in capsys.readouterr().out


@pytest.mark.parametrize(("better", "now"), [("higher", 20.0), ("lower", 5.0)])
def test_what_became_twice_as_good_is_better_by_as_much_as_it_would_be_worse(kept, tmp_path, capsys, better, now):
    parts = (Part("one", "hops", "", 5.0),)
    for folder, value in (("first", 10.0), ("second", now)):
        _done(tmp_path / folder, "one", [value], better)
        assert suite.run([], False, True, tmp_path / folder, parts) == 0
    assert "+100%" in capsys.readouterr().out


def test_another_model_or_other_options_are_neither_compared_nor_replace_what_is_kept(kept, tmp_path, capsys):
    parts = (Part("one", "hops", "--engine {model}", 5.0, 5.0, 2, "--streams 8"),)
    _done(tmp_path / "first", "one", [10.0], options=" --engine FOLDER --rounds 1", model="smollm2")
    assert suite.run([], False, True, tmp_path / "first", parts, model="/models/smollm2") == 0
    before = kept.read_text()
    for name, options, quick, model, differs in (
        ("model", "", False, "other", "engine other (kept: smollm2)"),
        ("options", " --streams 8", True, "smollm2", "streams 8 (kept: not set)"),
    ):
        _done(tmp_path / name, "one", [20.0], options=f" --engine FOLDER{options} --rounds 1", model=model)
        assert suite.run([], quick, True, tmp_path / name, parts, model=f"/models/{model}") == 0
        shown = capsys.readouterr().out
        assert f"  not comparable: one: {differs}\n" in shown and "WORSE" not in shown
        assert f"  not kept: one: {differs}; to replace" in shown and kept.read_text() == before
    # The number of rounds is no option: a median of more rounds is of the same load.
    _done(tmp_path / "more", "one", [20.0, 20.5], options=" --engine FOLDER --rounds 2", model="smollm2")
    assert suite.run([], False, False, tmp_path / "more", parts, model="/elsewhere/smollm2") == 3


def test_a_part_that_is_not_run_again_has_the_conditions_that_it_was_measured_under(kept, tmp_path, monkeypatch):
    def command(part, rounds, quick, model, out):
        program = SLOW.replace("time.sleep(60)", "")
        words = ["-c", program, "-m benchmarks one", *(["--quick"] if quick else [])]
        return [sys.executable, *words, "--out", str(out / "one")]

    monkeypatch.setattr(Part, "command", command)
    parts, entries = (Part("one", "hops", "", 0.0),), []
    for commit, quick in (("first", False), ("second", False), ("third", True)):
        monkeypatch.setattr(suite, "_commit", lambda commit=commit: commit)
        assert suite.run([], quick, False, tmp_path, parts, budget_s=60.0) == 0
        entries.append(json.loads((tmp_path / "all.json").read_text())["parts"]["one"])
    assert [entry["commit"] for entry in entries] == ["first", "first", "third"] and entries[0] == entries[1]
    assert [entry["command"].endswith("--quick") for entry in entries] == [False, False, True]
    # Nor does a part have those of a run before one that was cut off.
    noted = tmp_path / "one" / "done.json"
    monkeypatch.setattr(suite, "process", lambda *command, **options: pytest.fail("cut off"))
    with pytest.raises(pytest.fail.Exception):
        suite.run([], False, False, tmp_path, parts, budget_s=60.0)
    assert not noted.exists()


def test_what_failed_is_kept_as_missed_and_regressed(kept, tmp_path, capsys):
    parts, inf = (Part("one", "hops", "", 5.0),), math.inf
    runs = {"soon": (0.5, True), "never": (inf, False), "again": (math.nan, False), "at once": (0.0, True)}
    for name, (seconds, met) in runs.items():
        _done(tmp_path / name, "one", [seconds], goals=[["recovery, s, at most", seconds, 5.0, met]])
        assert suite.run([], False, True, tmp_path / name, parts) == (3 if name == "never" else 0)
        [machine] = _strictly(kept).values()
        value = seconds if math.isfinite(seconds) else None
        assert machine["one"]["figures"]["µs: x"]["values"] == [value]
        assert machine["one"]["goals"] == [["recovery, s, at most", value, 5.0, met]]
        assert _strictly(tmp_path / name / "all.json")["parts"] == machine
    shown = capsys.readouterr().out
    assert "WORSE" in shown and "not measured" not in shown


def test_what_others_disturbed_is_no_regression_and_is_not_kept(kept, tmp_path, capsys):
    parts = (Part("one", "hops", "", 5.0),)
    for name, values, others in (("first", [10.0], 0.0), ("second", [20.0], 0.5), ("third", [20.0], 0.0)):
        _done(tmp_path / name, "one", values, others=others)
    assert suite.run([], False, True, tmp_path / "first", parts) == 0
    assert suite.run([], False, True, tmp_path / "second", parts) == 0
    assert "WORSE, others 50%" in (shown := capsys.readouterr().out) and "not kept: one: others used 50%" in shown
    [machine] = json.loads(kept.read_text()).values()
    assert machine["one"]["figures"]["µs: x"]["values"] == [10.0]
    # Without a sound one it is kept and marked, and nothing regresses from it.
    kept.unlink()
    assert suite.run([], False, True, tmp_path / "second", parts) == 0
    [machine] = json.loads(kept.read_text()).values()
    assert machine["one"]["others"] == 0.5
    assert suite.run([], False, False, tmp_path / "third", parts) == 0


ENTRY = {"when": "", "commit": "", "others": 0.0, "command": "", "model": "", "goals": [], "notes": []}


def _entry(**figure):
    return {"AMD, 2 cores": {"cancel": {**ENTRY, "figures": {"ms: x": figure}}}}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "must be readable JSON, got Expecting property name"),
        ("[]", r"the whole must be an object, got \[\]"),
        ({"AMD, 2 cores": 3}, "AMD, 2 cores must be an object, got 3"),
        ({"AMD, 2 cores": {"cancel": {}}}, "AMD, 2 cores: cancel: when must be text, got None"),
        ({"AMD, 2 cores": {"cancel": ENTRY}}, "cancel: figures must be an object, got None"),
        (_entry(better="most", values=[1.0]), "cancel: ms: x: better must be lower or higher"),
        (_entry(better="lower", values=["fast"]), "cancel: ms: x: values must be a number, got 'fast'"),
        (_entry(better="lower", values=[]), "cancel: ms: x: values must have one at least"),
    ],
)
def test_a_damaged_baseline_is_refused_before_anything_runs(kept, tmp_path, monkeypatch, text, problem):
    monkeypatch.setattr(suite, "process", lambda *command, **options: pytest.fail("it is too late to refuse it"))
    kept.write_text(text if isinstance(text, str) else json.dumps(text))
    with pytest.raises(InvalidArgument, match=rf"^{kept}: .*{problem}"):
        suite.run([], False, False, tmp_path, (Part("one", "hops", "", 0.0),), budget_s=60.0)


def test_a_baseline_that_is_damaged_during_the_run_loses_nothing(kept, tmp_path, monkeypatch):
    _done(tmp_path, "one", [1.0])
    monkeypatch.setattr(suite.report, "on", lambda conditions: kept.write_text("{"))
    with pytest.raises(InvalidArgument, match="must be readable JSON"):
        suite.run([], False, True, tmp_path, (Part("one", "hops", "", 5.0),))
    assert "one" in json.loads((tmp_path / "all.json").read_text())["parts"] and kept.read_text() == "{"


def test_the_kept_baseline_is_sound():
    assert suite._baseline()


def test_what_is_left_out_is_told_with_its_reason_and_a_run_of_nothing_fails(kept, tmp_path, capsys):
    parts = (Part("real", "hops", "--engine {model}", 5.0), Part("long", "hops", "", 60.0, 60.0, 3))
    assert suite.run([], False, False, tmp_path, parts, budget_s=9.9) == 1
    shown = capsys.readouterr().out
    assert (
        "left out: real: needs --model, a folder or pypi:PACKAGE" in shown
        and "left out: long: needs about 125 s, 9 s are left" in shown
    )
    assert set(json.loads((tmp_path / "all.json").read_text())["left_out"]) == {"real", "long"}


def test_options_of_a_part_name_the_model_and_a_quick_run_replaces_some(tmp_path):
    part = Part("p", "peers", "--model {model} --duration 4", 5.0, 5.0, 2, "--duration 1")
    words = part.command(2, True, "/a folder", tmp_path)
    assert words[3:] == [
        *"peers --model".split(),
        "/a folder",
        *"--duration 4 --duration 1 --rounds 2".split(),
        "--out",
    ] + [str(tmp_path / "p")]


# A part in a process of its own: writes its figures, then waits to be ended.
SLOW = """
import json, pathlib, sys, time
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
out.mkdir(exist_ok=True)
(out / "hops.json").write_text(json.dumps({"compared": {"s: x": {"better": "lower", "values": [1.0]}}}))
time.sleep(60)
"""


@pytest.mark.slow
def test_a_part_that_fails_or_takes_too_long_is_told_and_its_figures_count(kept, tmp_path, monkeypatch):
    def command(part, rounds, quick, model, out):
        return [
            sys.executable,
            "-c",
            SLOW if part.name == "late" else "raise SystemExit(1)",
            "--out",
            str(out / part.name),
        ]

    monkeypatch.setattr(Part, "command", command)
    parts = (Part("wrong", "hops", "", 0.0), Part("late", "hops", "", 0.0))
    assert suite.run([], False, True, tmp_path, parts, budget_s=3.0) == 1
    written = json.loads((tmp_path / "all.json").read_text())
    assert written["failed"]["wrong"] == "ended with code 1" and "was ended after" in written["failed"]["late"]
    [machine] = json.loads(kept.read_text()).values()
    assert list(machine) == ["late"] and machine["late"]["notes"] == [written["failed"]["late"]]
    # What did not finish is done again; without another failure the run has not failed.
    assert suite.run(["late"], False, False, tmp_path, parts, budget_s=1.0) == 0


# A process of its own, since the interrupt would end the tests' too.
INTERRUPTED = """
import pathlib, sys
from benchmarks import suite
from benchmarks.suite import Part
folder, program = pathlib.Path(sys.argv[1]), sys.argv[2]
suite.BASELINE, suite.page.write = folder / "baseline.json", lambda kind, entry: None
Part.command = lambda part, rounds, quick, model, out: [sys.executable, "-c", program, "--out", str(out / part.name)]
parts = (Part("one", "hops", "", 0.0), Part("two", "hops", "", 0.0))
sys.exit(suite.run([], False, False, folder, parts, budget_s=60.0))
"""


@pytest.mark.slow
def test_an_interrupted_run_keeps_what_it_has_and_leaves_no_process(tmp_path):
    interrupt = "import os, signal; os.kill(os.getppid(), signal.SIGINT)\n"
    program = SLOW.replace("time.sleep(60)", f"{interrupt}time.sleep(60)")
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path), program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, start_new_session=True)
    assert done.returncode == 130, done.stderr
    written = json.loads((tmp_path / "all.json").read_text())
    assert list(written["parts"]) == ["one"] and written["left_out"] == {"two": "interrupted"}
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path / "one") in (one.info["cmdline"] or [])]

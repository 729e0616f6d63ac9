"""The command line of chaos refuses what would run nothing, and so find nothing."""

import argparse

import pytest

from chaos import __main__, ratchet
from chaos.__main__ import main
from chaos.invariants import Violation
from chaos.scenario import Scenario, parse


@pytest.mark.parametrize("argument", ["--plant=leaked_permits", "--expect=ends,bites"])
def test_a_defect_or_invariant_that_there_is_not_is_refused(argument: str, capsys):
    assert main([argument, "--show"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {argument.partition('=')[0]}: must be of ") and "got " in told


async def test_one_run_of_a_shorter_scenario_serves_all_its_findings(monkeypatch, tmp_path, capsys):
    ran = []

    async def once(script: Scenario, given: object) -> list[Violation]:
        ran.append(str(script))
        return [Violation("ends", ""), Violation("bytes", "")]

    monkeypatch.setattr(__main__, "_once", once)
    monkeypatch.setattr(ratchet, "FOLDER", tmp_path)
    script = parse("at 3 kill.redis redis\nat 4 kill.engine replica-1")
    names = await __main__._findings(script, argparse.Namespace(shrink=6, plant=""))
    assert names == ["ends:none", "bytes:none"] and len(ran) == len(set(ran)) == 3


NUMBERS = ["--count=0", "--limit-s=-1", "--limit-s=nan", "--duration=0.5", "--duration=10.9", "--shrink=-1"]


@pytest.mark.parametrize("argument", NUMBERS)
def test_a_number_that_runs_nothing_is_refused(argument: str, capsys):
    assert main([argument, "--show"]) == 2
    assert f"error: {argument.partition('=')[0]}: must be from " in capsys.readouterr().err

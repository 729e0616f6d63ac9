"""Shrinking, and the list of known findings."""

import pytest

from chaos import ratchet, scenario
from chaos.invariants import Violation
from chaos.scenario import Fault, Scenario
from contract.errors import InvalidArgument

FAULTS = tuple(Fault(float(at), "kill.engine", f"replica-{at % 2 + 1}") for at in range(8))
WHOLE = Scenario(7, 25.0, 5.0, FAULTS)


@pytest.mark.parametrize("culprits", [{FAULTS[3]}, {FAULTS[0], FAULTS[6]}, set()])
async def test_what_remains_is_what_fails(culprits: set[Fault]):
    async def fails(one: Scenario) -> bool:
        return culprits <= set(one.faults)

    assert set((await ratchet.shrink(WHOLE, fails, 60)).faults) == culprits


async def test_the_number_of_runs_is_bounded():
    runs = []

    async def fails(one: Scenario) -> bool:
        runs.append(one)
        return len(one.faults) > 6

    assert len((await ratchet.shrink(WHOLE, fails, 5)).faults) in (7, 8) and len(runs) == 5
    assert await ratchet.shrink(WHOLE, fails, 0) == WHOLE


def test_a_kept_script_can_be_run_again(tmp_path):
    name = ratchet.finding("bytes", FAULTS[:1])
    path = ratchet.keep(name, WHOLE, [Violation("bytes", "one\ntwo")], tmp_path)
    assert scenario.read(path) == WHOLE and path == ratchet.script(name, tmp_path)
    assert "# bytes: one two" in path.read_text()


def test_the_list_may_only_become_shorter():
    listed = {"bytes:kill.engine": "known", "ends:kill.redis": "known"}
    assert ratchet.judge(["bytes:kill.engine"], ["bytes:kill.engine"], listed) == []
    [new] = ratchet.judge(["gauges:none"], [], listed)
    assert new.startswith("new finding gauges:none: mend it")
    [gone] = ratchet.judge([], ["ends:kill.redis"], listed)
    assert gone == "ends:kill.redis no longer occurs: remove it from known.txt"


def test_every_listed_finding_has_a_reason_and_a_script(tmp_path):
    for name in ratchet.known():
        assert scenario.read(ratchet.script(name)).faults
    (tmp_path / "known.txt").write_text("bytes:kill.engine\n")
    with pytest.raises(InvalidArgument, match="a sentence"):
        ratchet.known(tmp_path / "known.txt")

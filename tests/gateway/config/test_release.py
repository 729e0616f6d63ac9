"""Which requests a candidate gets, and what a release in the file may say."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import gate_result
from contract.errors import InvalidArgument
from gateway.config import configuration, release_file
from gateway.config.configuration import Configuration
from gateway.config.pools import Pools
from gateway.config.release import ReleaseRules, takes

START = Pools({"stable": "127.0.0.1:1", "next": "127.0.0.1:2", "other": "127.0.0.1:3"})
RELEASE = "[releases.r]\nstable = 'stable'\ncandidate = 'next'\n"


def read(tmp_path: Path, text: str, pools: Pools = START) -> configuration.Reading:
    path = tmp_path / "gateway.toml"
    path.write_text(text)
    return configuration.read(path, {}, pools)


@given(st.text(min_size=1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1, exclude_max=True))
def test_a_session_at_the_candidate_stays_there_while_the_share_grows(session, one, two, drawn):
    less, more = sorted((one, two))
    assert takes("r", session, more, drawn) or not takes("r", session, less, drawn)
    assert takes("r", session, less, drawn) == takes("r", session, less, 0.5)  # chance has no part in it
    assert takes("r", session, 1.0, drawn) and not takes("r", session, 0.0, drawn)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("by_session", [True, False])
def test_the_candidate_gets_its_share(share, by_session):
    rng, count = random.Random(1), 4000
    taken = sum(takes("r", f"session {n}" if by_session else "", share, rng.random()) for n in range(count))
    assert abs(taken / count - share) <= 4 * (share * (1 - share) / count) ** 0.5


def test_two_releases_do_not_move_the_same_sessions():
    both = sum(takes("a", str(n), 0.5, 0) and takes("b", str(n), 0.5, 0) for n in range(4000))
    assert 850 < both < 1150


def test_a_candidate_has_no_share_of_its_own(tmp_path: Path):
    assert read(tmp_path, RELEASE).pools.shares == {"stable": 1.0, "next": 0.0, "other": 1.0}
    weighed = read(tmp_path, RELEASE + "[pools]\nstable = 3\nother = 1").pools
    assert weighed.shares == {"stable": 3.0, "next": 0.0, "other": 1.0}
    with pytest.raises(InvalidArgument, match="pools.next: must have no weight of its own.*got 5"):
        read(tmp_path, RELEASE + "[pools]\nstable = 3\nother = 1\nnext = 5")


def test_only_what_callers_get_answers_from_counts_as_served():
    rules = ReleaseRules(stable="a", candidate="b", weight=25)
    assert rules.share == rules.served_share == 0.25
    shadow = rules.model_copy(update={"kind": "shadow"})
    assert (shadow.share, shadow.served_share) == (0.25, 0.0)
    assert rules.model_copy(update={"rolled_back": "slow"}).share == 0.0


WRONG = [
    ("stable = 'stable'", "releases.r.candidate: must be set"),
    ("stable = 'stable'\ncandidate = 'stable'", "releases.r: candidate must be another pool than stable"),
    ("stable = 'stable'\ncandidate = 'gone'", "releases.r.candidate: must be one of the pools stable, next, other"),
    ("stable = 'stable'\ncandidate = 'next'\nweight = 101", "releases.r.weight: must be less than or equal"),
    (
        "stable = 'stable'\ncandidate = 'next'\nwieght = 1",
        "releases.r.wieght: is not known: must be one of kind, stable",
    ),
    ("stable = 'stable'\ncandidate = 'next'\nkind = 'red'", "releases.r.kind: must be 'canary', 'blue_green'"),
    (
        "stable = 'stable'\ncandidate = 'next'\nkind = 'blue_green'\nweight = 5",
        "weight must be 0 or 100 for blue_green",
    ),
    (
        "stable = 'stable'\ncandidate = 'next'\nrollback = { x = 1 }",
        "rollback.x: is not known: must be one of automatic",
    ),
    ("stable = 'stable'\ncandidate = 'next'\nrollback = { short_s = 400 }", "short_s must be at most long_s, got 400"),
    ("stable = 'stable'\ncandidate = 'next'\n[releases.s]\nstable = 'next'\ncandidate = 'other'", "which r has too"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_a_release_that_cannot_be_is_refused_by_name(tmp_path: Path, text: str, message: str):
    with pytest.raises(InvalidArgument, match=message):
        read(tmp_path, f"[releases.r]\n{text}")


def test_encoders_have_no_releases(tmp_path: Path):
    with pytest.raises(InvalidArgument, match="releases.r.candidate: must be a pool of a generating model, got 'next'"):
        read(tmp_path, RELEASE, Pools(START.sources, None, frozenset({"next"})))


async def test_a_wrong_release_leaves_the_configuration_as_it_was(tmp_path: Path):
    path = tmp_path / "gateway.toml"
    path.write_text(RELEASE)
    held = Configuration(path, {}, START)
    path.write_text(RELEASE + "weight = -1")
    await held.reload()
    assert held.policy.releases["r"].weight == 0 and "weight" in held.problem


SHA = "a" * 64
GATED = RELEASE + "gate = 'next.json'\n"


def gate_file(tmp_path: Path, verdict: str = "pass", manifest: str = SHA) -> Path:
    path = tmp_path / "next.json"
    table = {"verdict": verdict, "reasons": ["quality: -0.2"], "candidate": {"manifest_sha256": manifest}}
    path.write_text(gate_result.sealed(table))
    return path


@pytest.mark.parametrize("weight", [0, 5, 6, 100])
@pytest.mark.parametrize("verdict", ["pass", "fail", "undecided", None])
def test_a_candidate_gets_more_than_5_percent_once_its_gate_has_passed(tmp_path: Path, weight, verdict):
    if verdict:
        gate_file(tmp_path, verdict)
    text = GATED + f"weight = {weight}\n"
    if weight <= 5 or verdict == "pass":
        assert read(tmp_path, text).policy.releases["r"].weight == weight
        return
    said = f"next.json says {verdict}: quality: -0.2" if verdict else "next.json: must be a file that"
    with pytest.raises(
        InvalidArgument, match=f"releases.r.gate: must be of a gate that passed .* not {weight}%.*{said}"
    ):
        read(tmp_path, text)
    assert read(tmp_path, text + "kind = 'shadow'\n").policy.releases, "no caller gets a shadow's answers"
    assert read(tmp_path, text + "rolled_back = 'by an operator'\n").policy.releases


def test_a_gate_is_of_the_candidates_engine_and_was_not_edited(tmp_path: Path):
    path = gate_file(tmp_path)
    text = GATED + f"weight = 50\ncandidate_sha256 = '{SHA}'\n"
    assert read(tmp_path, text).policy.releases
    with pytest.raises(
        InvalidArgument, match="gate: must be of the engine bbbbbbbbbbbb…, got aaaaaaaaaaaa… in next.json"
    ):
        read(tmp_path, text.replace(SHA, "b" * 64))
    path.write_text(path.read_text().replace("pass", "fail").replace("quality", "speed"))
    with pytest.raises(InvalidArgument, match="next.json: must be unchanged and of format 1"):
        read(tmp_path, text)
    with pytest.raises(InvalidArgument, match="candidate_sha256 must stand beside gate, got no gate"):
        read(tmp_path, RELEASE + f"candidate_sha256 = '{SHA}'")


def test_a_shift_past_5_percent_is_refused_and_changes_nothing(tmp_path: Path):
    path = tmp_path / "gateway.toml"
    path.write_text(GATED + "weight = 5\n")
    check = Configuration(path, {}, START).check
    with pytest.raises(InvalidArgument, match="releases.r.gate: must be of a gate that passed"):
        release_file.apply(path, "shift", "r", {"to": 25}, check)
    assert path.read_text() == GATED + "weight = 5\n"
    gate_file(tmp_path)
    assert release_file.apply(path, "shift", "r", {"to": 25}, check).weight == 25

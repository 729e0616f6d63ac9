"""Which requests a candidate gets, and what a release in the file may say."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import InvalidArgument
from gateway.config import configuration
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
    ("stable = 'stable'", "releases.r.candidate: is missing"),
    ("stable = 'stable'\ncandidate = 'stable'", "releases.r: candidate must be another pool than stable"),
    ("stable = 'stable'\ncandidate = 'gone'", "releases.r.candidate: must be one of the pools stable, next, other"),
    ("stable = 'stable'\ncandidate = 'next'\nweight = 101", "releases.r.weight: input should be less than or equal"),
    (
        "stable = 'stable'\ncandidate = 'next'\nwieght = 1",
        "releases.r.wieght: is not known: must be one of kind, stable",
    ),
    ("stable = 'stable'\ncandidate = 'next'\nkind = 'red'", "releases.r.kind: input should be 'canary', 'blue_green'"),
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

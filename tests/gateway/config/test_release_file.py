"""Changes of releases in the file: whole, kept apart from each other, and refused by name."""

from __future__ import annotations

import concurrent.futures
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import toml_table
from contract.errors import InvalidArgument, NotFound
from gateway.config import policy, release_file

TEXT = """# the head
[pools]  # shares
stable = 1

# the only model
[models.small]
pools = ["stable"]
"""
NEW = {"stable": "stable", "candidate": "next", "weight": 5}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "gateway.toml"
    made.write_text(TEXT)
    return made


def releases(path: Path) -> dict:
    return policy.read(str(path), {"releases": toml_table.read(path).get("releases", {})}, {}).releases


def test_a_release_starts_moves_ends_and_begins_again_and_the_rest_of_the_file_stays(path: Path):
    started = release_file.apply(path, "start", "r", NEW).started
    assert path.read_text().startswith(TEXT)
    assert release_file.apply(path, "shift", "r", {"to": 25}).weight == 25
    assert release_file.apply(path, "rollback", "r", {"reason": "errors"}).rolled_back == "errors"
    assert release_file.apply(path, "rollback", "r", {"reason": "again"}).rolled_back == "errors"
    with pytest.raises(InvalidArgument, match=r"releases.r: was rolled back \(errors\); start it again first"):
        release_file.apply(path, "shift", "r", {"to": 50})
    again = release_file.apply(path, "start", "r", {})
    assert again.rolled_back == "" and again.weight == 25 and again.started > started
    assert path.read_text().startswith(TEXT) and releases(path) == {"r": again}


def test_a_finished_release_has_its_candidate_in_the_stable_pools_place(path: Path):
    path.write_text(TEXT + '[orgs.acme]\npool = "stable"\n[overflow.own]\npool = "stable"\n[shadow]\npool = "other"\n')
    path.write_text(path.read_text() + '[models.large]\npools = "stable"\n')
    release_file.apply(path, "start", "r", {**NEW, "weight": 50})
    with pytest.raises(InvalidArgument, match=r"releases.r: must have all requests at its candidate"):
        release_file.apply(path, "finish", "r", {})
    release_file.apply(path, "shift", "r", {"to": 100})
    shares = {"stable": 1.0, "next": 0.0, "other": 2.0}
    assert release_file.apply(path, "finish", "r", {}, shares=shares).candidate == "next"
    found = toml_table.read(path)
    assert found["pools"] == {"stable": 0.0, "next": 1.0, "other": 2.0} and "releases" not in found
    assert found["models"]["small"]["pools"] == ["next"] and found["overflow"]["own"]["pool"] == "next"
    assert found["models"]["large"]["pools"] == "next"
    assert found["orgs"]["acme"]["pool"] == "next" and found["shadow"]["pool"] == "other"
    assert path.read_text().startswith("# the head\n[pools]  # shares\n")
    with pytest.raises(NotFound):
        release_file.apply(path, "finish", "r", {})
    release_file.apply(path, "start", "back", {"stable": "next", "candidate": "stable", "weight": 100})


def test_a_shadow_and_what_was_rolled_back_are_not_finished(path: Path):
    release_file.apply(path, "start", "r", {**NEW, "kind": "shadow", "weight": 100})
    with pytest.raises(InvalidArgument, match="releases.r"):
        release_file.apply(path, "finish", "r", {})
    release_file.apply(path, "start", "r", {"kind": "canary"})
    release_file.apply(path, "rollback", "r", {})
    with pytest.raises(InvalidArgument, match="releases.r"):
        release_file.apply(path, "finish", "r", {})


def test_limits_that_a_new_start_does_not_name_stay(path: Path):
    release_file.apply(path, "start", "r", {**NEW, "rollback": {"errors": 0.5}})
    rules = release_file.apply(path, "start", "r", {"rollback": {"automatic": False}})
    assert (rules.rollback.errors, rules.rollback.automatic) == (0.5, False)
    with pytest.raises(InvalidArgument, match="releases.r.rollback: must be"):
        release_file.apply(path, "start", "r", {"rollback": 5})


@pytest.mark.parametrize(
    "text",
    [
        'releases = { "v1.2" = { stable = "stable", candidate = "next" } }\n',
        '[releases]\n"v1.2" = { stable = "stable", candidate = "next" }  # inline\n[prices]\nreplica_hour = 1\n',
        '[releases."v1.2"]\r\nstable = "stable"\r\ncandidate = "next" # mine\r\nrollback.errors = 0.5\r\n',
        '[releases."v1.2"]\nstable = "stable"\ncandidate = "next"\n[releases."v1.2".rollback] # mine\nerrors = 0.5\n',
        '[releases]\n"v1.2".stable = "stable"\n"v1.2".candidate = "next"\n',
    ],
)
def test_a_release_in_any_form_of_toml_is_changed(path: Path, text: str):
    path.write_bytes(text.encode())
    before = releases(path)["v1.2"]
    assert release_file.apply(path, "shift", "v1.2", {"to": 25}) == releases(path)["v1.2"]
    assert releases(path)["v1.2"] == before.model_copy(update={"weight": 25})
    release_file.apply(path, "start", "other", {"stable": "a", "candidate": "b"})
    assert len(releases(path)) == 2 and path.read_bytes().count(b"# ") == text.count("# ")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_the_file_stays_its_owners_when_root_changes_it(path: Path):
    os.chown(path, 1000, 1001)
    path.chmod(0o640)
    release_file.apply(path, "start", "r", NEW)
    found = path.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (1000, 1001, 0o640)


def test_the_files_mode_and_a_link_to_it_stay(path: Path, tmp_path: Path):
    path.chmod(0o640)
    link = tmp_path / "link.toml"
    link.symlink_to(path)
    release_file.apply(link, "start", "r", NEW)
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o640 and "r" in releases(path)
    assert sorted(os.listdir(tmp_path)) == ["gateway.toml", "link.toml"]


WRONG = [
    ("shift", "gone", {"to": 5}, NotFound, "there is no release 'gone'"),
    ("rollback", "gone", {}, NotFound, "there is no release 'gone'"),
    ("rollback", "r", {"reason": "x" * 501}, InvalidArgument, "^reason: must be a text of at most 500 characters"),
    ("rollback", "r", {"reason": 5}, InvalidArgument, "^reason: must be a text of at most 500 characters, got 5"),
    ("shift", "r", {}, InvalidArgument, "releases.r.weight: must be a valid number"),
    ("shift", "r", {"to": 101}, InvalidArgument, "releases.r.weight: must be less than or equal to 100"),
    ("shift", "r", {"to": True}, InvalidArgument, "releases.r.weight: must be a valid number"),
    ("shift", "r", {"to": float("nan")}, InvalidArgument, "releases.r.weight: must be less than"),
    ("shift", "r", {"weight": 5}, InvalidArgument, "weight: is not known: must be one of to"),
    ("start", "r", {"started": "now"}, InvalidArgument, "started: is not known: must be one of candidate, "),
    ("start", "new", {"stable": "stable"}, InvalidArgument, "releases.new.candidate: must be set"),
    ("start", "new", NEW, InvalidArgument, "releases.new.stable: must be a pool of one release"),
    ("start", "a b", {"stable": "a", "candidate": "b"}, InvalidArgument, "releases.a b: "),
    ("stop", "r", {}, InvalidArgument, "action: must be one of start, shift, rollback, finish, got 'stop'"),
]


@pytest.mark.parametrize(("action", "name", "fields", "kind", "message"), WRONG)
def test_what_cannot_be_is_refused_and_changes_nothing(path: Path, action, name, fields, kind, message):
    release_file.apply(path, "start", "r", NEW)
    before = path.read_text()
    with pytest.raises(kind, match=message):
        release_file.apply(path, action, name, fields)
    assert path.read_text() == before


def test_a_file_that_cannot_be_read_or_written_is_named(path: Path, tmp_path: Path):
    with pytest.raises(InvalidArgument, match="gone.toml: cannot be changed: No such file"):
        release_file.apply(tmp_path / "gone.toml", "start", "r", NEW)
    path.write_text("[")
    with pytest.raises(InvalidArgument, match="cannot be read as TOML"):
        release_file.apply(path, "start", "r", NEW)


def test_what_killed_writers_left_does_not_pile_up(path: Path, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda *names: None)  # as if killed just before
    for weight in (1, 2, 3):
        release_file.apply(path, "start", "r", {**NEW, "weight": weight})
    monkeypatch.undo()
    left = [file for file in path.parent.iterdir() if file != path]
    assert len(left) == 1
    release_file.apply(path, "start", "r", NEW)
    assert [*path.parent.iterdir()] == [path] and releases(path)["r"].weight == 5


def test_writers_at_once_lose_nothing(path: Path):
    def start(number: int) -> None:
        release_file.apply(path, "start", f"r{number}", {"stable": f"s{number}", "candidate": f"c{number}"})

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(start, range(16)))
    assert len(releases(path)) == 16


@given(weights=st.lists(st.floats(0, 100), max_size=3), kind=st.sampled_from(["canary", "shadow"]))
def test_what_is_written_is_what_is_read(tmp_path_factory, weights, kind):
    path = tmp_path_factory.mktemp("file") / "gateway.toml"
    path.write_text("")
    written = release_file.apply(path, "start", "r", {**NEW, "kind": kind, "rollback": {"errors": 0.5}})
    for weight in weights:
        written = release_file.apply(path, "shift", "r", {"to": weight})
    assert releases(path) == {"r": written}

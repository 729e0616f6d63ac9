"""Samples on disk: bounds hold, a deletion leaves no byte, and a killed process leaves what can be read."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import InvalidArgument
from gateway.config.samples import SampleRules
from gateway.samples.store import HELD, KEPT, MAX_CHANGES, SampleStore, new_key

RULES = SampleRules(keep=["down"], bytes=64 * 1024, hold_bytes=64 * 1024, sample_characters=1024, days=1)
NOW = time.time() + 900  # after whatever a test deletes


def sample(request_id: str, text: str = "a secret", time_s: float = NOW, choice: int = 0) -> dict:
    return {
        "tenant": "t",
        "request_id": request_id,
        "choice": choice,
        "time": time_s,
        "output": text,
        "reasons": ["length"],
    }


def rating(request_id: str, rating: str = "down", choice: int | None = None, **more) -> dict:
    return {"request_id": request_id, "choice": choice, "rating": rating, "time": time.time(), "comment": "", **more}


def everything(folder: Path) -> bytes:
    return b"".join(path.read_bytes() + str(path).encode() for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def keys(tmp_path) -> Path:
    path = tmp_path / "keys"
    path.write_text(new_key() + "\n")
    return path


@pytest.fixture
def store(tmp_path) -> SampleStore:
    return SampleStore(tmp_path / "samples", None)


def test_encrypted_samples_show_nothing_and_survive_a_rotation_of_keys(tmp_path, keys):
    folder, old = tmp_path / "samples", keys.read_text()
    SampleStore(folder, keys).append("acme/in", KEPT, [sample("one")], RULES)
    assert b"secret" not in everything(folder)
    keys.write_text(new_key() + "\n" + old)
    rotated = SampleStore(folder, keys)
    rotated.append("acme/in", KEPT, [sample("two")], RULES)
    assert [found["request_id"] for found in rotated.samples("acme/in")] == ["one", "two"]
    keys.write_text(keys.read_text().splitlines()[0])  # the old key is gone, and what it encrypted
    assert [found["request_id"] for found in SampleStore(folder, keys).samples("acme/in")] == ["two"]
    assert list(SampleStore(folder, None).samples("acme/in")) == []


@pytest.mark.parametrize("content", ["", "short\n", "x" * 44])
def test_a_file_without_keys_is_refused(tmp_path, content):
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(InvalidArgument, match="TRIDENT_GATEWAY_SAMPLES_KEYS: must be a file of keys"):
        SampleStore(tmp_path / "samples", path)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="TRIDENT_GATEWAY_SAMPLES: must be a folder to write to"):
        SampleStore(tmp_path / "file", None)


def test_a_folder_that_was_removed_is_made_again(store):
    store.append("a", KEPT, [sample("one")], RULES)
    shutil.rmtree(store.folder)
    assert list(store.samples("a")) == [] and store.append("a", KEPT, [sample("two")], RULES) == 0
    assert [found["request_id"] for found in store.samples("a")] == ["two"]


def test_files_of_other_names_are_left_alone(store):
    store.append("a", KEPT, [sample("one")], RULES)
    [own] = store._files("a", KEPT)
    for name in ("export.jsonl", f"copy-of-{own.name}", f"{own.stem}.bak.jsonl"):
        (own.parent / name).write_text("x" * RULES.bytes)
    assert store.append("a", KEPT, [sample("two")], RULES) == 0
    assert {found["request_id"] for found in store.samples("a")} == {"one", "two"}
    store.purge(RULES, NOW + 10 * 86_400)
    assert not own.exists() and len(list(own.parent.iterdir())) == 3


def test_others_of_the_machine_cannot_read(store):
    store.append("acme/in", KEPT, [sample("one")], RULES)
    for path in store.folder.rglob("*"):
        if path.suffix == ".jsonl":
            assert path.stat().st_mode & 0o077 == 0, path


def test_a_deletion_leaves_no_byte_and_holds_for_requests_under_way(store):
    for tenant in ("acme/in", "acme/in2", "../x", ".."):
        for kind in (KEPT, HELD):
            store.append(
                tenant, kind, [sample(f"id-{n}", f"text of {tenant}", NOW - n * 4000) for n in range(5)], RULES
            )
    store.rate("acme/in", rating("id-0", comment="a comment"), RULES)
    assert store.delete("acme/in") > 0
    left = everything(store.folder)
    assert b"text of acme/in," not in left and b'text of acme/in"' not in left and b"a comment" not in left
    assert all(path.is_relative_to(store.folder) for path in store.folder.parent.rglob("*") if path.suffix == ".jsonl")
    assert store.append("acme/in", KEPT, [sample("late", time_s=time.time() - 5)], RULES) == 1
    assert list(store.samples("acme/in")) == [] and store.rate("acme/in", rating("id-1"), RULES) is None
    assert store.append("acme/in", KEPT, [sample("later")], RULES) == 0
    assert {found["output"] for found in store.samples("..")} == {"text of .."}
    assert store.tenants() == ["..", "../x", "acme/in", "acme/in2"]


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from("ab"), st.sampled_from((KEPT, HELD)), st.integers(1, 12)),
        st.tuples(st.just("rate"), st.sampled_from("ab"), st.sampled_from(("up", "down")), st.integers(0, 30)),
        st.tuples(st.just("delete"), st.sampled_from("ab")),
        st.tuples(st.just("wait"), st.integers(1, 30)),
    ),
    max_size=14,
)


@given(steps=_STEPS)
def test_bounds_and_deletions_hold_after_any_steps(tmp_path_factory, steps):
    store = SampleStore(tmp_path_factory.mktemp("samples"), None)
    now_s, written, gone = NOW, dict[str, tuple[str, float, str]](), set[str]()
    for step, *values in steps:
        if step == "append":
            tenant, kind, count = values
            added = [sample(f"id-{len(written) + n}-", "x" * 1000, now_s) for n in range(count)]
            store.append(tenant, kind, added, RULES)
            written |= {one["request_id"]: (tenant, now_s, kind) for one in added}
        elif step == "rate":
            tenant, rated, number = values
            store.rate(tenant, rating(f"id-{number}-", rated), RULES)
        elif step == "delete":
            store.delete(values[0])
            gone |= {name for name, (tenant, *_) in written.items() if tenant == values[0]}
        else:
            now_s += values[0] * 3600
            store.purge(RULES, now_s)
            ages = {KEPT: 86_400, HELD: RULES.hold_s}
            gone |= {name for name, (_, time_s, kind) in written.items() if time_s + ages[kind] <= now_s}
        left = everything(store.folder)
        assert not [name for name in gone if name.encode() in left]
        for tenant in "ab":
            for kind in (KEPT, HELD):
                assert sum(path.stat().st_size for path in store._files(tenant, kind)) <= 64 * 1024
            assert {found["request_id"] for found in store.samples(tenant)} <= {
                name for name, (owner, *_) in written.items() if owner == tenant
            }
    if not gone and len(written) < 30:
        shown = [found["request_id"] for tenant in "ab" for found in store.samples(tenant)]
        assert {name for name, (*_, kind) in written.items() if kind == KEPT} <= set(shown)
        assert len(shown) == len(set(shown))


def test_the_oldest_samples_make_room_for_new_ones(store):
    for number in range(200):
        store.append("a", KEPT, [sample(f"id-{number}", "x" * 1000, NOW + number * 60)], RULES)
    numbers = [int(found["request_id"].removeprefix("id-")) for found in store.samples("a")]
    assert numbers == list(range(numbers[0], 200)) and 40 < len(numbers) < 64


def test_a_killed_deletion_stops_nothing(store):
    store.delete("a")
    (store._home("a") / "deleted").write_text("")
    assert store.append("a", KEPT, [sample("one", time_s=time.time() + 1)], RULES) == 0


def test_many_samples_at_once_are_written_within_the_bound(store):
    store.append("a", KEPT, [sample(f"id-{number}", "x" * 1000) for number in range(200)], RULES)
    assert sum(path.stat().st_size for path in store._files("a", KEPT)) <= RULES.bytes
    numbers = [int(found["request_id"].removeprefix("id-")) for found in store.samples("a")]
    assert numbers == list(range(numbers[0], 200)) and 40 < len(numbers) < 64


def test_a_rating_keeps_a_held_request_and_the_latest_one_counts(store):
    store.append("a", HELD, [sample("one", choice=0), sample("one", choice=1)], RULES)
    first = store.rate("a", rating("one", "up"), RULES)
    assert store.rate("a", rating("one", "up"), RULES) == first  # with its own time
    assert list(store.samples("a")) == [] and store.rate("b", rating("one"), RULES) is None
    assert store.rate("a", rating("one", choice=2), RULES) is None
    store.rate("a", rating("one", choice=1), RULES)
    [kept] = store.samples("a")
    assert kept["choice"] == 1 and kept["feedback"]["rating"] == "down" and kept["reasons"] == ["length", "down"]
    for number in range(MAX_CHANGES - 1):
        store.rate("a", rating("one", choice=1, comment=str(number)), RULES)
    with pytest.raises(InvalidArgument, match="fewer than 20 ratings"):
        store.rate("a", rating("one", choice=1, comment="once more"), RULES)


@pytest.mark.parametrize("kinds", [(KEPT, HELD), (HELD, KEPT), (KEPT, KEPT), (HELD, HELD)])
@pytest.mark.parametrize("later_s", [0.0, 0.5])
def test_a_rating_of_all_choices_reaches_those_of_other_files(store, kinds, later_s):
    hour_s = NOW // 3600 * 3600 + 3600
    for choice, kind in enumerate(kinds):
        store.append("a", kind, [sample("one", choice=choice, time_s=hour_s + (choice - 0.5) * later_s)], RULES)
    assert store.rate("a", rating("one", "up"), RULES)
    assert {one["choice"]: one["feedback"]["rating"] for one in store.samples("a")} == {
        choice: "up" for choice, kind in enumerate(kinds) if kind == KEPT
    }
    first = store.rate("a", rating("one"), RULES)
    for _ in range(2):
        assert sorted((one["choice"], one["feedback"]["rating"]) for one in store.samples("a")) == [
            (0, "down"),
            (1, "down"),
        ]
        assert store.rate("a", rating("one"), RULES) == first


def test_a_rating_that_is_refused_changes_no_file(store):
    hour_s = NOW // 3600 * 3600 + 3600
    store.append("a", KEPT, [sample("one", choice=0, time_s=hour_s + 0.1)], RULES)
    store.append("a", KEPT, [sample("one", choice=1, time_s=hour_s - 0.1)], RULES)
    for number in range(MAX_CHANGES):
        store.rate("a", rating("one", choice=1, comment=str(number)), RULES)
    with pytest.raises(InvalidArgument, match="fewer than 20 ratings"):
        store.rate("a", rating("one"), RULES)
    assert ["feedback" in one for one in store.samples("a")] == [True, False]


WRITER = """
import sys, time
from pathlib import Path
from gateway.samples.store import KEPT, SampleStore
from tests.gateway.samples.test_store import RULES, sample
store, number = SampleStore(Path(sys.argv[1]), None), 0
while True:
    added = sample(f"{sys.argv[2]}-{number}", "x" * 300, float(sys.argv[3]))
    store.append("a", KEPT, [added], RULES.model_copy(update={"bytes": 2**30}))
    number += 1
    if number == 20:
        print("ready", flush=True)
"""


@pytest.mark.slow
def test_several_processes_write_together_and_kill_9_leaves_what_can_be_read(store):
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", WRITER, str(store.folder)]
    # One time for all processes, which may import this module in different hours: a file holds an hour.
    writers = [
        subprocess.Popen([*command, str(n), str(NOW)], cwd=root, stdout=subprocess.PIPE, text=True) for n in range(3)
    ]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    for writer in writers:
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
    [path] = store._files("a", KEPT)
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])  # as a full disk or a kill in the middle of a write leaves it
    store.append("a", KEPT, [sample("after")], RULES.model_copy(update={"bytes": 2**30}))
    names = [found["request_id"] for found in store.samples("a")]
    assert names[-1] == "after" and len(names) == len(set(names)) == whole.count(b"\n")
    for writer in range(3):
        own = [int(name.partition("-")[2]) for name in names if name.startswith(f"{writer}-")]
        assert own == list(range(len(own))) and len(own) >= 19

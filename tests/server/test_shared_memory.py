"""Files in /dev/shm: which are removed, and how large they may be; paths as a shell gets them."""

import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import Unavailable
from server import shared_memory
from server.shared_memory import SHELL_SAFE, shell_safe

UNSAFE_NAMES = [
    "a b",
    "it's",
    'say "x"',
    "$HOME",
    "(x)",
    "a&b",
    "a;b",
    "a|b",
    "*",
    "~x",
    "`id`",
    "a\nb",
    "ä",
    "#x",
    "a\\b",
    "!x",
]


def test_only_files_of_the_prefix_are_removed(tmp_path):
    for name in ("trident_8001_7_a", "trident_8001_9_b", "trident_80011_7_c", "other"):
        (tmp_path / name).touch()
    shared_memory.clean(shared_memory.prefix(8001, 7), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "trident_80011_7_c", "trident_8001_9_b"]
    shared_memory.clean(shared_memory.port_prefix(8001), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "trident_80011_7_c"]


@given(st.integers(1, 64), st.integers(0, 1 << 40))
def test_all_regions_leave_a_reserve_and_are_large_enough_or_are_refused(stubs, free):
    try:
        each = shared_memory.region_bytes(stubs, free)
    except Unavailable as error:
        assert free * 7 // 8 < stubs * shared_memory.MIN_BYTES
        assert f"/dev/shm has {free // shared_memory.MIB} MiB free" in str(error)
        assert "--shm-size=256m for each engine" in str(error)
        return
    assert shared_memory.MIN_BYTES <= each <= shared_memory.MAX_BYTES
    assert stubs * each <= free * 7 // 8


def test_a_container_with_64_mib_is_enough_for_the_ensembles_four_stubs():
    assert shared_memory.region_bytes(4, 64 * shared_memory.MIB) == 14 * shared_memory.MIB
    assert shared_memory.region_bytes(4, 1 << 34) == shared_memory.MAX_BYTES


def test_the_least_for_one_engine_and_what_is_recommended_for_each_of_several_suffice():
    least = 46 * shared_memory.MIB  # docs/operations.md
    assert shared_memory.region_bytes(5, least) == shared_memory.MIN_BYTES
    with pytest.raises(Unavailable, match="5 Python processes need 46 MiB"):
        shared_memory.region_bytes(5, least - shared_memory.MIB)
    for engines in (1, 2, 8):
        free = engines * 256 * shared_memory.MIB
        for _ in range(engines):
            free -= 5 * shared_memory.region_bytes(5, free)


def test_a_missing_folder_has_no_free_bytes(tmp_path):
    assert shared_memory.free_bytes(tmp_path / "none") == 0 < shared_memory.free_bytes(tmp_path)


def test_a_shell_safe_path_is_returned_unchanged(tmp_path):
    assert shell_safe(Path("/opt/trident-1.0/model_repository"), "models", "trident_1_2_", tmp_path) == Path(
        "/opt/trident-1.0/model_repository"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", UNSAFE_NAMES)
def test_a_path_with_metacharacters_is_linked_and_the_link_is_removed_with_the_shared_memory(tmp_path, name):
    target = tmp_path / "home" / name
    target.mkdir(parents=True)
    (target / "model.py").write_text("found")
    links = tmp_path / "shm"
    links.mkdir()
    link = shell_safe(target, "models", "trident_1_2_", links)
    ran = subprocess.run(["bash", "-c", f" exec cat {link}/model.py"], capture_output=True, text=True, check=False)
    assert ran.stdout == "found", ran.stderr
    assert shell_safe(target, "models", "trident_1_2_", links) == link  # a restart makes it again
    shared_memory.clean("trident_1_2_", links)
    assert list(links.iterdir()) == [] and target.is_dir()


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1))
def test_a_shell_safe_path_needs_no_quotes(text):
    assert not SHELL_SAFE.fullmatch(str(Path(text))) or shlex.quote(str(Path(text))) == str(Path(text))


def test_a_link_that_cannot_be_made_is_an_error_that_names_the_path(tmp_path):
    with pytest.raises(Unavailable, match="a b: must be a path without blanks"):
        shell_safe(tmp_path / "a b", "models", "trident_1_2_", tmp_path / "no such folder")

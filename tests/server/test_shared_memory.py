"""Files in /dev/shm: which are removed, and how large they may be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import Unavailable
from server import shared_memory


def test_only_files_of_the_prefix_are_removed(tmp_path):
    for name in ("trident_8001_7_a", "trident_8001_9_b", "trident_80011_7_c", "other"):
        (tmp_path / name).touch()
    assert shared_memory.clean(shared_memory.prefix(8001, 7), tmp_path) == ["trident_8001_7_a"]
    assert shared_memory.clean(shared_memory.port_prefix(8001), tmp_path) == ["trident_8001_9_b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "trident_80011_7_c"]


def test_a_foreign_prefix_is_refused(tmp_path):
    with pytest.raises(AssertionError, match="prefix: must start with trident_"):
        shared_memory.clean("", tmp_path)


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

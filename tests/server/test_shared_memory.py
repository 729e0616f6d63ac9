"""Which files in /dev/shm are ours."""

import pytest

from server import shared_memory


def test_only_files_of_the_prefix_go(tmp_path):
    for name in ("trident_8001_7_a", "trident_8001_9_b", "trident_80011_7_c", "other"):
        (tmp_path / name).touch()
    assert shared_memory.clean(shared_memory.prefix(8001, 7), tmp_path) == ["trident_8001_7_a"]
    assert shared_memory.clean(shared_memory.port_prefix(8001), tmp_path) == ["trident_8001_9_b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "trident_80011_7_c"]


def test_a_foreign_prefix_is_refused(tmp_path):
    with pytest.raises(AssertionError, match="not ours"):
        shared_memory.clean("", tmp_path)

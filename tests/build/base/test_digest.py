"""A remembered digest is never an outdated one."""

import hashlib
import json
import os

import pytest

from build.base import digest


@pytest.fixture
def large(tmp_path, monkeypatch):
    monkeypatch.setattr(digest, "REMEMBERED_BYTES", 4)
    path = tmp_path / "large.bin"
    path.write_bytes(b"0123456789")
    return path


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_a_small_file_is_hashed_and_not_remembered(tmp_path):
    path = tmp_path / "small"
    path.write_bytes(b"abc")
    assert digest.sha256_file(path, tmp_path / "cache.json") == sha256(b"abc")
    assert not (tmp_path / "cache.json").exists()


def test_a_large_file_is_hashed_once(large, tmp_path, monkeypatch):
    cache = tmp_path / "deep" / "cache.json"
    assert digest.sha256_file(large, cache) == sha256(b"0123456789")
    monkeypatch.setattr(digest, "_hash", lambda path: pytest.fail("hashed again"))
    assert digest.sha256_file(large, cache) == sha256(b"0123456789")


def test_a_change_is_seen_even_when_size_and_mtime_are_put_back(large, tmp_path):
    cache = tmp_path / "cache.json"
    before = large.stat()
    digest.sha256_file(large, cache)
    large.write_bytes(b"9876543210")
    os.utime(large, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digest.sha256_file(large, cache) == sha256(b"9876543210")
    assert len(json.loads(cache.read_text())) == 1


@pytest.mark.parametrize("damage", ["", "{", "[]", "\x00"])
def test_a_damaged_cache_only_costs_time(large, tmp_path, damage):
    cache = tmp_path / "cache.json"
    cache.write_text(damage)
    assert digest.sha256_file(large, cache) == sha256(b"0123456789")
    assert list(json.loads(cache.read_text()).values()) == [sha256(b"0123456789")]


def test_a_json_digest_does_not_depend_on_the_order_of_keys():
    assert digest.sha256_json({"a": 1, "b": (2, 3)}) == digest.sha256_json({"b": [2, 3], "a": 1})
    assert digest.sha256_json({"a": 1}) != digest.sha256_json({"a": 2})

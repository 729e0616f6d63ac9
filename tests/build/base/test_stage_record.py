import pytest

from build.base.stage_record import StageRecords


@pytest.fixture
def made(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "rank0.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    return [tmp_path / "checkpoint", tmp_path / "config.json"]


def test_a_stage_is_done_while_key_and_files_are_the_same(tmp_path, made):
    records = StageRecords(tmp_path)
    assert records.problem("quantise", "k") == "not done yet"
    records.write("quantise", "k", made)
    assert records.problem("quantise", "k") is None
    assert records.problem("quantise", "other") == "what it is made from has changed"
    assert records.problem("compile", "k") == "not done yet"
    records.forget("quantise")
    assert records.problem("quantise", "k") == "not done yet"


def test_a_damaged_or_missing_file_is_named(tmp_path, made):
    records = StageRecords(tmp_path)
    records.write("quantise", "k", made)
    (tmp_path / "checkpoint" / "rank0.safetensors").write_bytes(b"weighty")
    assert records.problem("quantise", "k") == "checkpoint/rank0.safetensors is not the file that was made"
    (tmp_path / "checkpoint" / "rank0.safetensors").unlink()
    assert records.problem("quantise", "k") == "checkpoint/rank0.safetensors is missing"


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": "k"}', '{"key": "k", "files": 3}'])
def test_a_damaged_record_is_no_record(tmp_path, made, damage):
    records = StageRecords(tmp_path)
    records.write("quantise", "k", made)
    (tmp_path / "stages" / "quantise.json").write_text(damage)
    assert records.problem("quantise", "k") == "its record is damaged"


def test_the_digest_follows_the_key_and_the_files(tmp_path, made):
    records = StageRecords(tmp_path)
    records.write("quantise", "k", made)
    first = records.digest("quantise")
    records.write("quantise", "k", made)
    assert records.digest("quantise") == first
    made[1].write_text("{ }")
    records.write("quantise", "k", made)
    assert records.digest("quantise") != first

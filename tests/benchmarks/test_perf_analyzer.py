import json
from pathlib import Path

import pytest

from benchmarks import perf_analyzer
from contract import tensors
from contract.errors import NotFound


@pytest.mark.parametrize(("kind", "stream"), [("streaming", True), ("unary", False)])
def test_input_files_ask_for_answers_of_fixed_length_with_the_ensemble_s_own_tensors(kind, stream):
    rows = json.loads((perf_analyzer.INPUTS / f"{kind}.json").read_text())["data"]
    known = {tensor.name for tensor in tensors.ENSEMBLE_INPUTS}
    assert len(rows) == 16 and len({row["text_input"][0] for row in rows}) == 16
    for row in rows:
        assert row.keys() <= known and row["ignore_eos"] == [True] and row["stream"] == [stream]
        assert row["max_tokens"] == [64]


def test_the_package_is_the_newest_the_c_library_can_run():
    assert perf_analyzer.package((2, 41)) == perf_analyzer.NEW
    assert perf_analyzer.package((2, 36)) == perf_analyzer.OLD
    with pytest.raises(NotFound, match="glibc 2.31"):
        perf_analyzer.package((2, 31))


def test_libraries_are_linked_by_the_names_it_asks_for(tmp_path: Path):
    folder = Path(perf_analyzer.link_libraries(tmp_path / "lib"))
    assert {link.name for link in folder.iterdir()} == set(perf_analyzer.LIBRARIES)
    assert all(link.resolve().is_file() for link in folder.iterdir())


def test_a_table_of_its_is_read_in_milliseconds(tmp_path: Path):
    header = "Concurrency,Inferences/Second,Response Throughput,p50 latency,p90 latency,p95 latency,p99 latency"
    (tmp_path / "x.csv").write_text(f"{header}\n8,20.66,907.31,278100,300000,395300,396400\n")
    assert perf_analyzer.read(tmp_path / "x.csv", "streaming") == [
        ("streaming", "20.66", "907.3", "278.1", "395.3", "396.4")
    ]
    assert perf_analyzer.read(tmp_path / "none.csv", "streaming") == []


def test_a_command_names_the_file_of_its_kind(tmp_path: Path):
    argv = perf_analyzer.command(Path("/p"), "h:1", "unary", ["--concurrency-range", "8"], tmp_path / "o", 40)
    assert argv[argv.index("--input-data") + 1].endswith("unary.json")
    assert argv[argv.index("--request-count") + 1] == "40" and "--streaming" in argv

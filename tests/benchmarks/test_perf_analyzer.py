import json
from pathlib import Path

import pytest

from benchmarks import perf_analyzer
from benchmarks.prompts import Prompts
from contract import tensors
from contract.errors import NotFound


@pytest.mark.parametrize("stream", [True, False])
def test_inputs_ask_for_answers_of_fixed_length_with_the_ensemble_s_own_tensors(stream):
    rows = perf_analyzer.inputs(["a", "b"], 64, stream)["data"]
    known = {tensor.name for tensor in tensors.ENSEMBLE_INPUTS}
    assert [row["text_input"] for row in rows] == [["a"], ["b"]]
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
    (tmp_path / perf_analyzer.RESULT).write_text(f"{header}\n8,20.66,907.31,278100,300000,395300,396400\n")
    times = [{"timestamp": 10**9, "response_timestamps": [10**9 + 40_000_000, 2 * 10**9]}]
    (tmp_path / perf_analyzer.PROFILE).write_text(json.dumps({"experiments": [{"requests": times}]}))
    found = perf_analyzer.read(tmp_path)
    assert found["TTFT p50, ms"] == 40.0
    profile = (tmp_path / perf_analyzer.PROFILE).read_text()
    for cut_off in ("", profile[:-9]):
        (tmp_path / perf_analyzer.PROFILE).write_text(cut_off)
        assert "TTFT p50, ms" not in perf_analyzer.read(tmp_path)
    assert found["requests/s"] == 20.66 and found["responses/s"] == 907.31 and found["latency p95, ms"] == 395.3


def test_a_load_has_a_prompt_for_each_request_and_other_ones_by_its_seed(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(perf_analyzer, "variables", lambda made: {})
    made = perf_analyzer.tool("h:1", Prompts(), stream=False)
    seen = []
    (tmp_path / perf_analyzer.PROFILE).write_text("of the load before, which perf_analyzer would refuse to replace")
    for seed in (0, 0, 1):
        argv = made.command(["--concurrency-range", "8"], 40, seed, tmp_path)
        file = Path(argv[argv.index("--input-data") + 1])
        seen.append([row["text_input"][0] for row in json.loads(file.read_text())["data"]])
    assert argv[argv.index("--request-count") + 1] == "40" and "--streaming" in argv
    assert not (tmp_path / perf_analyzer.PROFILE).exists()
    assert seen[0] == seen[1] != seen[2] and len(set(seen[0])) == 40

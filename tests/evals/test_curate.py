"""Curated sets: the same from the same samples and seed, redacted, without duplicates, and readable by the runner."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from evals import command_line, curate, results, task


def sample(number: int, reason: str = "fraction", **more) -> dict:
    return {
        "id": f"s{number:03d}",
        "request_id": f"r{number}",
        "time": 1_795_400_000 + number,
        "tenant": "acme/in",
        "model": "demo",
        "pool": "usual",
        "language": "en",
        "reasons": [reason],
        "text_input": f"question {number}",
        "output": f"answer\u2028 {number}",
        **more,
    }


def written(path: Path, samples: list[dict]) -> Path:
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in samples))
    return path


def run(tmp_path: Path, samples: list[dict], *more: str, out: str = "sets") -> Path:
    source = written(tmp_path / "samples.jsonl", samples)
    words = ["curate", str(source), "--name", "support", "--date", "2026-11-23", "--out", str(tmp_path / out), *more]
    assert command_line.main(words) == 0
    return tmp_path / out


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


SAMPLES = [sample(n, "fraction" if n < 40 else "down" if n < 44 else "length") for n in range(50)]


def test_a_set_depends_on_samples_and_seed_alone(tmp_path):
    once = contents(run(tmp_path, SAMPLES, "--size", "12"))
    shuffled = random.Random(1).sample(SAMPLES, len(SAMPLES))
    again = contents(run(tmp_path, shuffled, "--size", "12", out="again"))
    assert once["support-2026-11-23-instructions.jsonl"] == again["support-2026-11-23-instructions.jsonl"]
    other = contents(run(tmp_path, SAMPLES, "--size", "12", "--seed", "2", out="other"))
    assert once["support-2026-11-23-instructions.jsonl"] != other["support-2026-11-23-instructions.jsonl"]
    manifest = json.loads(once["support-2026-11-23.manifest.json"])
    assert manifest["reasons"] == {"fraction": 4, "down": 4, "length": 4} and manifest["cases"] == 12
    assert manifest["left_out"] == {"beyond the size": 38} and manifest["options"]["seed"] == "0"
    digest = curate._sha256(once["support-2026-11-23-instructions.jsonl"].decode())
    assert manifest["files"]["support-2026-11-23-instructions.jsonl"] == digest
    [read] = task.read(tmp_path / "sets")
    assert {case["prompt"] for case in read.cases} < {one["text_input"] for one in SAMPLES}
    assert all(case["provenance"]["tenant"] == "acme/in" for case in read.cases)


def test_every_file_of_samples_is_in_the_manifest(tmp_path):
    paths = []
    for number, gateway in enumerate(("one", "two")):  # each exported its own, under the same name
        (tmp_path / gateway).mkdir()
        paths.append(written(tmp_path / gateway / "samples.jsonl", [sample(number)]))
    words = ["--name", "support", "--date", "2026-11-23", "--out", str(tmp_path / "sets")]
    assert command_line.main(["curate", *map(str, paths), *words]) == 0
    manifest = json.loads((tmp_path / "sets" / "support-2026-11-23.manifest.json").read_text())
    assert manifest["sources"] == {curate._sha256(path.read_text()): "samples.jsonl" for path in paths}


def test_what_does_not_belong_is_left_out_and_counted(tmp_path):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    samples = [
        sample(0),
        sample(1, text_input="  Question 0 "),
        sample(2, text_input="mail ann@example.org"),
        sample(3, output="call +49 30 1234567"),
        sample(4, feedback={"comment": "ask 192.168.0.17", "rating": "down"}),
        sample(5, text_input=None, input_ids=[1, 2]),
        sample(6, model="other"),
        sample(7, text_input=None, messages=turns),
        sample(8, guide={"kind": "json_schema", "text": '{"type": "object"}'}),
        sample(9, time=1_700_000_000),
    ]
    folder = run(tmp_path, samples, "--model", "demo", "--since", "2026-01-01")
    manifest = json.loads((folder / "support-2026-11-23.manifest.json").read_text())
    assert manifest["left_out"] == {"filtered": 2, "duplicate": 1, "not redacted": 3, "without text": 1}
    free, schema = task.read(folder)
    assert [case["schema"] for case in schema.cases] == [{"type": "object"}]
    [chat] = [case for case in free.cases if case["id"] == "s007"]
    assert chat["messages"] == turns and chat["prompt"] == "Hi"


def test_pairs_become_results_for_the_judge_and_the_gate(tmp_path):
    samples = [sample(n, pair={"pool": "next", "output": f"other {n}" if n else ""}) for n in range(3)] + [sample(9)]
    folder = run(tmp_path, samples, "--pairs")
    sides = [results.read(folder / f"support-2026-11-23.{side}.json") for side in ("baseline", "candidate")]
    assert [side.target.model for side in sides] == ["usual", "next"]
    [pairs] = results.pairs(*sides).values()
    assert {(one.output, two.output) for one, two in pairs} == {
        ("answer\u2028 0", ""),
        ("answer\u2028 1", "other 1"),
        ("answer\u2028 2", "other 2"),
    }
    assert sorted(two.score for _, two in pairs) == [0, 1, 1] and all(one.score == 1 for one, _ in pairs)


@pytest.mark.parametrize(
    ("content", "more", "problem"),
    [
        ("{", (), "samples.jsonl:1: must be a JSON object"),
        ('{"id": "a"}', (), "samples.jsonl:1: time: must be set"),
        (json.dumps(sample(0)), ("--model", "none"), "samples: must have some that can be used"),
        ("", ("--name", "../x"), "name: must be lower-case"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, capsys, content, more, problem):
    source = tmp_path / "samples.jsonl"
    source.write_text(content)
    assert command_line.main(["curate", str(source), "--name", "n", "--out", str(tmp_path / "sets"), *more]) == 2
    assert problem in capsys.readouterr().err and not (tmp_path / "sets").exists()

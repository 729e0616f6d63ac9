import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import InvalidArgument
from evals import task

RULES = [{"rule": "contains", "value": "a"}]


def written(folder, name, yaml, *cases):
    (folder / f"{name}.yaml").write_text(yaml)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases))


def test_the_tasks_that_ship_are_of_every_kind():
    tasks = task.read()
    assert {one.kind for one in tasks} == {"choice", "cloze", "likelihood", "exact", "schema", "tools", "instructions"}
    assert sum(len(one.cases) for one in tasks) >= 250 and all(one.about for one in tasks)
    assert [one.name for one in tasks if one.is_chat] == ["answers", "extract", "instructions", "schema", "tools"]


def test_the_digest_is_of_both_files(tmp_path):
    written(tmp_path, "one", "kind: instructions", {"id": "a", "prompt": "?", "rules": RULES})
    before = task.read(tmp_path)[0].sha256
    written(tmp_path, "one", "kind: instructions", {"id": "b", "prompt": "?", "rules": RULES})
    assert task.read(tmp_path)[0].sha256 != before


@pytest.mark.parametrize(
    "yaml,case,problem",
    [
        ("kind: song", {"id": "a"}, r"one\.yaml: kind: must be one of schema, tools, instructions, .* got 'song'"),
        ("[1]", {"id": "a"}, "kind: must be one of"),
        ("output_type: multiple_choice", {"id": "a"}, "kind: must be one of"),
        ("kind: tools", {"id": "a", "prompt": "?", "tools": []}, r"one\.jsonl:1: expected: must be set"),
        ("kind: schema", {"prompt": "?", "schema": {}}, r"one\.jsonl:1: id: must be set"),
        ("kind: schema", [1], r"one\.jsonl:1: must be a JSON object, got list"),
        (
            "kind: instructions",
            {"id": "a", "prompt": "?", "rules": [{"rule": "rhymes"}]},
            r"rules: must be one of words_at_most, .* got 'rhymes'",
        ),
        (
            "kind: instructions",
            {"id": "a", "prompt": "?", "rules": [{"rule": "bullets", "value": "3"}]},
            r"rules\.bullets: must have a value of type int, got '3'",
        ),
        (
            "kind: instructions",
            {"id": "a", "prompt": "?", "rules": [{"rule": ["contains"]}]},
            r"one\.jsonl:1: rules: must be one of words_at_most, .* got \['contains'\]",
        ),
        (
            "kind: instructions",
            {"id": "a", "prompt": "?", "rules": ["contains"]},
            r"one\.jsonl:1: rules: must be objects with rule and value, got 'contains'",
        ),
        (
            "kind: instructions",
            {"id": "a", "prompt": "?", "rules": []},
            r"one\.jsonl:1: rules: must be a list of at least one rule, got \[\]",
        ),
        (
            "kind: instructions",
            {"id": "a", "prompt": "?", "rules": None},
            r"one\.jsonl:1: rules: must be a list of at least one rule, got None",
        ),
        (
            "kind: instructions",
            {"id": "a", "prompt": "?", "rules": [{"rule": "matches", "value": "("}]},
            r"one\.jsonl:1: rules\.matches: must be a regular expression, got '\(': missing \)",
        ),
        (
            "kind: schema",
            {"id": "a", "prompt": "?", "schema": {"type": "text"}},
            r"one\.jsonl:1: schema: must be a JSON schema of draft 2020-12: \"text\" is not valid",
        ),
        (
            "kind: schema",
            {"id": "a", "prompt": "?", "schema": {"items": {"$ref": "#/$defs/none"}}},
            r"one\.jsonl:1: schema: must be a JSON schema of draft 2020-12: Pointer '/\$defs/none' does not exist",
        ),
        (
            "kind: schema",
            {"id": "a", "prompt": "?", "schema": {"$ref": "http://127.0.0.1/schema"}},
            r"one\.jsonl:1: schema: must be a JSON schema of draft 2020-12: .* is not loaded",
        ),
        (
            "kind: tools",
            {"id": "a", "prompt": "?", "tools": [], "expected": {"name": "add"}},
            r"one\.jsonl:1: expected: must be null or an object with name and arguments, got \{'name': 'add'\}",
        ),
        (
            "kind: instructions",
            {"id": 1, "prompt": "?", "rules": RULES},
            r"one\.jsonl:1: id: must be a string, got 1",
        ),
        (
            "{output_type: loglikelihood, metadata: {kind: cloze}}",
            {"id": 1},
            r"one\.jsonl:1: id: must be a string, got 1",
        ),
        *(
            (
                f"kind: schema\nrequest: {request}",
                {"id": "a", "prompt": "?", "schema": {}},
                r"one\.yaml: request: must be an object without model, messages, stream, .* which the run sets, got",
            )
            for request in ("null", "[1]", "{model: x}", "{stream: true}", "{tools: []}")
        ),
        ("kind: [", {"id": "a"}, "must be a readable YAML file"),
    ],
)
def test_a_wrong_task_is_refused_by_file_line_and_field(tmp_path, yaml, case, problem):
    written(tmp_path, "one", yaml, case)
    with pytest.raises(InvalidArgument, match=problem):
        task.read(tmp_path)


def test_ids_are_there_once(tmp_path):
    case = {"id": "a", "prompt": "?", "rules": RULES}
    written(tmp_path, "one", "kind: instructions", case, case)
    with pytest.raises(InvalidArgument, match="id: must be there and different in every line"):
        task.read(tmp_path)
    with pytest.raises(InvalidArgument, match="tasks: must be among one of .*, got 'two'"):
        task.read(tmp_path, ["two"])
    with pytest.raises(InvalidArgument, match="must be among none"):
        task.read(Path(tmp_path / "empty"), ["two"])


FILE = Path("cases.jsonl")


@given(st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=10), max_size=2), max_size=3), st.booleans())
def test_what_is_written_is_read_whatever_separators_its_texts_hold(objects, ascii_only):
    text = "".join(json.dumps(one, ensure_ascii=ascii_only) + "\n" for one in objects)
    assert list(task.lines(FILE, text)) == [(f"{FILE}:{n}", one) for n, one in enumerate(objects, 1)]


def test_a_separator_within_a_text_divides_no_line():
    text = json.dumps({"a": "one\u2028two\x85three"}, ensure_ascii=False)
    assert [found for _, found in task.lines(FILE, text)] == [{"a": "one\u2028two\x85three"}]


@pytest.mark.parametrize("line", ["", "{", "[1]", "nothing", pytest.param("[" * 100_000, id="deep")])
def test_a_line_that_is_no_object_is_named(line):
    with pytest.raises(InvalidArgument, match="cases.jsonl:2: must be a JSON object"):
        list(task.lines(FILE, f"{{}}\n{line}\n{{}}\n"))

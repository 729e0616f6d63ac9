"""JSON Lines as tasks, labels and samples have them."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import InvalidArgument
from evals import json_lines

FILE = Path("cases.jsonl")


@given(st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=10), max_size=2), max_size=3), st.booleans())
def test_what_is_written_is_read_whatever_separators_its_texts_hold(objects, ascii_only):
    text = "".join(json.dumps(one, ensure_ascii=ascii_only) + "\n" for one in objects)
    assert list(json_lines.objects(FILE, text)) == [(f"{FILE}:{n}", one) for n, one in enumerate(objects, 1)]


def test_a_separator_within_a_text_divides_no_line():
    text = json.dumps({"a": "one\u2028two\x85three"}, ensure_ascii=False)
    assert [found for _, found in json_lines.objects(FILE, text)] == [{"a": "one\u2028two\x85three"}]


@pytest.mark.parametrize("line", ["", "{", "[1]", "nothing", pytest.param("[" * 100_000, id="deep")])
def test_a_line_that_is_no_object_is_named(line):
    with pytest.raises(InvalidArgument, match="cases.jsonl:2: must be a JSON object"):
        list(json_lines.objects(FILE, f"{{}}\n{line}\n{{}}\n"))

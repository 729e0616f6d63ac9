"""The lines of batch files: what is read, what is reported, and what is written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import EngineFailed
from gateway.batch import jsonl
from gateway.batch.jsonl import MAX_ERRORS, MAX_LEVELS, LineReader
from gateway.batch.store import Line

URL = "/v1/completions"
LINE = Line("batch_1", 4, "c", b"{}")


def text(custom_id: str = "a", **more: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": {"x": 1}, **more}).encode()


def read(data: bytes, size: int = 10_000, max_lines: int = 10) -> tuple[list[Line], list[dict[str, Any]]]:
    reader = LineReader("batch_1", URL, max_lines, 1000)
    lines = list(reader.read(data[start : start + size] for start in range(0, len(data), size)))
    return lines, reader.errors


@given(st.integers(1, 300), st.booleans())
def test_lines_are_the_same_however_the_file_is_cut(size: int, ends: bool) -> None:
    data = b"\n".join([text("a"), b"  ", text("b")]) + b"\n" * ends
    lines, errors = read(data, size)
    assert errors == [] and [(line.number, line.custom_id) for line in lines] == [(0, "a"), (1, "b")]
    assert [json.loads(line.body) for line in lines] == [{"x": 1}] * 2


@pytest.mark.parametrize(
    ("data", "code", "param"),
    [
        (b"", "empty_file", None),
        (b"nonsense", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b"x" * 1001, "line_too_long", None),
        (text(more=1), "unknown_field", "more"),
        (text(""), "invalid_custom_id", "custom_id"),
        (text() + b"\n" + text(), "duplicate_custom_id", "custom_id"),
        (text(method="GET"), "invalid_method", "method"),
        (text(url="/v1/x"), "mismatched_url", "url"),
        (text(body=[]), "invalid_body", "body"),
        (text(body={"stream": True}), "invalid_body", "body.stream"),
        (b"\n".join(text(str(n)) for n in range(11)), "too_many_lines", None),
    ],
)
def test_what_is_wrong_has_a_code_and_a_field(data: bytes, code: str, param: str | None) -> None:
    _, errors = read(data)
    assert [(error["code"], error["param"]) for error in errors] == [(code, param)]


@pytest.mark.parametrize("levels", [MAX_LEVELS, MAX_LEVELS + 1, 900])
def test_a_body_that_nests_too_deep_is_an_error_of_its_line(levels: int) -> None:
    deep = b'{"x":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"
    line = text().replace(b'{"x": 1}', deep)
    reader = LineReader("batch_1", URL, 10, 10_000)
    lines = list(reader.read([text("first") + b"\n" + line + b"\n" + text("last")]))
    if levels <= MAX_LEVELS:
        assert reader.errors == [] and lines[1].body == deep
    else:
        [error] = reader.errors
        assert (error["code"], error["param"], error["line"]) == ("invalid_body", "body", 2)
        assert error["message"] == f"line 2: body: must nest at most {MAX_LEVELS} levels"


def test_no_more_errors_are_reported_than_help() -> None:
    assert len(read(b"nonsense\n" * 500)[1]) == MAX_ERRORS


def test_results_name_their_line_and_its_request() -> None:
    done, failed = json.loads(jsonl.answered(LINE, {"a": 1})), json.loads(jsonl.refused(LINE, EngineFailed("it broke")))
    unserved = json.loads(jsonl.unserved("batch_expired", "too late")(LINE))
    assert done["id"] == failed["id"] == unserved["id"] == jsonl.request_id(LINE) == "batch_req_1_4"
    assert {done["custom_id"], failed["custom_id"], unserved["custom_id"]} == {"c"}
    assert done["response"]["status_code"] == 200 and done["response"]["body"] == {"a": 1} and done["error"] is None
    assert failed["response"]["status_code"] == 500 and failed["response"]["body"]["error"]["type"] == "server_error"
    assert unserved["response"] is None and unserved["error"] == {"code": "batch_expired", "message": "too late"}

"""Log lines for machines and for people."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest

from gateway.telemetry import logs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def root_as_before() -> Iterator[None]:
    root, uvicorn = logging.getLogger(), logging.getLogger("uvicorn")
    handlers, levels = root.handlers[:], (root.level, uvicorn.level)
    root.handlers = []
    yield
    root.handlers = handlers
    root.setLevel(levels[0])
    uvicorn.setLevel(levels[1])


def written(stream: io.StringIO, form: str) -> str:
    logs.configure("info", form, stream)
    fields = {"request_id": "a b", "tenant": "acme", "error_type": "", "ttft_s": 0.25, "tokens": 0}
    logging.getLogger("gateway.request").info("generation", extra={"fields": fields})
    logging.getLogger("uvicorn.error").warning("Invalid request")
    return stream.getvalue()


@pytest.mark.parametrize(("stream", "form", "as_json"), [
    (Terminal(), "auto", False),
    (io.StringIO(), "auto", True),
    (Terminal(), "json", True),
    (io.StringIO(), "text", False),
])  # fmt: skip
def test_people_get_text_and_machines_get_json_in_every_logger(stream: io.StringIO, form: str, as_json: bool):
    lines = written(stream, form).splitlines()
    assert len(lines) == 2
    if as_json:
        assert [json.loads(line)["message"] for line in lines] == ["generation", "Invalid request"]
    else:
        assert not lines[0].startswith("{")
        assert lines[0].endswith(
            "INFO    gateway.request: generation request_id='a b' tenant=acme ttft_s=0.25 tokens=0"
        )
        assert lines[1].endswith("WARNING uvicorn.error: Invalid request")


def test_what_a_caller_sent_forges_no_line_of_text():
    stream = io.StringIO()
    logs.configure("info", "text", stream)
    logging.getLogger("x").warning("said a\nb\x1b[2Jc", extra={"fields": {"request_id": "1\n2"}})
    assert stream.getvalue().count("\n") == 1 and "\x1b" not in stream.getvalue()


def test_a_defect_keeps_its_stack():
    for form in ("text", "json"):
        stream = io.StringIO()
        logs.configure("info", form, stream)
        try:
            raise ZeroDivisionError("defect")
        except ZeroDivisionError:
            logging.getLogger("x").error("failed", exc_info=sys.exc_info())
        assert "ZeroDivisionError: defect" in stream.getvalue() and "test_logs.py" in stream.getvalue()


def test_a_field_does_not_take_the_place_of_the_level():
    record = logging.LogRecord("gateway.x", logging.WARNING, "", 0, "a budget is used", (), None)
    record.fields = {"level": "acme/day", "tenant": "acme"}
    line = json.loads(logs.JsonLines().format(record))
    assert (line["level"], line["logger"], line["tenant"]) == ("warning", "gateway.x", "acme")

"""The lines of a batch, in and out, as OpenAI's clients write and read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from contract.errors import TridentError
from gateway.api import error_responses
from gateway.api.caller_errors import for_caller
from gateway.batch.store import Line

MAX_CUSTOM_ID = 512
MAX_COMPLAINTS = 100  # of one file; the first ones are what helps


@dataclass(eq=False)
class LineReader:
    """The requests in a file of JSON lines, checked as far as a batch as a whole stands or falls with them.

    What a request's body asks for is checked when it runs, and then it fails alone. ``complaints`` are what was
    wrong, as the ``errors.data`` of a batch. Blank lines are skipped.
    """

    batch_id: str
    endpoint: str
    max_lines: int
    max_line_bytes: int
    complaints: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.count = 0
        self._place = 0  # of the line in the file, from 1
        self._seen: set[str] = set()

    def read(self, parts: Iterable[bytes]) -> Iterator[Line]:
        """The good lines of a file that comes in ``parts``; it stops early when enough is wrong."""
        rest = b""
        for part in parts:
            *whole, rest = (rest + part).split(b"\n")
            for text in whole:
                yield from self._line(text)
                if self._over():
                    return
            if len(rest) > self.max_line_bytes:
                break
        yield from self._line(rest)
        if not self.count and not self.complaints:
            self._complain("empty_file", "the file has no request in it", line=None)

    def _over(self) -> bool:
        return len(self.complaints) >= MAX_COMPLAINTS or self.count > self.max_lines

    def _line(self, text: bytes) -> Iterator[Line]:
        self._place += 1
        if len(text) > self.max_line_bytes:
            self._complain("line_too_long", f"is longer than {self.max_line_bytes} bytes, the most allowed")
            return
        if not text.strip():
            return
        try:
            table = orjson.loads(text)
        except orjson.JSONDecodeError as exc:
            self._complain("invalid_json_line", f"is not JSON: {exc}")
            return
        if not isinstance(table, dict):
            self._complain("invalid_json_line", "is not a JSON object")
            return
        if not self._checked(table):
            return
        self.count += 1
        if self.count > self.max_lines:
            self._complain("too_many_lines", f"there are more than {self.max_lines} requests, the most allowed")
            return
        yield Line(self.batch_id, self.count - 1, table["custom_id"], orjson.dumps(table["body"]))

    def _checked(self, table: Mapping[str, Any]) -> bool:
        before = len(self.complaints)
        unknown = sorted(table.keys() - {"custom_id", "method", "url", "body"})
        custom_id, body = table.get("custom_id"), table.get("body")
        if unknown:
            self._complain("unknown_field", "is not known; allowed are custom_id, method, url and body", unknown[0])
        if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
            self._complain("invalid_custom_id", f"allowed is a text of 1 to {MAX_CUSTOM_ID} characters", "custom_id")
        elif custom_id in self._seen:
            self._complain("duplicate_custom_id", "stands in an earlier line too; each has to differ", "custom_id")
        else:
            self._seen.add(custom_id)
        if table.get("method") != "POST":
            self._complain("invalid_method", "allowed is POST", "method")
        if table.get("url") != self.endpoint:
            self._complain("mismatched_url", f"allowed is {self.endpoint}, the endpoint of this batch", "url")
        if not isinstance(body, dict):
            self._complain("invalid_body", "allowed is a JSON object", "body")
        elif body.get("stream"):
            self._complain("invalid_body", "allowed in a batch is only false: nobody reads a stream", "body.stream")
        return len(self.complaints) == before

    def _complain(self, code: str, problem: str, param: str | None = None, line: int | None = -1) -> None:
        where = "" if line is None else f"line {self._place}: "
        said = f"{where}{param}: {problem}" if param else f"{where}{problem}"
        if len(self.complaints) < MAX_COMPLAINTS:
            place = None if line is None else self._place
            self.complaints.append({"code": code, "message": said, "param": param, "line": place})


def request_id(line: Line) -> str:
    """The same for every try of a line."""
    return f"batch_req_{line.batch_id.removeprefix('batch_')}_{line.number}"


def answered(line: Line, answer: Mapping[str, Any]) -> bytes:
    """A line of the output file."""
    return _result(line, {"status_code": 200, "request_id": request_id(line), "body": answer}, None)


def refused(line: Line, error: TridentError) -> bytes:
    """A line of the error file, for a request that was tried."""
    body = error_responses.error_object(for_caller(error, request_id(line)))
    return _result(line, {"status_code": error.http_status, "request_id": request_id(line), "body": body}, None)


def unserved(code: str, message: str) -> Callable[[Line], bytes]:
    """Lines of the error file, for requests that never ran to their end."""
    return lambda line: _result(line, None, {"code": code, "message": message})


def _result(line: Line, response: Mapping | None, error: Mapping | None) -> bytes:
    table = {"id": request_id(line), "custom_id": line.custom_id, "response": response, "error": error}
    return orjson.dumps(table)

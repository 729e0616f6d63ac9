"""The input, output and error lines of a batch, as OpenAI's clients write and read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from contract.errors import TridentError
from gateway.api import error_responses
from gateway.api.error_responses import for_caller
from gateway.batch.store import Line

MAX_CUSTOM_ID = 512
MAX_ERRORS = 100  # reported of one file
MAX_LEVELS = 254  # of a body; orjson reads deeper ones and cannot write them


@dataclass(eq=False)
class LineReader:
    """Read a file of JSON lines: one wrong line fails the batch. Bodies are checked later. errors: of the batch."""

    batch_id: str
    endpoint: str
    max_lines: int
    max_line_bytes: int
    errors: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.count = 0
        self._line_number = 0  # in the file, from 1
        self._seen: set[str] = set()

    def read(self, parts: Iterable[bytes]) -> Iterator[Line]:
        """Yield the valid lines of a file that comes in ``parts``; stop early after ``MAX_ERRORS``."""
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
        if not self.count and not self.errors:
            message = "the file must hold at least one request"
            self.errors.append({"code": "empty_file", "message": message, "param": None, "line": None})

    def _over(self) -> bool:
        return len(self.errors) >= MAX_ERRORS or self.count > self.max_lines

    def _line(self, text: bytes) -> Sequence[Line]:
        """Return the request in a line; none where it is blank or wrong."""
        self._line_number += 1
        if len(text) > self.max_line_bytes:
            return self._wrong("line_too_long", f"must be at most {self.max_line_bytes} bytes")
        if not text.strip():
            return ()
        try:
            table = orjson.loads(text)
        except orjson.JSONDecodeError as exc:
            return self._wrong("invalid_json_line", f"must be JSON: {exc}")
        if not isinstance(table, dict):
            return self._wrong("invalid_json_line", "must be a JSON object")
        if not self._checked(table):
            return ()
        try:
            body = orjson.dumps(table["body"])
        except orjson.JSONEncodeError:
            return self._wrong("invalid_body", f"must nest at most {MAX_LEVELS} levels", "body")
        self.count += 1
        if self.count > self.max_lines:
            return self._wrong("too_many_lines", f"the file must hold at most {self.max_lines} requests")
        return (Line(self.batch_id, self.count - 1, table["custom_id"], body),)

    def _checked(self, table: Mapping[str, Any]) -> bool:
        before = len(self.errors)
        unknown = sorted(table.keys() - {"custom_id", "method", "url", "body"})
        custom_id, body = table.get("custom_id"), table.get("body")
        if unknown:
            self._wrong("unknown_field", "must be one of custom_id, method, url and body", unknown[0])
        if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
            self._wrong("invalid_custom_id", f"must be a string of 1 to {MAX_CUSTOM_ID} characters", "custom_id")
        elif custom_id in self._seen:
            self._wrong("duplicate_custom_id", "must differ from that of every earlier line", "custom_id")
        else:
            self._seen.add(custom_id)
        if table.get("method") != "POST":
            self._wrong("invalid_method", "must be POST", "method")
        if table.get("url") != self.endpoint:
            self._wrong("mismatched_url", f"must be {self.endpoint}, the endpoint of this batch", "url")
        if not isinstance(body, dict):
            self._wrong("invalid_body", "must be a JSON object", "body")
        elif body.get("stream"):
            self._wrong("invalid_body", "must be false: a batch has no streams", "body.stream")
        return len(self.errors) == before

    def _wrong(self, code: str, problem: str, param: str | None = None) -> Sequence[Line]:
        if len(self.errors) < MAX_ERRORS:
            message = ": ".join(filter(None, (f"line {self._line_number}", param, problem)))
            self.errors.append({"code": code, "message": message, "param": param, "line": self._line_number})
        return ()


def request_id(line: Line) -> str:
    """Return the id of a line's request, the same for every attempt."""
    return f"batch_req_{line.batch_id.removeprefix('batch_')}_{line.number}"


def answered(line: Line, answer: Mapping[str, Any]) -> bytes:
    """Return a line of the output file."""
    return _result(line, {"status_code": 200, "request_id": request_id(line), "body": answer}, None)


def refused(line: Line, error: TridentError) -> bytes:
    """Return a line of the error file, for a request that failed."""
    body = error_responses.error_object(for_caller(error, request_id(line)))
    return _result(line, {"status_code": error.http_status, "request_id": request_id(line), "body": body}, None)


def unserved(code: str, message: str) -> Callable[[Line], bytes]:
    """Return a function that makes lines of the error file, for requests that did not run."""
    return lambda line: _result(line, None, {"code": code, "message": message})


def _result(line: Line, response: Mapping | None, error: Mapping | None) -> bytes:
    return orjson.dumps({"id": request_id(line), "custom_id": line.custom_id, "response": response, "error": error})

"""The process's log lines on standard error: JSON for machines, text for people. No prompt and no answer is in them."""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

import orjson


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the fields given as ``extra={"fields": {...}}``."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _utc(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line = getattr(record, "fields", {}) | line  # a field does not take the place of one of these
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


class TextLines(logging.Formatter):
    """One line of text: time, level, logger, message, then the fields that are not empty as ``name=value``."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        parts = [_utc(record), f"{record.levelname:<7}", f"{record.name}:", _one_line(record.getMessage())]
        parts += [f"{name}={_value(value)}" for name, value in fields.items() if value not in ("", None)]
        text = " ".join(parts)
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def configure(level: str, form: str, stream: TextIO | None = None) -> None:
    """Send every logger of the process, uvicorn's too, to standard error.

    level: the lowest that is written. form: ``json``, ``text``, or ``auto``, which is text for a terminal.
    """
    stream = stream or sys.stderr
    as_text = form == "text" or (form == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextLines() if as_text else JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level == "info":  # uvicorn's lines of starting and stopping repeat what we print
        logging.getLogger("uvicorn").setLevel(logging.WARNING)


def _utc(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _value(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return repr(text) if any(character.isspace() or not character.isprintable() for character in text) else text


def _one_line(text: str) -> str:
    """Escape what is not printable: a caller's text must not add log lines or move the terminal's cursor."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)

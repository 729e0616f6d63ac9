"""The log line of a request: its fields, its level, and what it leaves out."""

from __future__ import annotations

import logging
import time

import pytest

from contract.errors import EngineFailed, InvalidArgument, Overloaded, TridentError
from gateway.config.tenant import Tenant
from gateway.request_context import RequestContext
from gateway.telemetry import request_log

CONTEXT = RequestContext(Tenant("acme"), "http", "chat", "quote-me")


def written(caplog: pytest.LogCaptureFixture, error: TridentError | None, **more: object) -> logging.LogRecord:
    caplog.set_level(logging.INFO)
    request_log.write(CONTEXT, error, time.monotonic(), **more)
    return caplog.records[-1]


def test_a_line_names_the_caller_and_further_fields(caplog: pytest.LogCaptureFixture):
    fields = written(caplog, None, replica="a:1").fields
    assert (fields["request_id"], fields["tenant"], fields["protocol"]) == ("quote-me", "acme", "http")
    assert (fields["replica"], fields["error_type"], fields["error"]) == ("a:1", "", "")


def test_a_clients_mistake_is_named_and_not_quoted(caplog: pytest.LogCaptureFixture):
    fields = written(caplog, InvalidArgument("prompt", "got 'my secret'")).fields
    assert fields["error_type"] == "InvalidArgument" and "secret" not in fields["error"]


@pytest.mark.parametrize(
    ("error", "level"), [(EngineFailed("100% broken"), logging.ERROR), (Overloaded("full", 1.0), logging.INFO)]
)
def test_a_defect_is_an_error_and_a_refusal_is_not(caplog: pytest.LogCaptureFixture, error: TridentError, level: int):
    record = written(caplog, error)
    assert record.levelno == level and str(error) == record.fields["error"]
    assert "%%" not in record.getMessage()


def test_a_move_is_logged_with_both_targets(caplog: pytest.LogCaptureFixture):
    request_log.moved("moved", CONTEXT, "g-1", EngineFailed("gone"), **{"from": "replicas", "to": "small"})
    fields = caplog.records[-1].fields
    assert (fields["from"], fields["to"], fields["error"]) == ("replicas", "small", "gone")

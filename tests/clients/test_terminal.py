"""What a terminal shows of a stream."""

from __future__ import annotations

import json

import pytest

from clients import AsyncClient, terminal
from contract import errors
from contract.errors import Overloaded
from contract.generation import FinishReason
from tests.fakes.replica import FakeReplica, Script


async def test_text_is_printed_as_it_arrives_and_figures_go_to_standard_error(capsys):
    async with FakeReplica(lambda _: Script(("a", "b"))) as replica, AsyncClient(replica.url) as client:
        assert await terminal.show(client.generate("x y"), stats=True) == terminal.OK
    shown = capsys.readouterr()
    assert shown.out == "ab\n"
    assert "2 prompt tokens" in shown.err and "2 new tokens" in shown.err and "ended by: stop" in shown.err


async def test_json_has_one_object_a_response(capsys):
    async with FakeReplica(lambda _: Script(("a", "b"))) as replica, AsyncClient(replica.url) as client:
        await terminal.show(client.generate("x"), as_json=True)
    first, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["text"], "usage" in first) == ("a", False)
    assert (last["finish_reason"], last["usage"]["output_tokens"]) == (FinishReason.STOP.value, 2)


async def test_a_stream_is_cut_after_so_many_tokens(capsys):
    async with FakeReplica(lambda _: Script(("a", "b", "c"), stall_after=2)) as replica:
        async with AsyncClient(replica.url) as client:
            assert await terminal.show(client.generate("x"), cancel_after=2) == terminal.OK
    assert capsys.readouterr().out == "ab\n"


def test_an_error_is_one_line_and_a_hint_where_there_is_one(capsys):
    terminal.show_error(Overloaded("full", 2.0))
    first, hint = capsys.readouterr().err.splitlines()
    assert first == "error: Overloaded: full" and "2 s" in hint


@pytest.mark.parametrize(("seconds", "text"), [(None, "-"), (0.0125, "12.5 ms")])
def test_milliseconds(seconds: float | None, text: str):
    assert terminal.ms(seconds) == text


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidArgument("f", "p"), 2),
        (errors.PromptTooLong("f", "p"), 2),
        (errors.Unauthenticated("x"), 3),
        (errors.NotFound("x"), 4),
        (errors.Overloaded("x"), 5),
        (errors.Unavailable("x"), 6),
        (errors.DeadlineExceeded("x"), 7),
        (errors.Cancelled("x"), terminal.CUT_SHORT),
        (errors.EngineFailed("x"), 1),
        (errors.TridentError("x"), 1),
    ],
)
def test_every_error_has_its_exit_code(error: errors.TridentError, code: int):
    assert terminal.exit_code(error) == code
    assert f"  {code:>3}  " in terminal.exit_codes()

"""One exit code per kind of error."""

from __future__ import annotations

import pytest

from clients import exits
from contract import errors


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
        (errors.Cancelled("x"), exits.CUT_SHORT),
        (errors.EngineFailed("x"), 1),
        (errors.TridentError("x"), 1),
    ],
)
def test_every_error_has_its_exit_code(error: errors.TridentError, code: int):
    assert exits.code_for(error) == code
    assert f"  {code:>3}  " in exits.table()

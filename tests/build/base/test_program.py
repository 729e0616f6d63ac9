"""What stops a program from outside is one line."""

import errno
import os

import pytest

from build.base import program
from contract.errors import InvalidArgument


def ending(error: BaseException) -> int:
    def main() -> int:
        raise error

    return program.run(main, "build-engine")


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (KeyboardInterrupt(), 130, "build-engine: interrupted\n"),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x.bin"),
            1,
            "build-engine: x.bin: No space left on device\n",
        ),
        (OSError("odd"), 1, "build-engine: odd\n"),
        (InvalidArgument("model", "must be there"), 1, "build-engine: model: must be there\n"),
        (MemoryError(), 1, "build-engine: out of memory; take a smaller model or a machine with more\n"),
    ],
)
def test_it_is_one_line_and_a_status(capsys, error, status, says):
    assert ending(error) == status
    assert capsys.readouterr().err == says


def test_the_status_of_a_program_that_ends_by_itself_is_its_own():
    assert program.run(lambda: 3, "x") == 3

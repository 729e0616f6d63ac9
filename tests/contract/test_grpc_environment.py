"""What gRPC's environment holds after our packages were imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_SHOW = "import os; print(os.environ.get('GRPC_VERBOSITY'), os.environ.get('GRPC_EXPERIMENTS'))"


def environment_after(statement: str, argv0: str, **given: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    code = f"import sys; sys.argv = [{argv0!r}]\n{statement}\n{_SHOW}"
    return subprocess.run(
        [sys.executable, "-c", code], env=clean | given, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.parametrize(
    ("statement", "argv0", "shown"),
    [
        ("import clients", "program.py", "None None"),
        ("import clients", "-m", "NONE None"),
        ("import server", "-m", "NONE None"),
        ("import gateway", "program.py", "ERROR -event_engine_client,-event_engine_listener"),
    ],
)
def test_commands_are_silent_and_programs_that_import_the_client_keep_grpcs_log(statement, argv0, shown):
    assert environment_after(statement, argv0) == shown


def test_what_is_set_already_stays():
    given = {"GRPC_VERBOSITY": "DEBUG", "GRPC_EXPERIMENTS": "none"}
    assert environment_after("import gateway", "-m", **given).splitlines()[-1] == "DEBUG none"

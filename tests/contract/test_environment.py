"""Settings declared once: read from an environment, refused by variable, listed in docs/environment.md."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from contract.environment import AbsolutePath, Allowed, EnvironmentSettings, environment_config, render, table
from contract.errors import InvalidArgument

ROOT = Path(__file__).resolve().parents[2]


class Example(EnvironmentSettings):
    model_config = environment_config("EXAMPLE_")

    port: Annotated[int, Field(ge=1, le=65535)] = Field(80, description="port | socket")
    level: Literal["low", "high"] = Field("low", description="level")
    verbose: bool = Field(False, description="flag")
    pause_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(0.5, description="pause")
    folder: AbsolutePath | None = Field(None, description="folder")
    word: Annotated[str, Field(pattern="^[a-z]*$"), Allowed("lower-case letters")] = Field("", repr=False)


def test_variables_are_converted_to_the_declared_types():
    environ = {"EXAMPLE_PORT": "81", "EXAMPLE_VERBOSE": "1", "EXAMPLE_FOLDER": "x", "EXAMPLE_LEVEL": "", "OTHER": "1"}
    settings = Example.from_environment(environ)
    assert (settings.port, settings.verbose, settings.folder) == (81, True, Path.cwd() / "x")
    assert settings.level == "low"  # an empty variable counts as unset


def test_names_of_variables_are_case_sensitive():
    assert Example.from_environment({"example_port": "81", "EXAMPLE_Port": "82"}).port == 80


def test_an_override_wins_over_its_variable_and_none_is_no_override():
    settings = Example.from_environment({"EXAMPLE_PORT": "81", "EXAMPLE_LEVEL": "high"}, port=82, level=None)
    assert (settings.port, settings.level) == (82, "high")


@pytest.mark.parametrize(
    "variable, value, message",
    [
        ("EXAMPLE_PORT", "many", "must be an integer from 1 to 65535, got 'many'"),
        ("EXAMPLE_PORT", "0", "must be an integer from 1 to 65535, got '0'"),
        ("EXAMPLE_LEVEL", "medium", "must be low or high, got 'medium'"),
        ("EXAMPLE_VERBOSE", "maybe", "must be true or false, got 'maybe'"),
        ("EXAMPLE_PAUSE_S", "nan", "must be a number of at least 0, got 'nan'"),
        ("EXAMPLE_WORD", "A", "must be lower-case letters, got another value"),
        (
            *("EXAMPLE_FOLDER", "~nosuch/a"),
            "must be a path, got '~nosuch/a': Could not determine home directory.",
        ),
    ],
)
def test_a_refused_value_names_its_variable_and_what_is_allowed(variable, value, message):
    with pytest.raises(InvalidArgument) as refusal:
        Example.from_environment({variable: value})
    assert (refusal.value.field, refusal.value.problem) == (variable, message)


def test_the_table_has_a_row_for_each_variable():
    rows = table(Example).splitlines()[2:]
    assert len(rows) == len(Example.model_fields)
    assert rows[0] == r"| `EXAMPLE_PORT` | `80` | an integer from 1 to 65535 | port \| socket |"
    assert rows[1] == "| `EXAMPLE_LEVEL` | `low` | low or high | level |"


def test_the_documented_tables_equal_the_declarations():
    text = (ROOT / "docs" / "environment.md").read_text("utf-8")
    assert "<!-- settings: server.settings:Settings -->" in text
    assert render(text) == text, "run: python -m contract.environment docs/environment.md"


def test_every_variable_of_the_source_is_documented():
    text = (ROOT / "docs" / "environment.md").read_text("utf-8")
    folders = "benchmarks", "chaos", "clients", "cluster", "contract", "gateway", "python_backends", "server"
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    named = {name for path in files for name in re.findall(r'"(TRIDENT_[A-Z_]*[A-Z])"', path.read_text("utf-8"))}
    assert "TRIDENT_MAX_WAITING" in named and {name for name in named if f"`{name}`" not in text} == set()


def test_triton_stubs_do_not_pay_for_pydantic():
    code = "import contract.generation, contract.backend_settings, sys; print('pydantic' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).strip() == "False"

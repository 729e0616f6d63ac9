"""The lint of Python models: the program that Triton would load."""

from pathlib import Path

import pytest

from build.lint.repository import ERROR
from tests.fakes.small_repository import faults, put, texts


def program_faults(folder: Path) -> list[tuple[str, str]]:
    return [
        (model, message) for severity, model, rule, message in faults(folder) if (severity, rule) == (ERROR, "program")
    ]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (None, "1/model.py is missing"),
        ("class TritonPythonModel\n    pass\n", "does not compile: expected ':' (line 1)"),
        ("x = (\n", "does not compile"),
        ("\0", "1/model.py "),
        ("", "defines no class TritonPythonModel"),
        ("class Model:\n    def execute(self, requests):\n        return []\n", "defines no class TritonPythonModel"),
        ("def f():\n    class TritonPythonModel: ...\n", "defines no class TritonPythonModel"),
        ("class TritonPythonModel:\n    def initialize(self, args): ...\n", "without execute()"),
    ],
)
def test_a_python_model_needs_a_program_that_triton_can_load(tmp_path, program, said):
    file = put(tmp_path, texts()) / "detokenizer" / "1" / "model.py"
    file.unlink() if program is None else file.write_text(program)
    (found,) = program_faults(tmp_path)
    assert found[0] == "detokenizer" and said in found[1]


@pytest.mark.parametrize(
    "program",
    [
        "from package.model import TritonPythonModel\n",
        "from package.model import Model as TritonPythonModel\n",
        "from package.model import *\n",
        "import package\nTritonPythonModel = package.Model\n",
        "class TritonPythonModel(Base): ...\n",
        "try:\n    from a import TritonPythonModel\nexcept ImportError:\n    from b import TritonPythonModel\n",
    ],
)
def test_a_program_may_take_its_class_from_elsewhere(tmp_path, program):
    (put(tmp_path, texts()) / "detokenizer" / "1" / "model.py").write_text(program)
    assert program_faults(tmp_path) == []


def test_a_program_of_another_name_is_the_one_that_is_looked_at(tmp_path):
    put(tmp_path, texts())
    config = tmp_path / "detokenizer" / "config.pbtxt"
    config.write_text(config.read_text() + 'default_model_filename: "other.py"\n')
    assert program_faults(tmp_path) == [
        ("detokenizer", "1/other.py is missing: the Python backend has no program to load")
    ]


def test_every_version_needs_its_program(tmp_path):
    (put(tmp_path, texts()) / "detokenizer" / "2").mkdir()
    ((model, message),) = program_faults(tmp_path)
    assert (model, message.split()[0]) == ("detokenizer", "2/model.py")

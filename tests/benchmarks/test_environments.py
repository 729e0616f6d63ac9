import pytest

from benchmarks import environments
from benchmarks.environments import Environment
from contract.errors import NotFound

pytestmark = pytest.mark.slow  # makes virtual environments


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    return tmp_path


def test_an_environment_is_made_once_and_again_when_other_things_are_wanted(folder):
    wanted = Environment("one", (), (("{python}", "-c", "open('made', 'a').write('x')"),))
    assert not wanted.ready()
    wanted.ensure()
    wanted.ensure()
    assert wanted.ready() and wanted.program("python").exists() and (folder / "one" / "made").read_text() == "x"
    assert not Environment("one", (), (("{python}", "--version"),)).ready()


def test_what_cannot_be_installed_is_named_with_the_installers_own_words():
    missing = Environment("two", (("--no-index", "no-such-package-at-all"),))
    with pytest.raises(NotFound, match="pip install .* failed: ERROR: .*no-such-package-at-all"):
        missing.ensure()
    with pytest.raises(NotFound, match="exit\\(7\\)` failed"):
        Environment("three", (), (("{python}", "-c", "exit(7)"),)).ensure()
    assert not missing.ready()

"""Paths as a shell gets them: one word, unchanged, and no other file."""

import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import Unavailable
from server import shared_memory
from server.shell_paths import SAFE, shell_safe

UNSAFE_NAMES = [
    "a b",
    "it's",
    'say "x"',
    "$HOME",
    "(x)",
    "a&b",
    "a;b",
    "a|b",
    "*",
    "~x",
    "`id`",
    "a\nb",
    "ä",
    "#x",
    "a\\b",
    "!x",
]


def test_a_shell_safe_path_is_returned_unchanged(tmp_path):
    assert shell_safe(Path("/opt/trident-1.0/model_repository"), "models", "trident_1_2_", tmp_path) == Path(
        "/opt/trident-1.0/model_repository"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", UNSAFE_NAMES)
def test_a_path_with_metacharacters_is_linked_and_the_link_is_removed_with_the_shared_memory(tmp_path, name):
    target = tmp_path / "home" / name
    target.mkdir(parents=True)
    (target / "model.py").write_text("found")
    links = tmp_path / "shm"
    links.mkdir()
    link = shell_safe(target, "models", "trident_1_2_", links)
    ran = subprocess.run(["bash", "-c", f" exec cat {link}/model.py"], capture_output=True, text=True, check=False)
    assert ran.stdout == "found", ran.stderr
    assert shell_safe(target, "models", "trident_1_2_", links) == link  # a restart makes it again
    assert shared_memory.clean("trident_1_2_", links) == ["trident_1_2_models"] and target.is_dir()


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1))
def test_a_shell_safe_path_needs_no_quotes(text):
    assert not SAFE.fullmatch(str(Path(text))) or shlex.quote(str(Path(text))) == str(Path(text))


def test_a_link_that_cannot_be_made_is_an_error_that_names_the_path(tmp_path):
    with pytest.raises(Unavailable, match="a b: must be a path without blanks"):
        shell_safe(tmp_path / "a b", "models", "trident_1_2_", tmp_path / "no such folder")

"""The demo model's training text: what is in it, what is not, and which modules are held out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from build.demo_model.corpus import TOPICS, documents, gather, is_held_out, is_included

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def corpus():
    return gather()


@pytest.fixture()
def library(tmp_path):
    """A small standard library on disk."""
    for name in (*(f"module_{number}.py" for number in range(64)), "json/__init__.py"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"name = {name!r}\n")
    return tmp_path


def test_the_corpus_is_megabytes_of_text_of_which_a_few_percent_are_held_out(corpus):
    training = sum(document.size_bytes for document in corpus.training)
    held_out = sum(document.size_bytes for document in corpus.held_out)
    assert training > 4_000_000
    assert 0.02 < held_out / training < 0.12


def test_no_held_out_module_or_text_occurs_in_the_training_side(corpus):
    assert not {d.path for d in corpus.training} & {d.path for d in corpus.held_out}
    assert not {d.text for d in corpus.training} & {d.text for d in corpus.held_out}


def test_gathering_twice_gives_the_same_documents_in_the_same_order(corpus):
    assert gather() == corpus
    for side in (corpus.training, corpus.held_out):
        modules = [document.path for document in side if not document.path.startswith(TOPICS)]
        assert modules == sorted(modules)


def test_tests_tables_installed_packages_and_generated_files_stay_out(corpus):
    paths = [document.path for document in (*corpus.training, *corpus.held_out)]
    assert "collections/__init__.py" in paths and "textwrap.py" in paths and "encodings/utf_8.py" in paths
    for part in (
        "site-packages",
        "dist-packages",
        "/test/",
        "/tests/",
        "encodings/cp",
        "_sysconfigdata",
        "__pycache__",
    ):
        assert not [path for path in paths if part in f"/{path}"]


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("textwrap.py", True),
        ("unittest/case.py", True),
        ("test/test_textwrap.py", False),
        ("lib2to3/tests/test_all.py", False),
        ("encodings/cp1252.py", False),
        ("encodings/aliases.py", True),
        ("site-packages/pip/__init__.py", False),
        ("config-3.11-x86_64-linux-gnu/python-config.py", False),
        ("_sysconfigdata__linux_x86_64-linux-gnu.py", False),
        ("turtledemo/about_turtle.txt", False),
    ],
)
def test_a_path_alone_says_whether_it_is_wanted(path, wanted):
    from pathlib import Path

    assert is_included(Path(path)) is wanted


@given(st.text(min_size=1))
def test_the_split_depends_on_the_path_alone(path):
    assert is_held_out(path) == is_held_out(path)


def test_the_split_survives_additions_to_the_library(library):
    before = gather(library)
    (library / "aaa_new.py").write_text("new = True\n")
    after = gather(library)
    assert {d.path for d in before.held_out} <= {d.path for d in after.held_out}
    assert {d.path for d in before.training} <= {d.path for d in after.training}


def test_a_copy_of_a_training_module_is_not_held_out(library):
    held_out = gather(library).held_out[0]
    (library / "module_0.py").write_text("same = 1\n")
    (library / held_out.path).write_text("same = 1\n")
    corpus = gather(library)
    assert held_out.path not in [document.path for document in corpus.held_out]


def test_topics_of_the_reference_become_prose_and_undecodable_files_are_skipped(library):
    (library / "pydoc_data").mkdir()
    (library / TOPICS).write_text("topics = {'if': 'The *if* statement\\n' 'chooses.', 'and': 'Both.'}\n")
    (library / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9'\n")
    (library / "broken.py").write_bytes(b"name = '\xe9'\n")
    (library / "empty.py").write_text("\n")
    found = {document.path: document.text for document in documents(library)}
    assert found[f"{TOPICS}#if"] == "The *if* statement\nchooses." and found[f"{TOPICS}#and"] == "Both."
    assert "é" in found["latin.py"]
    assert not {"broken.py", "empty.py", TOPICS} & set(found)


def test_a_folder_without_enough_modules_is_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match="too few .py files"):
        gather(tmp_path)

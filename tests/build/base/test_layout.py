"""Where a build finds and leaves its files."""

from pathlib import Path

from build.base import layout


def test_the_root_is_the_checkout():
    assert (layout.ROOT / "pyproject.toml").is_file() and layout.RECIPES.is_dir() and layout.OPTION_TABLES.is_dir()


def test_a_hub_id_becomes_one_folder_name():
    assert layout.fetched_model("meta-llama/Llama-3.1-8B").relative_to(layout.FETCHED).parts == (
        "meta-llama--Llama-3.1-8B",
    )


def test_paths_are_shown_from_the_root_where_they_lie_below_it(tmp_path):
    assert layout.relative(layout.ENGINES / "demo") == Path("engines/demo")
    assert layout.relative(tmp_path) == tmp_path


def test_a_file_appears_whole_in_a_folder_that_is_made(tmp_path):
    path = tmp_path / "a" / "b.json"
    layout.write_whole(path, "one")
    layout.write_whole(path, "two")
    assert path.read_text() == "two" and [file.name for file in path.parent.iterdir()] == ["b.json"]


def test_each_revision_of_a_hub_model_has_a_folder_of_its_own():
    folder = layout.fetched_model("org/model", "refs/pr/1")
    assert folder.relative_to(layout.FETCHED).parts == ("org--model@refs--pr--1",)

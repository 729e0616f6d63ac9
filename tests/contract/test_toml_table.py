"""TOML files into models: what is wrong is named."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from pydantic import BaseModel, ConfigDict, Field, model_validator

from contract.errors import InvalidArgument
from contract.toml_table import checked, read


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int = 1
    kind: str = Field("", alias="class")

    @model_validator(mode="after")
    def _small(self) -> Inner:
        if self.size > 5:
            raise ValueError(f"size: must be at most 5, got {self.size}")
        if self.size < 0:
            raise ValueError("must be of a size")
        if self.size == 0:
            raise ValueError("words of a library")
        return self


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    tables: Mapping[str, Inner] = {}
    listed: tuple[Inner, ...] = ()


def test_a_table_becomes_a_model(tmp_path):
    (tmp_path / "a.toml").write_text('name = "x"\n[tables.one]\nsize = 3\n[[listed]]\nclass = "k"\n')
    found = checked(Outer, read(tmp_path / "a.toml"), "a.toml")
    assert (found.name, found.tables["one"].size, found.listed[0].kind) == ("x", 3, "k")


@pytest.mark.parametrize(
    "table, field, problem",
    [
        ({}, "name", "must be set"),
        ({"name": 3}, "name", "must be a valid string, got 3"),
        ({"name": "", "size": 3}, "size", "is not known: must be one of name, tables, listed"),
        ({"name": "", "tables": {"a": {"x": 1}}}, "tables.a.x", "is not known: must be one of size, class"),
        ({"name": "", "listed": [{}, {"x": 1}]}, "listed.1.x", "is not known: must be one of size, class"),
        ({"name": "", "tables": {"a": {"size": 9}}}, "tables.a.size", "must be at most 5, got 9"),
        ({"name": "", "tables": {"a": {"size": -1}}}, "tables.a", "must be of a size"),
        ({"name": "", "tables": {"a": {"size": 0}}}, "tables.a", "words of a library"),
        ({"name": "", "tables": {"a": 3}}, "tables.a", "must be a table, got 3"),
    ],
)
def test_what_is_wrong_is_named(table: dict, field: str, problem: str):
    with pytest.raises(InvalidArgument) as caught:
        checked(Outer, table, "a.toml")
    assert (caught.value.field, caught.value.problem) == (f"a.toml: {field}", problem)


def test_a_value_that_may_be_a_secret_is_not_shown():
    for wrong, problem in (({"name": 3}, "must be a valid string"), ({"name": "", "listed": 3}, "must be a list")):
        with pytest.raises(InvalidArgument) as caught:
            checked(Outer, wrong, "a.toml", shown=False)
        assert caught.value.problem == problem


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InvalidArgument, match="must be a file that can be read"):
        read(tmp_path / "none.toml")
    bad = tmp_path / "bad.toml"
    for text in ("a = ", "a = " + "[" * 5000, "a = " + "1" * 5000):
        bad.write_text(text)
        with pytest.raises(InvalidArgument, match="must be TOML") as caught:
            read(bad)
        assert caught.value.field == str(bad)

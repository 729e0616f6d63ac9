"""The rules file: defaults, tables, errors that name the field."""

from __future__ import annotations

import os

import pytest

from cluster.scaling.rules import PoolRules, Rules, RulesFile, read
from contract.errors import InvalidArgument
from contract.toml_table import checked


def test_without_a_file_the_defaults_hold():
    rules = read("").of("any")
    assert (rules.min_replicas, rules.max_replicas) == (1, 10)
    assert (rules.up_cooldown_s, rules.down_cooldown_s) == (60, 300)
    assert (rules.least_headroom, rules.most_headroom) == (0.2, 0.4)


def test_a_pool_takes_what_it_does_not_name_from_the_defaults():
    rules = Rules.model_validate({"defaults": {"max_replicas": 4}, "pools": {"big": {"min_replicas": 2}}})
    assert (rules.of("big").min_replicas, rules.of("big").max_replicas) == (2, 4)
    assert rules.of("other").max_replicas == 4


def test_a_class_that_is_not_listed_waits_as_the_next_more_urgent_one():
    rules = PoolRules(wait_s={1: 10.0, 5: 60.0})
    assert [rules.wait_of(priority) for priority in (0, 1, 4, 5, 9)] == [10, 10, 10, 60, 60]


def test_the_ceiling_is_what_the_money_pays_for():
    assert PoolRules(max_replicas=10, replica_hour=2.5, cost_per_hour=10.0).ceiling == 4
    assert PoolRules(max_replicas=3, replica_hour=2.5, cost_per_hour=10.0).ceiling == 3
    assert PoolRules(max_replicas=10, replica_hour=0.1, cost_per_hour=0.3).ceiling == 3
    assert PoolRules(max_replicas=10, replica_hour=1e-320, cost_per_hour=1.0).ceiling == 10


@pytest.mark.parametrize(
    "table, field, problem",
    [
        ({"pools": {"a": {"max_replicas": 0}}}, "pools.a.max_replicas", "must be greater than or equal to 1, got 0"),
        ({"pools": {"a": {"max_replicas": "3"}}}, "pools.a.max_replicas", "must be a valid integer, got '3'"),
        ({"pools": {"a": {"replicas": 3}}}, "pools.a.replicas", "is not known: must be one of min_replicas, "),
        ({"defaults": {"headroom": 3}}, "defaults.headroom", "is not known: must be one of min_replicas, "),
        ({"pool": {}}, "pool", "is not known: must be one of defaults, pools"),
        ({"pools": 3}, "pools", "got 3"),
        ({"pools": {"a": 3}}, "pools.a", "must be a table, got 3"),
        ({"defaults": 3}, "defaults", "must be a table, got 3"),
        ({"defaults": {"min_replicas": 11}}, "defaults.min_replicas", "must be at most max_replicas, got 11"),
        ({"defaults": {"least_headroom": 0.5}}, "defaults.most_headroom", "must be at least least_headroom, got 0.4"),
        ({"defaults": {"cost_per_hour": 3.0}}, "defaults.replica_hour", "must be set with cost_per_hour, got 0"),
        (
            {"defaults": {"cost_per_hour": 3.0, "replica_hour": 2.0, "min_replicas": 2}},
            "defaults.cost_per_hour",
            "must pay for min_replicas and for one replica at least, got 3",
        ),
        ({"defaults": {"wait_s": {}}}, "defaults.wait_s", "must name one class at least, got none"),
        ({"defaults": {"wait_s": {"10": 3.0}}}, "defaults.wait_s.10", "must be less than or equal to 9, got '10'"),
        ({"defaults": {"up_cooldown_s": float("nan")}}, "defaults.up_cooldown_s", "got nan"),
    ],
)
def test_what_is_wrong_is_named(table: dict, field: str, problem: str):
    with pytest.raises(InvalidArgument) as caught:
        checked(Rules, table, "scaling.toml")
    assert caught.value.field == f"scaling.toml: {field}" and problem in caught.value.problem


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(InvalidArgument, match="must be a file that can be read"):
        read(str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_text("a = ")
    with pytest.raises(InvalidArgument, match="must be TOML"):
        read(str(tmp_path / "bad.toml"))


def test_a_changed_file_is_read_again_and_a_wrong_one_changes_nothing(tmp_path, caplog):
    path = tmp_path / "scaling.toml"

    def write(text: str, at_s: int) -> None:
        path.write_text(text)
        os.utime(path, (at_s, at_s))

    write("[defaults]\nmax_replicas = 3", 1)
    file = RulesFile(str(path))
    assert file.rules.of("").max_replicas == 3
    write("[defaults]\nmax_replicas = 5", 2)
    file.refresh()
    assert file.rules.of("").max_replicas == 5
    write("[defaults]\nmax_replicas = -5", 3)
    file.refresh()
    file.refresh()
    assert file.rules.of("").max_replicas == 5
    assert sum("stay as they were" in line for line in caplog.messages) == 1
    path.unlink()
    file.refresh()
    assert file.rules.of("").max_replicas == 5

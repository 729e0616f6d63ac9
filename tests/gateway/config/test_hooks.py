"""Hooks in the configuration file."""

from pathlib import Path

import pytest

from contract.errors import InvalidArgument
from gateway.config import policy
from tests.gateway.config.test_configuration import ALICE, keys, read


def test_hooks_keep_the_order_of_the_file():
    read = policy.read("f", {"hooks": {"b": {"use": "x", "tenants": ["acme"]}, "a": {"use": "y:z"}}}, {})
    assert list(read.hooks) == ["b", "a"] and read.hooks["b"].tenants == ("acme",)
    assert read.hooks["a"].on_failure == "closed" and read.hooks["a"].timeout_ms == 100.0


@pytest.mark.parametrize(
    "table, problem",
    [
        ({}, "hooks.a.use: is missing"),
        ({"use": ""}, "hooks.a.use: "),
        ({"use": "x", "timeout_ms": 0.0}, "hooks.a.timeout_ms: "),
        ({"use": "x", "on_failure": "ajar"}, "hooks.a.on_failure: .*'open' or 'closed'"),
        ({"use": "x", "tenants": "acme"}, "hooks.a.tenants: "),
        ({"use": "x", "timeout": 5}, "hooks.a.timeout: is not known: must be one of use, options"),
    ],
)
def test_wrong_fields_are_named(table: dict, problem: str):
    with pytest.raises(InvalidArgument, match=problem):
        policy.read("f", {"hooks": {"a": table}}, {})


def test_names_of_tenants_must_exist(tmp_path: Path):
    hook = '[hooks.a]\nuse = "x"\ntenants = ["{name}"]\n'
    for name in ("o0", "o0/t", "o0/t/k", "o0/t/made-later"):
        assert read(tmp_path, keys(ALICE) + hook.format(name=name)).policy.hooks["a"].tenants == (name,)
    assert read(tmp_path, '[tracing]\ncontent = ["anonymous"]').policy.tracing.content == ("anonymous",)
    for text in (keys(ALICE) + hook.format(name="o1"), keys(ALICE) + hook.format(name="o0/s"), hook.format(name="o0")):
        with pytest.raises(InvalidArgument, match="hooks.a.tenants: must be organisations, teams or keys of the file"):
            read(tmp_path, text)

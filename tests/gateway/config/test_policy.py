"""The rules of the configuration file, read from its table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from contract.errors import InvalidArgument
from gateway.config import policy, tenants
from gateway.config.policy import AdmissionRules, DegradationRules, OverflowTarget, Policy, PoolRules
from gateway.config.release import RollbackRules
from gateway.config.samples import CheckRules

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read(environ: dict[str, str] | None = None, **table: Any) -> Policy:
    return policy.read("file.toml", table, environ or {})


def test_an_empty_file_has_the_documented_defaults():
    rules = read()
    assert rules.admission == AdmissionRules() and rules.degradation is None and rules.shadow is None
    assert (rules.admission.tenant_share, rules.admission.quantum_tokens) == (0.8, policy.QUANTUM_TOKENS)


def test_tables_of_other_modules_are_ignored():
    assert read(orgs={}, salt="00") == Policy()


def test_one_overflow_name_is_a_tuple_of_it():
    target = {"pool": "p"}
    one = read(degradation={"overflow": "a"}, overflow={"a": target})
    several = read(degradation={"overflow": ["b", "a"]}, overflow={"a": target, "b": target})
    assert one.degradation.overflow == ("a",) and several.degradation.overflow == ("b", "a")


def test_a_number_is_the_weight_of_a_pool():
    rules = read(pools={"stable": 95.0, "canary": {"weight": 5, "replicas": "a:1"}}).pools
    assert rules == {"stable": PoolRules(weight=95.0), "canary": PoolRules(weight=5.0, replicas="a:1")}


def test_values_with_a_dollar_come_from_the_environment_and_are_not_shown():
    target = {"url": "https://x/v1", "model": "m", "api_key": "$KEY"}
    rules = read({"KEY": "hush"}, overflow={"far": target})
    assert rules.overflow["far"] == OverflowTarget(url="https://x/v1", model="m", api_key="hush")
    assert "hush" not in repr(rules)


@pytest.mark.parametrize(
    ("table", "field"),
    [
        ({"admission": {"tenant_share": 0.0}}, "admission.tenant_share"),
        ({"admission": {"tenants": 1}}, "admission.tenants"),
        ({"admission": {"max_in_flight_of_class": {"ten": 1}}}, "admission.max_in_flight_of_class.ten"),
        ({"degradation": {"shorter_at": 0.9, "overflow_at": 0.8}}, "degradation"),
        ({"degradation": {"max_tokens": 0}}, "degradation.max_tokens"),
        ({"degradation": {"overflow": "nowhere"}}, "degradation.overflow"),
        ({"overflow": {"a": {"pool": "p", "url": "http://x"}}}, "overflow.a"),
        ({"overflow": {"a": {"url": "http://x"}}}, "overflow.a"),
        ({"overflow": {"a": {"pool": "$UNSET"}}}, "overflow.a.pool"),
        (
            {"overflow": {"a": {"model": "m", "endpoints": {"e": {"url": "http://x", "spend_per_day": 5.0}}}}},
            "overflow.a.endpoints.e",
        ),
        ({"classes": {name: {"priority": 1, "operations": ["chat"]} for name in "ab"}}, "classes"),
        ({"classes": {"日本": {"priority": 1}}}, "classes.日本"),  # a name is also a header's value
        ({"shadow": {"pool": "p"}}, "shadow.fraction"),
        ({"pools": {"p": -1}}, "pools.p.weight"),
        ({"prices": {"replica_hour": -1}}, "prices.replica_hour"),
        ({"prices": {"replica_hour": float("inf")}}, "prices.replica_hour"),
        ({"models": {"m": {"pools": "p", "price": {"input": float("inf")}}}}, "models.m.price.input"),
    ],
)
def test_errors_name_the_file_and_the_field(table: dict[str, Any], field: str):
    with pytest.raises(InvalidArgument) as caught:
        read(**table)
    assert caught.value.field == f"file.toml: {field}"


@pytest.mark.parametrize("path", ["~no-such-user/file", "/run/fi\0le"])
def test_a_path_that_no_file_can_have_is_refused_by_field(path: str):
    for table, field in (
        ({"models": {"m": {"pools": ["p"], "tokenizer": path}}}, "models.m.tokenizer"),
        ({"overflow": {"a": {"url": "http://x", "model": "m", "api_key": f"$file:{path}"}}}, "overflow.a.api_key"),
    ):
        with pytest.raises(InvalidArgument, match="must be a (path|file) that") as caught:
            read(**table)
        assert caught.value.field == f"file.toml: {field}"


def test_pools_that_rules_name_must_exist():
    rules = read(overflow={"a": {"pool": "p"}}, shadow={"pool": "q", "fraction": 0.1})
    policy.check_named("file.toml", rules.pools_used, "pq", "pools")
    with pytest.raises(InvalidArgument, match="shadow.pool"):
        policy.check_named("file.toml", rules.pools_used, "p", "pools")


def test_rules_that_fall_are_refused_in_code_too():
    with pytest.raises(ValueError, match="rise"):
        DegradationRules(shorter_at=0.9, overflow_at=0.8)


def test_the_documented_file_is_valid_and_shows_every_field():
    page = (Path(policy.__file__).parents[2] / "docs/gateway-configuration.md").read_text()
    keys, rules = (block.partition("```")[0] for block in page.split("```toml\n")[1:])
    table = tomllib.loads(keys) | tomllib.loads(rules)
    found = policy.read("file.toml", table, {"UPSTREAM_KEY": "secret"})
    assert len(tenants.read("file.toml", table, {}, found)) == 1 and len(found.models) == 3
    assert found.reuse == policy.ReuseRules() and found.degradation == DegradationRules(overflow=("small",))
    missing = [
        name
        for section in Policy.model_fields
        for name in getattr(getattr(policy, f"{section.title().rstrip('s')}Rules", None), "model_fields", ())
        if f"{name} = " not in rules and f".{name}]" not in rules
    ]
    missing += [name for kind in (RollbackRules, CheckRules) for name in kind.model_fields if f"{name} = " not in rules]
    assert found.releases["next"].rollback == RollbackRules()
    assert not missing


def test_a_summary_needs_a_model_and_other_policies_have_none():
    assert policy.ContextRules(policy="summarise", summary_model="small").summary_tokens == 128
    for wrong in ({"policy": "summarise"}, {"policy": "keep_system", "summary_model": "small"}):
        with pytest.raises(ValidationError, match="summary_model must be set for policy summarise"):
            policy.ContextRules(**wrong)


def test_hooks_keep_the_order_of_the_file():
    hooks = read(hooks={"b": {"use": "x", "tenants": ["acme"]}, "a": {"use": "y:z"}}).hooks
    assert list(hooks) == ["b", "a"] and hooks["b"].tenants == ("acme",)
    assert hooks["a"].on_failure == "closed" and hooks["a"].timeout_ms == 100.0


@pytest.mark.parametrize(
    "table, problem",
    [
        ({}, "hooks.a.use: must be set"),
        ({"use": ""}, "hooks.a.use: "),
        ({"use": "x", "timeout_ms": 0.0}, "hooks.a.timeout_ms: "),
        ({"use": "x", "on_failure": "ajar"}, "hooks.a.on_failure: .*'open' or 'closed'"),
        ({"use": "x", "tenants": "acme"}, "hooks.a.tenants: "),
        ({"use": "x", "timeout": 5}, "hooks.a.timeout: is not known: must be one of use, options"),
    ],
)
def test_wrong_fields_of_hooks_are_named(table: dict, problem: str):
    with pytest.raises(InvalidArgument, match=problem):
        read(hooks={"a": table})

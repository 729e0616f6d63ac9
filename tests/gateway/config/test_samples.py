"""The section of samples: what is wrong is named, and what nobody asked for is off."""

from __future__ import annotations

import pytest

from contract.errors import InvalidArgument
from gateway.config import policy
from gateway.config.configuration import reading
from gateway.config.pools import Pools
from gateway.config.samples import SampleRules


def read(section: dict) -> SampleRules:
    found = policy.read("g.toml", {"samples": section}, {}).samples
    assert found is not None
    return found


def test_nothing_is_kept_without_a_rule():
    assert policy.read("g.toml", {}, {}).samples is None
    assert not read({}).keeps and not read({"checks": {}}).keeps
    assert read({"fraction": 0.1}).keeps and read({"keep": ["length"]}).keeps and read({"ttft_s": 2}).keeps


@pytest.mark.parametrize(
    ("section", "field", "problem"),
    [
        ({"keep": ["lenght"]}, "samples.keep.0", "must be 'failure'"),
        ({"fraction": 2}, "samples.fraction", "less than or equal to 1"),
        ({"patterns": {"T": "("}}, "samples.patterns.T", "valid regular expression"),
        ({"patterns": {"EMAIL": "x"}}, "samples", "got EMAIL"),
        ({"redact": "no.such:thing"}, "samples.redact", "invalid python path"),
        ({"patterns": {"T": "a{99999999999999}"}}, "samples.patterns.T", "must be a regular expression, got 'a{9999"),
        ({"checks": {"refusals": ["(" * 5000 + ")" * 5000]}}, "samples.checks.refusals.0", "must be a regular expr"),
        ({"keep": ["drift"]}, "samples", "keep with drift must have [samples.checks]"),
        ({"sample_characters": 65536, "bytes": 65536}, "samples", "at most an eighth"),
        ({"checks": {"window": 1}}, "samples.checks.window", "must be one of fraction, window_s"),
        ({"days": 0.5}, "samples.days", "greater than or equal to 1"),
    ],
)
def test_what_is_wrong_is_named(section, field, problem):
    with pytest.raises(InvalidArgument) as raised:
        read(section)
    assert raised.value.field == f"g.toml: {field}" and problem in raised.value.problem


@pytest.mark.parametrize(
    ("body", "problem"), [("1 / 0", "ZeroDivisionError: division by zero"), ("raise SystemExit(3)", "SystemExit: 3")]
)
def test_a_module_whose_import_fails_is_named(tmp_path, monkeypatch, body, problem):
    (tmp_path / "broken_redaction.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidArgument) as raised:
        read({"redact": "broken_redaction:shout"})
    assert raised.value.field == "g.toml: samples.redact"
    assert raised.value.problem.startswith("must be MODULE:FUNCTION of a module that can be imported, got 'broken_")
    assert raised.value.problem.endswith(problem)


def test_a_team_opts_in_by_itself():
    key = {"hash": "0" * 64}
    teams = {"in": {"samples": True, "keys": {"k": key}}, "out": {"keys": {"k": {"hash": "1" * 64}}}}
    table = {"salt": "00" * 16, "orgs": {"acme": {"teams": teams}}}
    found = reading("g.toml", table, {}, Pools({"": "127.0.0.1:1"})).keys
    assert [tenant.name for tenant in found.tenants() if tenant.samples] == ["acme/in"]
    teams["out"]["samples"] = 1
    with pytest.raises(InvalidArgument, match=r"teams.out.samples: must be a valid boolean"):
        reading("g.toml", table, {}, Pools({"": "127.0.0.1:1"}))

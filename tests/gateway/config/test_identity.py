"""Section [identity]: what claims lead to, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import toml_table
from contract.errors import InvalidArgument
from gateway.config import configuration
from gateway.config.identity import ClaimRule, LevelRule
from gateway.config.pools import Pools

SECTION = """
[identity.issuers.corp]
issuer = "https://corp.example"
audience = "trident"
team = { claim = "team" }
"""


def rule(**fields: Any) -> ClaimRule:
    return ClaimRule.model_validate(fields)


@pytest.mark.parametrize(
    ("fields", "claims", "found"),
    [
        ({"claim": "a"}, {"a": "x"}, ["x"]),
        ({"claim": "a.b"}, {"a": {"b": ["x", "y"]}}, ["x", "y"]),
        ({"claim": "https://e.org/roles"}, {"https://e.org/roles": ["x"]}, ["x"]),
        ({"claim": "resource_access.my.app.roles"}, {"resource_access": {"my.app": {"roles": ["x"]}}}, ["x"]),
        ({"claim": "a.b"}, {"a.b": "whole", "a": {"b": "nested"}}, ["whole"]),
        ({"claim": "scope"}, {"scope": "openid admin"}, ["openid", "admin"]),
        ({"claim": "a"}, {"a": "not split"}, ["not split"]),
        ({"claim": "a", "prefix": "g/"}, {"a": ["x", "g/y", "g/", "xg/z"]}, ["y"]),
        ({"claim": "a", "equals": ["x", "y"]}, {"a": ["z", "y"]}, ["y"]),
        ({"claim": "a", "equals": "true"}, {"a": True}, ["true"]),
        ({"claim": "a"}, {"a": 7}, ["7"]),
        ({"claim": "a"}, {"a": [None, {}, [], 1.5]}, []),
        ({"claim": "a.b"}, {"a": "x"}, []),
        ({"claim": "a.b"}, {"a": None}, []),
    ],
)
def test_a_rule_finds_texts(fields, claims, found):
    assert rule(**fields).find(claims) == found


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "a.b"]), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["a", "b", "a.b"]), JSON, max_size=3))
def test_any_claims_give_texts_that_begin_and_are_as_the_rule_says(claims: dict[str, Any]) -> None:
    every = rule(claim="a.b").find(claims)
    assert all(isinstance(text, str) and text for text in every)
    assert rule(claim="a.b", equals=["x", "y"]).find(claims) == [text for text in every if text in ("x", "y")]
    assert LevelRule(claim="a.b", names={"x": "other"}).first(claims) == (
        {"x": "other"}.get(every[0], every[0]) if every else ""
    )


def read(text: str) -> configuration.Reading:
    table = toml_table.tomllib.loads(text)
    return configuration.reading("f.toml", table, {}, Pools({"": "h:1"}))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (SECTION.replace('audience = "trident"', ""), "identity.issuers.corp.audience: must be set"),
        (SECTION.replace('"trident"', "[]"), "identity.issuers.corp.audience"),
        (SECTION.replace("https:", "ftp:"), "identity.issuers.corp.issuer"),
        (SECTION + 'algorithms = "none"', "identity.issuers.corp.algorithms.0: must be 'RS256'"),
        (SECTION + 'algorithms = ["RS256", "HS256"]', "identity.issuers.corp.algorithms.1"),
        (SECTION + 'jwks_url = "https://a/k"\njwks_file = "/k"', "must have jwks_url or jwks_file, not both"),
        (SECTION.replace("team = ", "group = "), "identity.issuers.corp.group: is not known: must be one of issuer"),
        (SECTION.replace('{ claim = "team" }', "{}"), "team: must be a text, or a table with claim"),
        (SECTION.replace("team = ", "key = "), "must have a rule team"),
        (SECTION + SECTION.replace("corp]", "two]"), "must have different issuers, got https://corp.example twice"),
        (
            SECTION + 'jwks_file = "~no-such-user/k"',
            "jwks_file: must be a path that a file can have, got '~no-such-user/k'",
        ),
        (
            SECTION + 'ca_file = "/k\\u0000"',
            "ca_file: must be a path that a file can have, got '/k\\x00': it has a NUL",
        ),
        ("[identity]\nmax_age_s = 0", "identity.max_age_s"),
        ('[identity]\ndefault_team = "acme"', "identity.default_team"),
        ('[identity]\ndefault_team = "acme/none"\n' + SECTION, "must be a team of the file, got 'acme/none'"),
    ],
)
def test_what_is_wrong_is_named(text, problem):
    with pytest.raises(InvalidArgument) as caught:
        read(text)
    assert problem in str(caught.value) and str(caught.value).startswith("f.toml: identity")


TEAMS = """
[identity]
default_team = "guests/all"
[orgs.acme]
max_in_flight = 7
[orgs.acme.teams.research]
tokens_per_minute = 100
models = ["small"]
[orgs.guests]
max_in_flight = 3
[orgs.guests.teams.all]
tokens_per_minute = 10
priority = 5
"""


def test_an_unknown_team_is_refused_or_has_the_limits_of_the_default():
    found = read(TEAMS + SECTION).keys.orgs
    known = found.member("acme", "research", "corp:alice", "guests/all")
    assert (known.models, known.priority) == (("small",), 1)
    assert [(level.name, level.limits.max_in_flight, level.limits.tokens_per_minute) for level in known.levels] == [
        ("acme", 7, None),
        ("acme/research", None, 100),
        ("acme/research/corp:alice", None, None),
    ]
    assert found.member("acme", "sales", "k", "") is None and found.member("new", "team", "k", "") is None
    guest = found.member("acme", "sales", "k", "guests/all")  # of a known organisation, whose limits hold
    assert (guest.name, guest.priority, guest.levels[0].limits.max_in_flight) == ("acme/sales", 5, 7)
    other = found.member("new", "team", "k", "guests/all")
    assert (other.name, other.levels[0].limits.max_in_flight, other.levels[1].limits.tokens_per_minute) == (
        "new/team",
        3,
        10,
    )


def test_issuers_close_a_gateway_without_keys():
    assert read(TEAMS + SECTION).keyed and not read("").keyed

"""Roles: who manages what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import PermissionDenied, Unauthenticated
from gateway.config.tenant import Level, Tenant
from gateway.identity.principal import Principal, of_tenant

NAMES = st.sampled_from(["acme", "acme2", "acm", "b"])
LEVELS = st.lists(NAMES, min_size=0, max_size=3).map("/".join)


@given(LEVELS, LEVELS)
def test_an_admin_manages_its_level_and_what_is_below_it(own: str, level: str) -> None:
    below = own != "" and level.split("/")[: own.count("/") + 1] == own.split("/")
    assert Principal("tenant_admin", "a", administers=own).manages(level) == below
    assert Principal("operator", "o").manages(level)
    assert not Principal("caller", "c").manages(level)


def test_who_may_not_manage_is_told_what() -> None:
    admin = of_tenant(Tenant("b/d", levels=(Level("b"), Level("b/d"), Level("b/d/e")), administers="b/d"))
    with pytest.raises(PermissionDenied, match="may not manage b/c"):
        admin.check_manages("b/c")
    with pytest.raises(PermissionDenied, match="only operators"):
        admin.check_operator()
    with pytest.raises(Unauthenticated, match="only operators"):
        of_tenant(Tenant()).check_operator()
    Principal("operator", "o").check_operator()


def test_a_tenant_is_named_by_its_key() -> None:
    levels = (Level("a"), Level("a/b"), Level("a/b/c"))
    assert of_tenant(Tenant("a/b", levels=levels)) == Principal("caller", "key a/b/c", Tenant("a/b", levels=levels))
    assert of_tenant(Tenant()).name == "anonymous" and of_tenant(Tenant()).levels == ()
    assert of_tenant(Tenant("a/b", levels=levels, administers="a")).role == "tenant_admin"

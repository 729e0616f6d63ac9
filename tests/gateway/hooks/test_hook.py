"""What a failed call means, by the hook's rule, and what the log says of it."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import CollectorRegistry

from contract.errors import PermissionDenied, Unavailable
from gateway.config.hooks import HookRules
from gateway.config.tenant import Level, Tenant
from gateway.hooks.hook import HookFailed, HookMetrics, LoadedHook, WrongValue
from tests.gateway.hooks.sample_hooks import FILTERS

SAMPLES = "tests.gateway.hooks.sample_hooks"


def loaded(kind: str = "Raises", **rules: object) -> LoadedHook:
    made = HookRules(use=f"{SAMPLES}:Output", options={"kind": kind}, **{"timeout_ms": 5000.0, **rules})
    return LoadedHook("one", made, HookMetrics(CollectorRegistry()))


async def test_a_failure_is_logged_without_the_text(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.ERROR), pytest.raises(HookFailed):
        await loaded(on_failure="open").call("feed", "private", of=FILTERS["Raises"]())
    assert "KeyError at " in caplog.text and "sample_hooks.py:" in caplog.text and "private" not in caplog.text
    with pytest.raises(Unavailable, match="the hook one of this gateway failed"):
        await loaded().call("feed", "private", of=FILTERS["Raises"]())


async def test_a_refusal_is_no_failure():
    with pytest.raises(PermissionDenied):
        await loaded(on_failure="open").call("feed", "x", of=FILTERS["Forbids"]())


async def test_a_wrong_value_and_a_late_one_are_failures():
    def check(value: object) -> None:
        raise WrongValue("must be something else")

    with pytest.raises(HookFailed):
        await loaded(on_failure="open").call("feed", "x", of=FILTERS["Nonsense"](), check=check)
    with pytest.raises(HookFailed):
        await loaded(on_failure="open", timeout_ms=1.0).call("feed", "x", of=FILTERS["Waits"]())


async def test_a_timeout_within_a_hook_is_an_error_of_its_own(caplog: pytest.LogCaptureFixture):
    class Asks:
        def feed(self, text: str) -> str:
            raise TimeoutError("the database")

    with caplog.at_level(logging.ERROR), pytest.raises(HookFailed):
        await loaded(on_failure="open").call("feed", "x", of=Asks())
    assert "TimeoutError at " in caplog.text and "no answer within" not in caplog.text


def test_a_hook_serves_the_levels_that_it_names():
    tenant = Tenant("acme/research", levels=(Level("acme"), Level("acme/research"), Level("acme/research/alice")))
    named = [(), ("acme",), ("acme/research",), ("acme/research/alice",), ("other", "acme/sales")]
    assert [loaded(tenants=one).serves(tenant) for one in named] == [True, True, True, True, False]

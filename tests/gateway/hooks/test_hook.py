"""What a hook may be, what a failed call of it means by its rule, and what the log says of it."""

from __future__ import annotations

import logging
from importlib import metadata

import pytest
from prometheus_client import CollectorRegistry

from contract.errors import InvalidArgument, PermissionDenied, Unavailable
from gateway.config.policy import HookRules
from gateway.config.tenant import Level, Tenant
from gateway.hooks import hook
from gateway.hooks.hook import HookFailed, HookMetrics, LoadedHook, WrongValue
from tests.gateway.hooks import sample_hooks
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


@pytest.mark.parametrize(
    "use, options, problem",
    [
        ("nothing", {}, "hooks.one.use: must be module:attribute, or an entry point"),
        ("no.such:Hook", {}, "hooks.one.use: 'no.such:Hook' cannot be imported: ModuleNotFoundError"),
        (f"{SAMPLES}:Missing", {}, "hooks.one.use: .* cannot be imported: AttributeError"),
        (f"{SAMPLES}:", {}, "hooks.one.use: must be module:attribute"),
        (f"{SAMPLES}:Nothing", {}, "hooks.one.use: .* at least one of the methods authenticate, request, output, end"),
        (f"{SAMPLES}:broken", {}, "hooks.one.use: .* cannot be made: OSError: no such database"),
        (f"{SAMPLES}:Upper", {"sufix": "!"}, "hooks.one.options: .*unexpected keyword argument 'sufix'"),
        (f"{SAMPLES}:observer", {"suffix": "!"}, "hooks.one.options: must be left out"),
        (f"{SAMPLES}:ENDED", {}, "hooks.one.options: .* cannot be made: TypeError"),
    ],
)
def test_what_cannot_be_loaded_is_named(use: str, options: dict, problem: str):
    with pytest.raises(InvalidArgument, match=problem):
        hook.load("one", HookRules(use=use, options=options))


def test_classes_objects_and_entry_points_are_loaded(monkeypatch: pytest.MonkeyPatch):
    made = hook.load("one", HookRules(use=f"{SAMPLES}:Upper", options={"suffix": "!"}))
    assert isinstance(made, sample_hooks.Upper) and made.suffix == "!"
    assert hook.load("one", HookRules(use=f"{SAMPLES}:observer")) is sample_hooks.observer
    entry = metadata.EntryPoint("upper", f"{SAMPLES}:Upper", hook.GROUP)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [entry] if group == hook.GROUP else [])
    assert isinstance(hook.load("one", HookRules(use="upper")), sample_hooks.Upper)
    with pytest.raises(InvalidArgument, match=r"\(upper\), got 'lower'"):
        hook.load("one", HookRules(use="lower"))

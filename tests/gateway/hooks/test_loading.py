"""Names of hooks: what they may name, and what is said of those that name nothing."""

from __future__ import annotations

from importlib import metadata

import pytest

from contract.errors import InvalidArgument
from gateway.config.hooks import HookRules
from gateway.hooks import loading
from tests.gateway.hooks import sample_hooks

SAMPLES = "tests.gateway.hooks.sample_hooks"


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
        loading.load("one", HookRules(use=use, options=options))


def test_classes_objects_and_entry_points_are_loaded(monkeypatch: pytest.MonkeyPatch):
    made = loading.load("one", HookRules(use=f"{SAMPLES}:Upper", options={"suffix": "!"}))
    assert isinstance(made, sample_hooks.Upper) and made.suffix == "!"
    assert loading.load("one", HookRules(use=f"{SAMPLES}:observer")) is sample_hooks.observer
    entry = metadata.EntryPoint("upper", f"{SAMPLES}:Upper", loading.GROUP)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [entry] if group == loading.GROUP else [])
    assert isinstance(loading.load("one", HookRules(use="upper")), sample_hooks.Upper)
    with pytest.raises(InvalidArgument, match=r"\(upper\), got 'lower'"):
        loading.load("one", HookRules(use="lower"))

"""Prompts by name and version: which version a request gets, rollbacks, and files that change."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import InvalidArgument, NotFound
from gateway.config.tenant import Level, Tenant
from gateway.prompts.registry import Registry, precedence, roll_back
from tests.gateway.running import until

TEXT = '[[messages]]\nrole = "system"\ncontent = "{}"\n'


def put(folder: Path, name: str, version: str, text: str = "") -> None:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / f"{version}.toml").write_text(text or TEXT.format(version))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for version in ("1.0.0", "1.2.0", "1.10.0", "2.0.0-rc.1"):
        put(tmp_path, "support", version)
    return tmp_path


def version_of(registry: Registry, selector: str | None, caller: str = "", name: str = "support") -> str:
    return registry.find(name, selector, Tenant(), caller)[0]


def test_a_selector_names_the_newest_version_that_it_begins(folder: Path):
    registry = Registry(folder)
    assert registry.problems == []
    found = {selector: version_of(registry, selector) for selector in (None, "1", "1.2", "1.2.0", "latest", "2")}
    newest = "1.10.0"
    assert found == {None: newest, "1": newest, "1.2": "1.2.0", "1.2.0": "1.2.0", "latest": newest, "2": "2.0.0-rc.1"}
    assert version_of(registry, None, name="support@1.2") == "1.2.0"
    for selector, error in (("3", InvalidArgument), ("1.2.1", InvalidArgument), ("newest", InvalidArgument)):
        with pytest.raises(error, match=r"prompt\.version: must be one of"):
            version_of(registry, selector)
    with pytest.raises(InvalidArgument, match=r"prompt\.id: must be one of support, got 'other'"):
        version_of(registry, None, name="other")
    with pytest.raises(InvalidArgument, match="left out beside a version in the id"):
        version_of(registry, "1", name="support@1")


@given(st.lists(st.sampled_from(("1.0.0-alpha", "1.0.0-alpha.1", "1.0.0-2", "1.0.0", "1.0.1", "1.1.0", "2.0.0"))))
def test_versions_have_the_order_of_semantic_versions(texts):
    order = ("1.0.0-2", "1.0.0-alpha", "1.0.0-alpha.1", "1.0.0", "1.0.1", "1.1.0", "2.0.0")
    assert sorted(texts, key=precedence) == sorted(texts, key=order.index)


def test_weights_divide_callers_and_each_stays_at_its_version(folder: Path):
    (folder / "support" / "release.toml").write_text('weights = { "1.0.0" = 3, "1.2.0" = 1 }')
    registry = Registry(folder)
    callers = [f"caller {number}" for number in range(2000)]
    first = {caller: version_of(registry, None, caller) for caller in callers}
    assert {caller: version_of(registry, None, caller) for caller in callers} == first
    assert Counter(first.values())["1.2.0"] == pytest.approx(500, abs=80)
    assert set(Counter(version_of(registry, None) for _ in range(200))) == {"1.0.0", "1.2.0"}
    assert version_of(registry, "latest") == "1.10.0"
    # A larger weight of the newer version moves callers to it and none away from it.
    (folder / "support" / "release.toml").write_text('weights = { "1.0.0" = 1, "1.2.0" = 1 }')
    registry.read()
    later = {caller: version_of(registry, None, caller) for caller in callers}
    assert all(later[caller] == "1.2.0" for caller in callers if first[caller] == "1.2.0")


def test_a_rollback_withdraws_the_newest_version_and_keeps_the_file(folder: Path):
    release = folder / "support" / "release.toml"
    release.write_text('# why\nweights = { "1.2.0" = 9, "1.10.0" = 1 }\n')
    registry = Registry(folder)
    assert roll_back(folder, "support").shares == {"1.2.0": 1.0}
    assert release.read_text().startswith("# why\n")
    registry.read()
    assert {version_of(registry, selector) for selector in (None, "latest", "1")} == {"1.2.0"}
    assert version_of(registry, "1.10.0") == "1.10.0"  # whoever names it exactly
    assert roll_back(folder, "support").served == ["1.0.0"]
    with pytest.raises(InvalidArgument, match="must have a served version that is older than 1.0.0"):
        roll_back(folder, "support")
    assert roll_back(folder, "support", "1.10.0").served == ["1.0.0", "1.2.0", "1.10.0"]
    with pytest.raises(InvalidArgument, match="--to: must be one of"):
        roll_back(folder, "support", "7.0.0")
    with pytest.raises(NotFound):
        roll_back(folder, "other")


def test_a_file_that_cannot_be_used_leaves_what_was_read_of_it(folder: Path):
    registry = Registry(folder)
    put(folder, "support", "1.10.0", "messages = 1")
    put(folder, "support", "1.11.0", "messages = 1")
    put(folder, "support", "later")
    put(folder, "other", "1.0.0")
    (folder / "support" / "release.toml").write_text('weights = { "9.0.0" = 1 }')
    registry.read()
    assert len(registry.problems) == 4
    assert version_of(registry, None) == "1.10.0"
    assert version_of(registry, None, name="other") == "1.0.0"
    os.remove(folder / "other" / "1.0.0.toml")
    registry.read()
    with pytest.raises(InvalidArgument):
        version_of(registry, None, name="other")


def test_a_prompt_may_be_of_some_tenants_only(folder: Path):
    put(folder, "secret", "1.0.0", 'tenants = ["acme"]\n' + TEXT.format("x"))
    registry = Registry(folder)
    acme = Tenant("acme/research/alice", levels=(Level("acme"), Level("acme/research"), Level("acme/research/alice")))
    assert registry.find("secret", None, acme, "")[0] == "1.0.0"
    with pytest.raises(InvalidArgument, match="one of support, got 'secret'"):
        registry.find("secret", None, Tenant("other"), "")


async def test_a_changed_folder_is_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gateway.prompts.registry.POLL_S", 0.01)
    registry = Registry(folder)
    watching = asyncio.create_task(registry.watch())
    put(folder, "support", "3.0.0")
    await until(lambda: "3.0.0" in registry.prompts["support"].versions)
    watching.cancel()
    assert version_of(registry, "latest") == "3.0.0"


def test_a_rollback_leaves_withdrawn_what_was_withdrawn_before(folder: Path):
    put(folder, "support", "1.11.0")
    (folder / "support" / "release.toml").write_text('withdrawn = ["1.2.0", "2.0.0-rc.1"]')
    assert roll_back(folder, "support").served == ["1.0.0", "1.10.0"]
    assert roll_back(folder, "support").served == ["1.0.0"]
    assert Registry(folder).prompts["support"].served == ["1.0.0"]


def test_a_rollback_needs_every_file_of_the_prompt(folder: Path):
    put(folder, "other", "1.0.0", "messages = 1")
    put(folder, "support", "1.11.0", "messages = 1")
    for name in ("support", "other"):
        with pytest.raises(InvalidArgument, match="must be a prompt whose files can all be used, got .*messages: must"):
            roll_back(folder, name)
    os.remove(folder / "support" / "1.11.0.toml")
    assert roll_back(folder, "support").shares == {"1.2.0": 1.0}


async def test_a_reading_that_fails_is_tried_again(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gateway.prompts.registry.POLL_S", 0.01)
    registry, failed = Registry(folder), asyncio.Event()

    def fails(*arguments: object) -> None:
        monkeypatch.undo()
        failed.set()
        raise OSError("the folder is gone")

    monkeypatch.setattr("gateway.prompts.registry._read", fails)
    watching = asyncio.create_task(registry.watch())
    put(folder, "support", "3.0.0")
    await until(lambda: "3.0.0" in registry.prompts["support"].versions)
    assert failed.is_set()
    watching.cancel()

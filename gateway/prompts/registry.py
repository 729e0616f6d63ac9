"""Prompt templates by name and version: a folder of ``NAME/VERSION.toml``; ``NAME/release.toml`` says what is served.

The folder is read again when it changes. A file that cannot be used changes nothing: what was read of it before stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, TypeVar

import tomlkit
from pydantic import Field
from tomlkit.exceptions import TOMLKitError

from contract import toml_table
from contract.errors import InvalidArgument, NotFound
from gateway.config.rules import Rules
from gateway.config.settings import variable
from gateway.config.tenant import Tenant
from gateway.prompts.template import Names, Template

POLL_S = 0.5
RELEASE = "release"  # its file, beside those of the versions
LATEST = "latest"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NUMBER = r"(?:0|[1-9][0-9]{0,8})"
_VERSION = re.compile(rf"({_NUMBER})\.({_NUMBER})\.({_NUMBER})(?:-([0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*))?")
_SELECTOR = re.compile(rf"{LATEST}|{_NUMBER}(\.{_NUMBER})?|{_VERSION.pattern}")
_LOG = logging.getLogger(__name__)
_Read = TypeVar("_Read", bound=Rules)


def precedence(text: str) -> tuple[int, int, int, bool, list[tuple[bool, int, str]]] | None:
    """Return what orders semantic versions; None for a text that is none."""
    found = _VERSION.fullmatch(text)
    if found is None:
        return None
    major, minor, patch, before = found.groups()
    parts = before.split(".") if before else []  # numbers come before words, a pre-release before its version
    keys = [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]
    return int(major), int(minor), int(patch), not parts, keys


class Release(Rules):
    """weights: shares of requests that name no version. withdrawn: versions served only where exactly named."""

    weights: Mapping[str, Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]] = {}
    withdrawn: Names = ()


@dataclass(frozen=True)
class Prompt:
    """One prompt. versions: by their text, oldest first."""

    name: str
    versions: Mapping[str, Template]
    release: Release

    def of(self, tenant: Tenant | None) -> Prompt:
        """Return the prompt with the versions that a tenant may use; all of them for None."""
        if tenant is None:
            return self
        names = {tenant.name, *(level.name for level in tenant.levels)}
        usable = {text: one for text, one in self.versions.items() if not one.tenants or names & {*one.tenants}}
        return self if len(usable) == len(self.versions) else replace(self, versions=usable)

    @cached_property
    def served(self) -> list[str]:
        """The versions that are not withdrawn, oldest first."""
        return [text for text in self.versions if text not in self.release.withdrawn]

    @cached_property
    def shares(self) -> dict[str, float]:
        """The share of each version in requests that name none; the latest alone without weights."""
        weights = {text: self.release.weights.get(text, 0.0) for text in self.served}
        total = sum(weights.values())
        return {text: weight / total for text, weight in weights.items() if weight} if total else {self.latest(): 1.0}

    def latest(self, start: str = "") -> str:
        """Return the newest served version that begins with ``start``; a pre-release only where there is no other."""
        found = [text for text in self.served if text.startswith(start)]
        if not found:
            problem = f"must be one of the versions {', '.join(self.versions)}, got {start.rstrip('.') or LATEST!r}"
            raise InvalidArgument("prompt.version", f"{problem}, of which none is served")
        return ([text for text in found if "-" not in text] or found)[-1]

    def pick(self, selector: str | None, caller: str) -> str:
        """Return the version of ``1.2.0``, ``1.2``, ``1`` or ``latest``; None: a caller's by the shares, "" draws."""
        if selector is None:
            drawn = random.Random(f"{self.name}\n{caller}".encode(errors="replace") if caller else None)
            return drawn.choices([*self.shares], [*self.shares.values()])[0]
        if selector in self.versions:
            return selector
        if not _SELECTOR.fullmatch(selector) or precedence(selector):
            there = f"must be one of {', '.join(self.versions)}, the beginning of one such as 1, or {LATEST}"
            raise InvalidArgument("prompt.version", f"{there}, got {selector!r:.100}")
        return self.latest("" if selector == LATEST else f"{selector}.")


class Registry:
    """The prompts of a folder. problems: what is wrong in its files, each with the file's name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prompts: Mapping[str, Prompt] = {}
        self.problems: list[str] = []
        self._seen: object = None
        self.read()

    def read(self) -> None:
        """Read all files; of one that cannot be used the last good reading stays."""
        seen, problems = self._signature(), list[str]()
        found: dict[str, Prompt] = {}
        for folder in sorted({path.parent for path in self.folder.glob("*/*.toml")}):
            if _NAME.fullmatch(folder.name):
                prompt = _read(folder, self.prompts.get(folder.name) or Prompt(folder.name, {}, Release()), problems)
                found |= {folder.name: prompt} if prompt.versions else {}
            elif not folder.name.startswith("."):
                problems.append(f"{folder}: must be named with letters, digits, '.', '_' and '-', at most 64")
        if not self.folder.is_dir():
            found, problems = dict(self.prompts), [f"{self.folder}: must be a folder that can be read"]
        for problem in problems:
            if problem not in self.problems:
                _LOG.error("the prompt stays as it was: %s", problem)
        self.prompts, self.problems, self._seen = found, problems, seen

    def find(self, name: str, selector: str | None, tenant: Tenant | None, caller: str) -> tuple[str, Template]:
        """Return the version and its template. name: may be NAME@1.2.0. Raises: InvalidArgument."""
        base, at, own = name.partition("@")
        if at and selector is not None:
            raise InvalidArgument("prompt.version", f"must be left out beside a version in the id, got {name!r:.100}")
        prompt = self.prompts[base].of(tenant) if base in self.prompts else None
        if prompt is None or not prompt.versions:
            there = ", ".join(one.name for one in self.prompts.values() if one.of(tenant).versions)
            raise InvalidArgument("prompt.id", f"must be one of {there or 'none'}, got {base!r:.100}")
        version = prompt.pick(own if at else selector, caller)
        return version, prompt.versions[version]

    async def watch(self) -> None:
        """Read the folder whenever it changes, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                if await asyncio.to_thread(self._signature) != self._seen:
                    await asyncio.to_thread(self.read)
                    _LOG.info("the prompts were read again: %d, %d problems", len(self.prompts), len(self.problems))
            except OSError as exc:  # a folder was removed while it was read
                _LOG.error("the prompts stay as they were: %s", exc)

    def _signature(self) -> object:
        found = []
        for path in self.folder.glob("*/*.toml"):
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((path, status.st_mtime_ns, status.st_size, status.st_ino))
        return sorted(found)


def opened(folder: Path) -> Registry:
    """Return the prompts of TRIDENT_GATEWAY_PROMPTS. Raises InvalidArgument: one of its files cannot be used."""
    registry = Registry(folder)
    if registry.problems:
        raise InvalidArgument(variable("prompts"), f"must hold valid prompts: {registry.problems[0]}")
    return registry


def roll_back(folder: Path, name: str, to: str | None = None) -> Prompt:
    """Withdraw the newest served version of a prompt, or all newer than ``to``; return the prompt then.

    Without ``to``, what was withdrawn before stays withdrawn. Raises: NotFound; InvalidArgument, also for a file.
    """
    registry = Registry(folder)
    for problem in registry.problems:
        if problem.startswith(f"{folder / name}{os.sep}"):  # a gateway may serve an earlier reading of it
            raise InvalidArgument("NAME", f"must be a prompt whose files can all be used, got {name}: {problem}")
    prompt = registry.prompts.get(name)
    if prompt is None:
        raise NotFound(f"the prompt {name!r:.100} does not exist in {folder}")
    order, before = list(prompt.versions), frozenset[str]()
    if to is None:
        newest = max((prompt.latest(), *prompt.shares), key=order.index)
        older = [text for text in prompt.served if order.index(text) < order.index(newest)]
        if not older:
            raise InvalidArgument("NAME", f"must have a served version that is older than {newest}, got {name}")
        to, before = older[-1], frozenset(prompt.release.withdrawn)
    if to not in order:
        raise InvalidArgument("--to", f"must be one of {', '.join(order)}, got {to!r:.100}")
    withdrawn = tuple(text for text in order if text in before or order.index(text) > order.index(to))
    path = folder / name / f"{RELEASE}.toml"
    fresh = path.with_suffix(".new")
    try:
        document = tomlkit.parse(path.read_text("utf-8")) if path.exists() else tomlkit.document()
        document["withdrawn"] = list(withdrawn)
        fresh.write_text(tomlkit.dumps(document), "utf-8")
        os.replace(fresh, path)
    except (OSError, TOMLKitError) as exc:
        raise InvalidArgument(str(path), f"cannot be changed: {exc}") from exc
    return replace(prompt, release=prompt.release.model_copy(update={"withdrawn": withdrawn}))


def _read(folder: Path, old: Prompt, problems: list[str]) -> Prompt:
    """Return the prompt of a folder; of a file that cannot be used what ``old`` has. problems: is added to."""

    def read(path: Path, kind: type[_Read], before: _Read | None) -> _Read | None:
        try:
            if kind is Template and not precedence(path.stem):
                raise InvalidArgument(str(path), "must be named MAJOR.MINOR.PATCH.toml, such as 1.0.0.toml")
            found = toml_table.checked(kind, toml_table.read(path), str(path))
        except InvalidArgument as exc:
            problems.append(str(exc))
            return before
        if isinstance(found, Template) and before is not None and found != before:
            _LOG.warning("%s changed and kept its version: answers of the same version differ now", path)
        return found

    files = {path.stem: path for path in folder.glob("*.toml") if not path.name.startswith(".")}
    release = read(files.pop(RELEASE), Release, old.release) if RELEASE in files else Release()
    read_all = {text: read(path, Template, old.versions.get(text)) for text, path in files.items()}
    versions = {text: read_all[text] for text in sorted(read_all, key=lambda text: precedence(text) or ())}
    prompt = Prompt(folder.name, {text: one for text, one in versions.items() if one}, release or Release())
    for text in prompt.release.weights.keys() - prompt.versions.keys():
        named = ", ".join(prompt.versions) or "none"
        problems.append(f"{folder / RELEASE}.toml: weights: must name versions of {named}, got {text!r:.100}")
        return replace(prompt, release=old.release)
    return prompt

"""Tasks: a YAML file and a JSONL file of the same name with the cases, in a folder (docs/evals.md)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from contract.errors import InvalidArgument
from evals import checks

FOLDER = Path(__file__).resolve().parent / "tasks"
LM_EVAL, CHAT = "lm-eval", "chat"
# By kind: the fields of a case.
_FIELDS = {
    "schema": ("id", "prompt", "schema"),
    "tools": ("id", "prompt", "tools", "expected"),
    "instructions": ("id", "prompt", "rules"),
}
_OWN = ("model", "messages", "stream", "tools", "tool_choice", "response_format")  # of a request


@dataclass(frozen=True)
class Task:
    """runner: LM_EVAL or CHAT. sha256: over both files. settings: of the YAML file. cases: of the JSONL file."""

    name: str
    kind: str
    about: str
    runner: str
    sha256: str
    settings: Mapping[str, Any]
    cases: Sequence[Mapping[str, Any]]

    @property
    def is_chat(self) -> bool:
        return self.runner == CHAT or self.settings["output_type"] == "generate_until"


def read(folder: Path = FOLDER, names: Sequence[str] = ()) -> list[Task]:
    """Return the tasks of a folder, or those named. Raises InvalidArgument that names file, line and field."""
    known = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    for name in names:
        if name not in known:
            raise InvalidArgument("tasks", f"must be among {', '.join(known) or 'none'} of {folder}, got {name!r}")
    return [_task(known[name]) for name in names or known]


def _task(path: Path) -> Task:
    beside = path.with_suffix(".jsonl")
    try:
        settings, content = yaml.safe_load(path.read_text("utf-8")), beside.read_text("utf-8")
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise InvalidArgument(str(path), f"must be a readable YAML file beside a .jsonl file: {exc}") from exc
    lm_eval = isinstance(settings, dict) and "output_type" in settings
    said = settings.get("metadata", {}) if lm_eval else settings
    kind = said.get("kind") if isinstance(said, dict) else None
    if not isinstance(kind, str) or not (lm_eval or kind in _FIELDS):
        allowed = f"one of {', '.join(_FIELDS)}, or any word in metadata of a task with lm-eval's output_type"
        raise InvalidArgument(f"{path}: kind", f"must be {allowed}, got {kind!r}")
    request = settings.get("request", {})
    if not isinstance(request, dict) or request.keys() & _OWN:
        allowed = f"an object without {', '.join(_OWN)}, which the run sets"
        raise InvalidArgument(f"{path}: request", f"must be {allowed}, got {request!r}")
    fields = ("id",) if lm_eval else _FIELDS[kind]
    cases = [_checked(place, case, fields) for place, case in lines(beside, content)]
    if len({case["id"] for case in cases}) < max(1, len(cases)):
        raise InvalidArgument(f"{beside}: id", "must be there and different in every line")
    digest = hashlib.sha256(path.read_bytes() + content.encode()).hexdigest()
    return Task(path.stem, kind, str(said.get("about", "")), LM_EVAL if lm_eval else CHAT, digest, settings, cases)


def _checked(place: str, case: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    for field in fields:
        if field not in case:
            raise InvalidArgument(f"{place}: {field}", "must be set")
    if not isinstance(case["id"], str):
        raise InvalidArgument(f"{place}: id", f"must be a string, got {case['id']!r}")
    if "rules" in fields:
        if not isinstance(case["rules"], list) or not case["rules"]:
            raise InvalidArgument(f"{place}: rules", f"must be a list of at least one rule, got {case['rules']!r}")
        for rule in case["rules"]:
            checks.checked(f"{place}: rules", rule)
    if "schema" in fields:
        try:
            checks.validator(case["schema"])
        except ValueError as exc:
            problem = str(exc).partition("\n")[0]
            raise InvalidArgument(f"{place}: schema", f"must be a JSON schema of draft 2020-12: {problem}") from exc
    if "expected" in fields and (expected := case["expected"]) is not None:
        if not isinstance(expected, dict) or not expected.keys() >= {"name", "arguments"}:
            problem = f"must be null or an object with name and arguments, got {expected!r}"
            raise InvalidArgument(f"{place}: expected", problem)
    return case


def text(path: Path) -> str:
    """Return the text of a file. Raises InvalidArgument."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidArgument(str(path), f"must be a readable file in UTF-8: {exc}") from exc


def lines(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place of each line of a file's text, ``FILE:NUMBER``, and its JSON object. Raises InvalidArgument."""
    whole = text.removesuffix("\n").split("\n") if text else []  # splitlines would divide texts with U+2028
    for number, line in enumerate(whole, 1):
        place = f"{path}:{number}"
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as exc:
            raise InvalidArgument(place, f"must be a JSON object: {exc}") from exc
        if not isinstance(found, dict):
            raise InvalidArgument(place, f"must be a JSON object, got {type(found).__name__}")
        yield place, found

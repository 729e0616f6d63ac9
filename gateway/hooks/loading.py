"""Find and make the hooks that the configuration names."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any

from contract.errors import InvalidArgument
from gateway.config.hooks import HookRules

GROUP = "trident.gateway.hooks"
METHODS = ("authenticate", "request", "output", "end")


def load(name: str, rules: HookRules) -> Any:
    """Return the object with the methods of a hook. Raises InvalidArgument that names the field."""
    use, field = rules.use, f"hooks.{name}.use"
    entries = {entry.name: entry for entry in metadata.entry_points(group=GROUP)}
    if use not in entries and not re.fullmatch(r"[\w.]+:[\w.]+", use):
        allowed = ", ".join(sorted(entries)) or "none is installed"
        problem = f"must be module:attribute, or an entry point of the group {GROUP} ({allowed}), got {use!r:.200}"
        raise InvalidArgument(field, problem)
    try:
        found: Any = (entries.get(use) or metadata.EntryPoint(name, use, GROUP)).load()
    except Exception as exc:  # of the operator's code, which may raise anything as it is imported
        raise InvalidArgument(field, f"{use!r:.200} cannot be imported: {type(exc).__name__}: {exc}") from exc
    if isinstance(found, type) or not _is_hook(found):
        try:
            found = found(**rules.options)
        except Exception as exc:  # of the operator's code
            field = f"hooks.{name}.options" if isinstance(exc, TypeError | ValueError) else field
            raise InvalidArgument(field, f"{use} cannot be made: {type(exc).__name__}: {exc}") from exc
    elif rules.options:
        raise InvalidArgument(f"hooks.{name}.options", f"must be left out: {use} is neither a class nor a function")
    if not _is_hook(found):
        raise InvalidArgument(field, f"{use} must have at least one of the methods {', '.join(METHODS)}")
    return found


def _is_hook(found: object) -> bool:
    return any(callable(getattr(found, method, None)) for method in METHODS)

"""Hooks in the configuration file: what is called for requests, how long it may take, and what its failure means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.config.rules import LIST, Rules


class HookRules(Rules):
    """One hook; those of a file are called in its order.

    use: name of an entry point of the group ``trident.gateway.hooks``, or ``module:attribute``.
    options: keyword arguments of the class or function that ``use`` names.
    tenants: organisations, teams or keys for whose requests it is called; empty for all.
    timeout_ms: of one call.
    on_failure: ``closed`` refuses the request whose call failed or was late, ``open`` goes on without the hook.
    threads: in which calls of plain functions run.
    max_hangs: calls that do not return, after which the hook is not called any more.
    """

    use: Annotated[str, Field(min_length=1)]
    options: Mapping[str, Any] = {}
    tenants: Annotated[tuple[str, ...], LIST] = ()
    timeout_ms: Annotated[float, Field(gt=0, le=60_000)] = 100.0
    on_failure: Literal["open", "closed"] = "closed"
    threads: Annotated[int, Field(ge=1, le=64)] = 4
    max_hangs: Annotated[int, Field(ge=1, le=1000)] = 3

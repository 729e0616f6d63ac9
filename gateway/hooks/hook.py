"""One hook: its calls in bounded time, what their failures mean, and their metrics."""

from __future__ import annotations

import logging
import re
import time
import traceback
from collections.abc import Callable
from importlib import metadata
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from contract.errors import InvalidArgument, TridentError, Unavailable
from gateway.config.policy import HookRules
from gateway.config.tenant import Tenant
from gateway.hooks.runner import Late, Runner

GROUP = "trident.gateway.hooks"
METHODS = ("authenticate", "request", "output", "end")
SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_LOG = logging.getLogger(__name__)


class HookFailed(Exception):
    """A call of a hook gave nothing that can be used, and the hook's rule is to go on without it."""


class WrongValue(Exception):
    """A method of a hook returned what it may not return."""


class HookMetrics:
    """Metrics of all hooks of a gateway."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("hook", "method")
        text = "Time of a hook's calls, with the way to its thread and back"
        self.seconds = Histogram("trident_gateway_hook_seconds", text, labels, registry=registry, buckets=SECONDS)
        text = "Calls of hooks by result: ok, refused, error, timeout, out"
        self.calls = Counter("trident_gateway_hook_calls", text, (*labels, "result"), registry=registry)
        text = "Calls of hooks that did not return"
        self.hangs = Counter("trident_gateway_hook_hangs", text, ("hook",), registry=registry)
        text = "1 for a hook that is called no more"
        self.out = Gauge("trident_gateway_hook_out", text, ("hook",), registry=registry)


class LoadedHook:
    """A hook of the configuration. Raises: what ``load`` does."""

    def __init__(self, name: str, rules: HookRules, metrics: HookMetrics) -> None:
        self.name, self.rules, self._metrics = name, rules, metrics
        self._found = load(name, rules)
        self._runner = Runner(name, rules.threads, rules.timeout_ms / 1000, metrics.hangs.labels(name).inc)
        self._out = False

    def has(self, method: str) -> bool:
        return callable(getattr(self._found, method, None))

    def serves(self, tenant: Tenant) -> bool:
        """Return whether it is called for the requests of a tenant."""
        return not self.rules.tenants or tenant.within(self.rules.tenants)

    async def call(
        self, method: str, *arguments: Any, of: object = None, check: Callable[[Any], Any] = lambda value: value
    ) -> Any:
        """Return what ``check`` makes of the value of a method.

        of: whose method; None for the hook's own. check: raises WrongValue.
        Raises: the TridentError by which the hook refuses; HookFailed or Unavailable, by the hook's rule, for a call
            that failed.
        """
        began_s, result, problem = time.perf_counter(), "error", ""
        try:
            if self._runner.hangs < self.rules.max_hangs:
                value = check(await self._runner.call(getattr(of or self._found, method), *arguments))
                result = "ok"
                return value
            result, known, self._out = "out", self._out, True
            problem = "" if known else f"{self._runner.hangs} of its calls did not return; it is called no more"
            self._metrics.out.labels(self.name).set(1)
        except TridentError:
            result = "refused"
            raise
        except Late:
            result, problem = "timeout", f"no answer within {self.rules.timeout_ms:g} ms"
        except WrongValue as exc:
            problem = str(exc)
        except Exception as exc:  # of the operator's code; its words may quote a prompt
            frame = traceback.extract_tb(exc.__traceback__)[-1]
            problem = f"{type(exc).__name__} at {frame.filename}:{frame.lineno}"
        finally:
            self._metrics.seconds.labels(self.name, method).observe(time.perf_counter() - began_s)
            self._metrics.calls.labels(self.name, method, result).inc()
        if problem:
            fields = {"hook": self.name, "method": method, "result": result, "rule": self.rules.on_failure}
            _LOG.error("hook failed: %s", problem, extra={"fields": fields})
        if self.rules.on_failure == "closed":
            raise Unavailable(f"the hook {self.name} of this gateway failed, without which no request is served")
        raise HookFailed


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

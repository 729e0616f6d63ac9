"""One hook: its calls in bounded time, what their failures mean, and their metrics."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from contract.errors import TridentError, Unavailable
from gateway.config.hooks import HookRules
from gateway.config.tenant import Tenant
from gateway.hooks import loading
from gateway.hooks.runner import Late, Runner

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
    """A hook of the configuration. Raises: what ``loading.load`` does."""

    def __init__(self, name: str, rules: HookRules, metrics: HookMetrics) -> None:
        self.name, self.rules, self._metrics = name, rules, metrics
        self._found = loading.load(name, rules)
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

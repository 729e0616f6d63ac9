"""Which class a request is in: the one that its caller requests, its API key's, or its operation's; and which priority
that gives it in an engine's queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from contract.errors import InvalidArgument
from contract.priority import NORMAL
from gateway.config.policy import ClassRules
from gateway.config.tenant import LOWEST_PRIORITY, Tenant

HEADER = "x-trident-class"
BATCH = "batch"
_BAND = 1.0 / (LOWEST_PRIORITY + 1)


def classified(classes: Mapping[str, ClassRules], tenant: Tenant, operation: str, requested: str = "") -> Tenant:
    """Return the tenant as admission sees it for one request: with the request's class and its priority.

    operation: of the request; a batch is never in the class of its key. requested: by the caller; "" for none.
    Raises: InvalidArgument for a class that does not exist or that the tenant may not request.
    """
    own = "" if operation == BATCH else tenant.request_class
    default = own or next((name for name, rules in classes.items() if operation in rules.operations), "")
    usual = classes[default].priority if default in classes else tenant.priority
    if requested:
        # Without a list a caller may lower its urgency; without API keys all callers are one tenant.
        may = [
            name
            for name, rules in classes.items()
            if name == default
            or not tenant.levels
            or name in tenant.classes
            or (not tenant.classes and rules.priority >= usual)
        ]
        if requested not in may:
            allowed = f"one of {', '.join(may)}" if may else "left out: there is no class that this caller may request"
            raise InvalidArgument(HEADER, f"must be {allowed}, got {requested!r:.80}")
    rules = classes.get(requested or default)
    if rules is None:
        return replace(tenant, request_class="") if tenant.request_class else tenant
    return replace(tenant, request_class=requested or default, class_rules=rules, priority=rules.priority)


def engine_priority(tenant_class: int, own: float = NORMAL) -> float:
    """Return the engine's priority, 0 to 1. own: the ``request_priority`` that the caller sent, which only lowers it.

    Every class has a tenth of the scale, class 0 the uppermost. A request has the top of its class, as far below it as
    ``own`` is below NORMAL, and never so far that it comes to the next class.
    """
    reduction = 0.9 * _BAND * (1.0 - min(own, NORMAL) / NORMAL)
    return round(1.0 - tenant_class * _BAND - reduction, 6)

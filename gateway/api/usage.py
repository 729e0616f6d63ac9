"""Serve GET /v1/usage and /v1/usage/requests: what requests used and cost, as JSON or CSV."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from contract.errors import InvalidArgument, PermissionDenied
from gateway.api import error_responses
from gateway.identity.principal import Principal
from gateway.service import Service
from gateway.usage import report
from gateway.usage.report import Report

FORMATS = ("json", "csv")
PARAMETERS = {  # of the query, by path
    "/v1/usage": (*report.FILTERS, "format", "group_by"),
    "/v1/usage/requests": (*report.FILTERS, "format", "request_id", "limit", "after"),
}


def level_of(principal: Principal, requested: str) -> str:
    """Return the level whose usage is shown: the requested one, by default all that one may see; "" for all levels.

    Operators see all, a tenant admin what it manages, and a caller its key and, on request, its team.
    Raises: PermissionDenied.
    """
    own = principal.levels[-1].name if principal.levels else ""
    level = requested or ("" if principal.role == "operator" else principal.administers or own)
    team = principal.tenant.name if principal.tenant is not None else own
    if not (principal.manages(level) or level in (own, team)):
        raise PermissionDenied(f"this caller may not see the usage of {level:.200}")
    return level


def routes(service: Service) -> list[Route]:
    """Return the endpoints; none without a usage database."""
    if service.usage is None:
        return []
    path, commit = service.usage.path, service.ledger.commit

    def answered(make: Callable[..., Report], allowed: tuple[str, ...]) -> Callable[[Request], Awaitable[Response]]:
        async def shown(request: Request) -> Any:
            given, policy = dict(request.query_params), service.configuration.policy
            principal = await service.authentication.principal(request.headers)
            for name in given:
                if name not in allowed:
                    raise InvalidArgument(name[:80], f"is not known: must be one of {', '.join(allowed)}")
            if (form := given.get("format", "json")) not in FORMATS:
                raise InvalidArgument("format", f"must be one of {', '.join(FORMATS)}, got {form!r:.80}")
            level = level_of(principal, given.get("tenant", ""))
            await commit()
            made = await asyncio.to_thread(make, [path], given, level, policy.budgets.time_zone)
            if form == "csv":
                return Response(made.csv(), media_type="text/csv; charset=utf-8")
            currency = policy.prices.currency if policy.prices else "USD"
            return {"object": "list", "tenant": level, "currency": currency, **made.more, "data": made.rows}

        return error_responses.answering(shown)

    makers = report.sums, report.requests
    return [Route(at, answered(make, names)) for (at, names), make in zip(PARAMETERS.items(), makers, strict=True)]

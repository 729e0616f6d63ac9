"""Serve GET /v1/usage and /v1/usage/requests: what requests used and cost, as JSON or CSV."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from contract.errors import InvalidArgument, PermissionDenied
from gateway.api import error_responses
from gateway.api.openai_http import chosen
from gateway.identity.principal import Principal
from gateway.service import Service
from gateway.usage import report
from gateway.usage.report import Report

PARAMETERS = {  # of the query, by path
    "/v1/usage": (*report.FILTERS, "format", "group_by"),
    "/v1/usage/requests": (*report.FILTERS, "format", "request_id", "limit", "after"),
}


def level_of(principal: Principal, requested: str) -> str:
    """Return the level whose usage is shown, by default all that one may see ("": all). Raises: PermissionDenied."""
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

    async def shown(at: str, make: Callable[..., Report], request: Request) -> Any:
        given, policy = dict(request.query_params), service.configuration.policy
        principal = await service.authentication.principal(request.headers)
        for name in given:
            if name not in PARAMETERS[at]:
                raise InvalidArgument(name[:80], f"is not known: must be one of {', '.join(PARAMETERS[at])}")
        form = chosen(request, "format", "json", "csv")
        level = level_of(principal, given.get("tenant", ""))
        await commit()
        made = await asyncio.to_thread(make, [path], given, level, policy.budgets.time_zone)
        if form == "csv":
            return Response(made.csv(), media_type="text/csv; charset=utf-8")
        currency = policy.prices.currency if policy.prices else "USD"
        return {"object": "list", "tenant": level, "currency": currency, **made.more, "data": made.rows}

    makers = zip(PARAMETERS, (report.sums, report.requests), strict=True)
    return [Route(at, error_responses.answering(partial(shown, at, make))) for at, make in makers]

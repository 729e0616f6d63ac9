"""Serve GET /v1/usage and /v1/usage/requests: what requests used and cost, as JSON or CSV."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from contract.errors import InvalidArgument, PermissionDenied, TridentError
from gateway.api import error_responses
from gateway.identity.principal import Principal
from gateway.service import Service
from gateway.usage import report
from gateway.usage.store import SUMS, UsageRecord

FORMATS = ("json", "csv")
_RECORD = ("number", "time", *UsageRecord._fields[1:], "cost")
Rows = tuple[list[dict[str, Any]], Sequence[str], dict[str, Any]]  # with their columns, and further fields
Handle = Callable[[Mapping[str, str], str], Awaitable[Rows]]


def level_of(principal: Principal, requested: str) -> str:
    """Return the level whose usage is shown: what is requested for, by default all that one may see; "" for all levels.

    Operators see all, a tenant admin what it manages, and a caller its key and, where it asks, its team.
    Raises: PermissionDenied.
    """
    own = principal.levels[-1].name if principal.levels else ""
    level = requested or principal.administers or own
    may = principal.manages(level) or level == own or (principal.tenant is not None and level == principal.tenant.name)
    if not may:
        raise PermissionDenied(f"this caller may not see the usage of {level:.200}")
    return level


def routes(service: Service) -> list[Route]:
    """Return the endpoints; none without a usage database."""
    ledger = service.usage
    if ledger is None:
        return []
    path, writer = ledger.path, ledger.writer

    def zone_of(given: Mapping[str, str]) -> str:
        return report.zone_of(given, service.configuration.policy.budgets.time_zone)

    async def usage(given: Mapping[str, str], level: str) -> Rows:
        zone, groups = zone_of(given), report.groups_of(given.get("group_by", ""))
        about = report.filter_of(given, level, zone, time.time())
        rows = await asyncio.to_thread(report.sums, path, about, groups, zone)
        return report.with_cost(rows), (*groups, *SUMS, "cost"), {"from_s": about.from_s, "to_s": about.to_s}

    async def records(given: Mapping[str, str], level: str) -> Rows:
        zone = zone_of(given)
        about = report.filter_of(given, level, zone, time.time())
        most, after = _integer(given, "limit", 100, report.MOST_RECORDS), _integer(given, "after", 0, 2**62)
        found = await asyncio.to_thread(report.requests, path, about, after, most, zone)
        more = {"has_more": len(found) == most, "last": found[-1]["number"] if found else after}
        return report.with_cost(found), _RECORD, more

    def answered(handle: Handle, *parameters: str) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            given = dict(request.query_params)
            try:
                principal = await service.authentication.principal(request.headers)
                for name in given:
                    if name not in (allowed := (*report.PARAMETERS, *parameters)):
                        raise InvalidArgument(name[:80], f"is not known: must be one of {', '.join(allowed)}")
                if (form := given.get("format", "json")) not in FORMATS:
                    raise InvalidArgument("format", f"must be one of {', '.join(FORMATS)}, got {form!r:.80}")
                level = level_of(principal, given.get("tenant", ""))
                await writer.commit()
                rows, columns, more = await handle(given, level)
            except TridentError as error:
                return error_responses.response(*error_responses.http(error))
            if form == "csv":
                return Response(report.as_csv(rows, columns), media_type="text/csv; charset=utf-8")
            prices = service.configuration.policy.prices
            fields = {"object": "list", "tenant": level, "currency": prices.currency if prices else "USD", **more}
            return Response(orjson.dumps({**fields, "data": rows}), media_type="application/json")

        return endpoint

    return [
        Route("/v1/usage", answered(usage, "group_by")),
        Route("/v1/usage/requests", answered(records, "request_id", "limit", "after")),
    ]


def _integer(given: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = given.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and int(text) <= most):
        raise InvalidArgument(name, f"must be an integer from 0 to {most}, got {text!r:.80}")
    return int(text)

"""Serve the endpoints of operators and tenant admins under /admin/."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from contract.errors import Cancelled, DeadlineExceeded, InvalidArgument, TridentError
from gateway.admission.body_budget import BodyBudget
from gateway.api import error_responses, request_body, schemas
from gateway.api.console import Console, ScalingReport, page_routes
from gateway.api.request_body import BodyTooLarge
from gateway.identity.principal import Principal
from gateway.routing.registrations import Registration
from gateway.service import Service

MAX_BODY_BYTES = 64 * 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\[\]-]{0,199}")
Body = TypeVar("Body")
Handle = Callable[[Request], Awaitable[Any]]
Endpoint = Callable[[Request], Awaitable[Response]]


class AdminRoute(Route):
    """A route that is not there while there can be no operator or tenant admin."""

    def __init__(self, service: Service, path: str, endpoint: Endpoint, methods: Sequence[str] = ("GET",)) -> None:
        super().__init__(path, endpoint, methods=list(methods))
        self._authentication = service.authentication

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        found = super().matches(scope)
        return found if found[0] == Match.NONE or self._authentication.administered else (Match.NONE, {})


def routes(service: Service) -> list[Route]:
    """Return the operators' endpoints and their page."""

    def route(path: str, method: str, handle: Handle) -> Route:
        async def for_operators(request: Request, principal: Principal) -> Any:
            principal.check_operator()
            return await handle(request)

        return AdminRoute(service, f"/admin/{path}", guarded(service, for_operators), [method])

    registrations = service.replicas.registrations

    async def register(request: Request) -> Any:
        name, registration = _name(request), await body(service, request, Registration)
        pools = service.replicas.pools
        if registration.pool not in pools:
            known = ", ".join(pool or "''" for pool in pools)
            raise InvalidArgument("pool", f"must be one of {known}, got {registration.pool!r}")
        registrations.put(name, registration)
        service.tell_workers("register", name, registration)
        return {"name": name, "lease_s": registration.lease_s}

    async def withdraw(request: Request) -> Any:
        name = _name(request)
        service.tell_workers("withdraw", name)
        return {"withdrawn": registrations.withdraw(name)}

    async def registered(request: Request) -> Any:
        ready = {replica.url for replica in service.replicas.ready()}
        return {"replicas": [entry | {"in_use": entry["address"] in ready} for entry in registrations.entries()]}

    async def releases(request: Request) -> Any:
        return {"releases": service.releases.status(), "problem": service.configuration.problem}

    async def change_release(request: Request) -> Any:
        change = await body(service, request, dict)
        await service.change_release(_name(request), str(change.pop("action", "")), change)
        return await releases(request)

    console = Console(service)

    async def report(request: Request) -> Any:
        reported = await body(service, request, ScalingReport)
        console.report(reported)
        service.tell_workers("scaling", reported)
        return {}

    return [
        *(AdminRoute(service, route.path, route.endpoint) for route in page_routes()),
        route("events", "GET", console.events),
        route("scaling", "PUT", report),
        route("releases", "GET", releases),
        route("releases/{name}", "POST", change_release),
        route("replicas/{name}", "PUT", register),
        route("replicas/{name}", "DELETE", withdraw),
        route("replicas", "GET", registered),
    ]


async def body(service: Service, request: Request, kind: type[Body]) -> Body:
    """Return the JSON body of a request as a ``kind``, a pydantic model or dict. Raises InvalidArgument,
    DeadlineExceeded."""
    timeout_s = service.settings.body_timeout_s
    try:
        with BodyBudget(MAX_BODY_BYTES, MAX_BODY_BYTES).lease("") as lease:
            data = await request_body.read(request, lease, MAX_BODY_BYTES, timeout_s)
    except BodyTooLarge:
        raise InvalidArgument("body", f"must be at most {MAX_BODY_BYTES} bytes") from None
    except asyncio.TimeoutError:
        raise DeadlineExceeded(f"the body did not arrive within {timeout_s:g} s") from None
    except ClientDisconnect:
        raise Cancelled("the client disconnected") from None
    found: Any = schemas.fields_of(data) if kind is dict else schemas.validated(kind, data)
    return found


def guarded(service: Service, handle: Callable[[Request, Principal], Awaitable[Any]]) -> Endpoint:
    """Return the endpoint that sends what ``handle`` returns, as JSON if it is no response, or its error."""

    async def endpoint(request: Request) -> Response:
        try:
            fields = await handle(request, await service.authentication.principal(request.headers))
        except TridentError as error:
            return error_responses.response(*error_responses.http(error))
        if isinstance(fields, Response):
            return fields
        return Response(orjson.dumps(fields), media_type="application/json")

    return endpoint


def _name(request: Request) -> str:
    name: str = request.path_params["name"]
    if not _NAME.fullmatch(name):
        allowed = "1 to 200 letters, digits, '.', '_', ':', '[', ']' and '-', the first a letter or digit"
        raise InvalidArgument("name", f"must be {allowed}, got {name[:50]!r}")
    return name

"""Serve the endpoints of operators and tenant admins under /admin/."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from clients.wire.connection import new_request_id
from contract.errors import InvalidArgument, NotFound, PermissionDenied, TridentError, Unauthenticated
from gateway.api import error_responses, request_body, schemas
from gateway.api.console import Console, ScalingReport, page_routes
from gateway.api.request_body import BodyTooLarge
from gateway.api.strict_model import StrictModel
from gateway.config import release_file
from gateway.config.settings import variable
from gateway.identity.principal import Principal
from gateway.identity.stored_keys import KeyRole, StoredKeys
from gateway.routing.registrations import Registration
from gateway.service import Service

MAX_BODY_BYTES = 64 * 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\[\]-]{0,199}")
Body = TypeVar("Body")
Handle = Callable[[Request], Awaitable[Any]]
Handling = Callable[[Request, Principal], Awaitable[Any]]
Endpoint = Callable[[Request], Awaitable[Response]]
Lasts = Annotated[float, Field(gt=0, le=10 * 365 * 86_400)]


class NewKey(StrictModel):
    """name: ORG/TEAM/KEY. expires_in_s: None for a key that does not expire."""

    name: Annotated[str, Field(max_length=200)]
    role: KeyRole = "caller"
    expires_in_s: Lasts | None = None


class KeyChange(StrictModel):
    """overlap_s: how long the keys before still hold. expires_in_s: as the key before by default."""

    action: Literal["rotate", "revoke"]
    overlap_s: Annotated[float, Field(ge=0, le=90 * 86_400)] = 3600.0
    expires_in_s: Lasts | None = None


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

        return shared(path, method, for_operators)

    def shared(path: str, method: str, handle: Handling) -> Route:
        return AdminRoute(service, f"/admin/{path}", guarded(service, handle), [method])

    def stored() -> StoredKeys:
        if service.authentication.stored is None:
            raise NotFound(f"this gateway keeps no keys: {variable('key_store')} is not set")
        return service.authentication.stored

    async def list_keys(request: Request, principal: Principal) -> Any:
        return {"keys": await listed_keys(stored(), principal)}

    async def create(request: Request, principal: Principal) -> Any:
        new = await body(service, request, NewKey)
        note(request, "key.create", new.name, after=new.model_dump(exclude={"name"}, exclude_none=True))
        return await create_key(stored(), principal, new)

    async def change_named(request: Request, principal: Principal) -> Any:
        target, change = request.path_params["target"], await body(service, request, KeyChange)
        rotated = {"overlap_s", "expires_in_s"} if change.action == "rotate" else set()
        note(request, f"key.{change.action}", target[:200], after=change.model_dump(include=rotated, exclude_none=True))
        return await change_key(stored(), principal, target, change)

    registrations = service.replicas.registrations

    async def register(request: Request) -> Any:
        name, registration = _name(request), await body(service, request, Registration)
        pools = service.replicas.pools
        if registration.pool not in pools:
            known = ", ".join(pool or "''" for pool in pools)
            raise InvalidArgument("pool", f"must be one of {known}, got {registration.pool!r}")
        if name not in {known for known, *_ in registrations.known().values()}:  # not each beat
            note(request, "replica.register", name, after={"address": registration.address, "pool": registration.pool})
        if registration.state == "draining":
            await service.succession.wait(registration.pool, registration.address)
        registrations.put(name, registration)
        service.tell_workers("register", name, registration)
        return {"name": name, "lease_s": registration.lease_s}

    async def withdraw(request: Request) -> Any:
        name = _name(request)
        note(request, "replica.withdraw", name)
        service.tell_workers("withdraw", name)
        return {"withdrawn": registrations.withdraw(name)}

    async def registered(request: Request) -> Any:
        ready = {replica.url for replica in service.replicas.ready()}
        return {"replicas": [entry | {"in_use": entry["address"] in ready} for entry in registrations.entries()]}

    async def releases(request: Request) -> Any:
        return {"releases": service.releases.status(), "problem": service.configuration.problem}

    async def change_release(request: Request) -> Any:
        name, change = _name(request), await body(service, request, dict)
        action = str(change.pop("action", ""))
        note(request, f"release.{action:.20}", name, before=standing(name))
        await service.change_release(name, action, change)
        why = {"reason": release_file.rollback_reason(change)} if action == "rollback" else {}
        note(request, f"release.{action}", name, after=standing(name), **why)
        return await releases(request)

    def standing(name: str) -> dict[str, Any]:
        found = [one for one in service.releases.status() if one["name"] == name]
        return {field: one[field] for one in found for field in ("candidate", "state", "weight") if field in one}

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
        shared("keys", "GET", list_keys),
        shared("keys", "POST", create),
        shared("keys/{target:path}", "POST", change_named),
    ]


async def body(service: Service, request: Request, kind: type[Body]) -> Body:
    """Return the JSON body as a ``kind``, a model or dict. Raises: InvalidArgument, DeadlineExceeded, Cancelled."""
    timeout_s = service.settings.body_timeout_s
    try:
        data = await request_body.read_small(request, MAX_BODY_BYTES, timeout_s)
    except BodyTooLarge:
        raise InvalidArgument("body", f"must be at most {MAX_BODY_BYTES} bytes") from None
    found: Any = schemas.fields_of(data) if kind is dict else schemas.validated(kind, data)
    return found


def note(request: Request, action: str, target: str, **more: Any) -> None:
    """Say what the audit log tells of a request. more: before, after."""
    request.state.audit.update(action=action, target=target, **more)


def guarded(service: Service, handle: Handling) -> Endpoint:
    """Return the endpoint that sends what ``handle`` returns; what that notes, and refusals, go to the audit log."""

    async def audited(request: Request) -> Any:
        who, result, noted = Principal("caller", ""), "failed", dict[str, Any]()
        request.state.audit = noted
        try:
            who = await service.authentication.principal(request.headers)
            fields = await handle(request, who)
            result = "ok"
            return fields
        except TridentError as error:
            if isinstance(error, Unauthenticated | PermissionDenied):
                action = noted.get("action", f"{request.method} {request.url.path}"[:200])
                note(request, action, noted.get("target", ""))
            result = f"{type(error).__name__}: {error}"
            raise
        finally:
            if noted:
                request_id = request.headers.get("x-request-id", "")[:128] or new_request_id()
                role = who.role if who.levels or who.role == "operator" else "none"
                await service.authentication.audit.write(who.name, role, result=result, request_id=request_id, **noted)

    return error_responses.answering(audited)


def _name(request: Request) -> str:
    name: str = request.path_params["name"]
    if not _NAME.fullmatch(name):
        allowed = "1 to 200 letters, digits, '.', '_', ':', '[', ']' and '-', the first a letter or digit"
        raise InvalidArgument("name", f"must be {allowed}, got {name[:50]!r}")
    return name


def _check_may_hold(principal: Principal, name: str, role: KeyRole) -> None:
    """Raises PermissionDenied if a principal may not give a role to a key, or take it away."""
    principal.check_manages(name)
    if role == "operator":
        principal.check_operator()
    if role == "org_admin":
        principal.check_manages(name.partition("/")[0])


async def create_key(keys: StoredKeys, principal: Principal, new: NewKey) -> dict[str, Any]:
    """Make a key. Raises: PermissionDenied, InvalidArgument."""
    _check_may_hold(principal, new.name, new.role)
    return await keys.make(new.name, principal.name, new.role, new.expires_in_s)


async def change_key(keys: StoredKeys, principal: Principal, target: str, change: KeyChange) -> dict[str, Any]:
    """Rotate the key of a name, or revoke that of a name or an id. Raises: PermissionDenied, NotFound."""
    by = ("name",) if change.action == "rotate" else ("name", "id")  # the name's latest key may have a higher role
    found = [key for key in await listed_keys(keys, principal) if target in map(key.get, by)]
    if not found:
        raise NotFound(f"there is no key {target:.200} that this caller manages")
    for key in found:
        _check_may_hold(principal, key["name"], key["role"])
    if change.action == "revoke":
        return {"keys": await keys.revoke(target)}
    return await keys.make(found[-1]["name"], principal.name, None, change.expires_in_s, change.overlap_s)


async def listed_keys(keys: StoredKeys, principal: Principal) -> list[dict[str, Any]]:
    """Return the keys that a principal manages. Raises: PermissionDenied for a caller."""
    principal.check_manages(principal.administers)
    return [key for key in await keys.described() if principal.manages(key["name"])]

"""Take feedback of callers for their requests, and show and delete samples for operators."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator
from starlette.requests import Request
from starlette.routing import Route

from clients.wire.request import MAX_REQUEST_ID
from contract.errors import InvalidArgument
from gateway.api.admin import AdminRoute, body, guarded, note
from gateway.api.strict_model import StrictModel
from gateway.config.tenant import Tenant
from gateway.identity.principal import Principal
from gateway.service import Service

_RESPONSE_ID = re.compile(r"(?:chatcmpl|cmpl)-(.+)")
_Id = Annotated[str, Field(min_length=1, max_length=MAX_REQUEST_ID + 16)]
_Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,63}$")]


class Feedback(StrictModel):
    """How good an answer was, by its rating, its score or both."""

    request_id: _Id | None = None  # the answer's ``x-request-id``
    response_id: _Id | None = None  # in place of that the answer's ``id``
    choice: Annotated[int, Field(ge=0, lt=2**31, strict=True)] | None = None  # None for all choices
    rating: Literal["up", "down"] | None = None
    score: Annotated[float, Field(ge=0, le=1, strict=True)] | None = None  # from 0.5 it is ``up``
    comment: Annotated[str, Field(max_length=4096)] = ""
    labels: Annotated[list[_Label], Field(max_length=16)] = []

    @model_validator(mode="after")
    def _one(self) -> Feedback:
        if (self.request_id is None) == (self.response_id is None):
            raise InvalidArgument("request_id", "must be set if response_id is not, else left out")
        if self.response_id is not None and not _RESPONSE_ID.fullmatch(self.response_id):
            raise InvalidArgument("response_id", "must begin with chatcmpl- or cmpl-; others are rated by request_id")
        if self.rating is None and self.score is None:
            raise InvalidArgument("rating", "must be up or down, or score must be set, got neither")
        return self

    def fields(self) -> dict[str, Any]:
        """Return what is stored."""
        named = _RESPONSE_ID.fullmatch(self.response_id or "")
        rating = self.rating or ("up" if (self.score or 0.0) >= 0.5 else "down")
        kept = self.model_dump(include={"choice", "score", "comment", "labels"})
        return {"request_id": named[1] if named else self.request_id, **kept, "rating": rating, "time": time.time()}


async def feedback(service: Service, request: Request, tenant: Tenant) -> dict[str, Any]:
    """Store the feedback in a request's body. Raises: InvalidArgument, NotFound, Overloaded."""
    sent = await body(service, request, Feedback)
    return {"object": "feedback", **await service.samples.rate(tenant.name, sent.fields())}


def routes(service: Service) -> list[Route]:
    """Return the operators' endpoints; none where no folder of samples is set."""
    store = service.samples.store
    if store is None:
        return []

    async def summary(request: Request, principal: Principal) -> Any:
        if principal.role == "caller":
            principal.check_operator()
        rows = [row for row in await asyncio.to_thread(store.summary) if principal.manages(row["tenant"])]
        return {"encrypted": store.encrypted, "tenants": rows}

    async def delete(request: Request, principal: Principal) -> Any:
        tenant = request.query_params.get("tenant", "")
        principal.check_manages(tenant)
        if not tenant:
            raise InvalidArgument("tenant", "must be the name of a tenant, such as acme/research, got none")
        note(request, "samples.delete", tenant)
        deleted_bytes = await asyncio.to_thread(store.delete, tenant, service.configuration.member)
        return {"tenant": tenant, "deleted_bytes": deleted_bytes}

    return [
        AdminRoute(service, "/admin/samples", guarded(service, summary)),
        AdminRoute(service, "/admin/samples", guarded(service, delete), ["DELETE"]),
    ]

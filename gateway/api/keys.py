"""Serve /admin/keys: keys that operators, and tenant admins for their own, make, list, rotate and revoke."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from contract.errors import NotFound
from gateway.api.strict_model import StrictModel
from gateway.identity.principal import Principal
from gateway.identity.stored_keys import KeyRole, StoredKeys

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


def check_may_hold(principal: Principal, name: str, role: KeyRole) -> None:
    """Raises PermissionDenied if a principal may not give a role to a key, or take it away."""
    principal.check_manages(name)
    if role == "operator":
        principal.check_operator()
    if role == "org_admin":
        principal.check_manages(name.partition("/")[0])


async def create(keys: StoredKeys, principal: Principal, new: NewKey) -> dict[str, Any]:
    """Make a key. Raises: PermissionDenied, InvalidArgument."""
    check_may_hold(principal, new.name, new.role)
    return await keys.make(new.name, principal.name, new.role, new.expires_in_s)


async def change(keys: StoredKeys, principal: Principal, target: str, change: KeyChange) -> dict[str, Any]:
    """Rotate the key of a name, or revoke that of a name or an id. Raises: PermissionDenied, NotFound."""
    by = ("name",) if change.action == "rotate" else ("name", "id")  # the name's latest key may have a higher role
    found = [key for key in await listed(keys, principal) if target in map(key.get, by)]
    if not found:
        raise NotFound(f"there is no key {target:.200} that this caller manages")
    for key in found:
        check_may_hold(principal, key["name"], key["role"])
    if change.action == "revoke":
        return {"keys": await keys.revoke(target)}
    return await keys.make(found[-1]["name"], principal.name, None, change.expires_in_s, change.overlap_s)


async def listed(keys: StoredKeys, principal: Principal) -> list[dict[str, Any]]:
    """Return the keys that a principal manages. Raises: PermissionDenied for a caller."""
    principal.check_manages(principal.administers)
    return [key for key in await keys.described() if principal.manages(key["name"])]

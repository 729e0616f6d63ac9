"""Who asks, and what they may manage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from contract.errors import PermissionDenied, Unauthenticated
from gateway.config.tenant import Level, Tenant

Role = Literal["caller", "tenant_admin", "operator"]


@dataclass(frozen=True)
class Principal:
    """Who sent a request.

    role: ``operator`` may do everything under /admin/, ``tenant_admin`` manages ``administers`` and all below it.
    name: for the audit log, such as ``key acme/research/alice``; never a secret.
    tenant: that is charged; None for an operator who is no caller.
    """

    role: Role
    name: str
    tenant: Tenant | None = None
    administers: str = ""

    @property
    def levels(self) -> tuple[Level, ...]:
        """Organisation, team and key; empty for an operator and without API keys."""
        return self.tenant.levels if self.tenant is not None else ()

    def manages(self, level: str) -> bool:
        """Return whether it may manage a level, such as ``acme/research/alice``; "" stands for all levels."""
        if self.role == "operator":
            return True
        own = self.administers
        return bool(own) and (level == own or level.startswith(f"{own}/"))

    def check_manages(self, level: str) -> None:
        """Raises PermissionDenied if it may not manage a level, Unauthenticated without a key."""
        if not self.manages(level):
            raise self._refused(f"this caller may not manage {level or 'all tenants'}")

    def check_operator(self) -> None:
        """Raises PermissionDenied for all but operators, Unauthenticated without a key."""
        if self.role != "operator":
            raise self._refused("only operators may do this")

    def _refused(self, problem: str) -> PermissionDenied | Unauthenticated:
        return PermissionDenied(problem) if self.levels else Unauthenticated(f"{problem}, with their token")


def of_tenant(tenant: Tenant) -> Principal:
    """Return the principal of an authenticated tenant."""
    name = f"key {tenant.levels[-1].name}" if tenant.levels else tenant.name
    return Principal("tenant_admin" if tenant.administers else "caller", name, tenant, tenant.administers)

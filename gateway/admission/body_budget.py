"""The memory that request bodies may take together, from their first byte to the end of their request."""

from __future__ import annotations

from collections import defaultdict

from contract.errors import Overloaded

RETRY_AFTER_S = 1.0
TENANT_SHARE = 0.5  # of the whole, so that one tenant's slow uploads do not refuse everybody's


class BodyBudget:
    """Bytes held by all requests under way, at most ``most_bytes``. most_each: of one body, which always fits into a
    tenant's share."""

    def __init__(self, most_bytes: int, most_each: int) -> None:
        self._most = most_bytes
        self._most_of_tenant = max(most_each, int(most_bytes * TENANT_SHARE))
        self._of_tenant: defaultdict[str, int] = defaultdict(int)
        self.held = 0

    def lease(self, tenant: str, *, alone: bool = False) -> Lease:
        """Return a lease of no bytes yet. alone: there is no other tenant, and no share to keep for one."""
        return Lease(self, tenant, self._most if alone else self._most_of_tenant)

    def take(self, tenant: str, size: int, most_of_tenant: int) -> None:
        """Raises Overloaded if there is no room; then nothing is taken."""
        if self.held + size > self._most:
            problem = f"request bodies in flight take all of the {self._most} bytes allowed together"
        elif self._of_tenant.get(tenant, 0) + size > most_of_tenant:
            problem = f"request bodies of this tenant take all of the {most_of_tenant} bytes allowed for one"
        else:
            self.give_back(tenant, -size)
            return
        error = Overloaded(f"{problem}; send fewer or smaller requests at once", RETRY_AFTER_S)
        error.reason = "bodies"
        raise error

    def give_back(self, tenant: str, size: int) -> None:
        self.held -= size
        self._of_tenant[tenant] -= size
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]


class Lease:
    """What one request holds; a context manager that gives it back."""

    def __init__(self, budget: BodyBudget, tenant: str, most_of_tenant: int) -> None:
        self._budget, self._tenant, self._most_of_tenant = budget, tenant, most_of_tenant
        self._size = 0

    def take(self, size: int) -> None:
        """Take ``size`` more bytes. Raises Overloaded; what was taken before stays until the lease ends."""
        self._budget.take(self._tenant, size, self._most_of_tenant)
        self._size += size

    def grow_to(self, size: int) -> None:
        """Take what is missing to ``size`` bytes. Raises Overloaded as ``take`` does."""
        if size > self._size:
            self.take(size - self._size)

    def release(self) -> None:
        """Return all bytes that are held. Safe to call twice."""
        size, self._size = self._size, 0
        self._budget.give_back(self._tenant, size)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

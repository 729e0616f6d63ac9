"""Find out who sends a request, by its ``authorization`` header."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from contract.errors import PermissionDenied
from gateway.config.configuration import Configuration
from gateway.config.settings import Settings
from gateway.config.tenant import Tenant
from gateway.config.tenants import Keys
from gateway.identity.principal import Principal, of_tenant
from gateway.identity.secret_file import SecretFile
from gateway.identity.tokens import Tokens


class Authentication:
    """The ways of one gateway to say who one is. Call ``apply`` on the loop that serves, and ``close`` at the end.

    keys: finds the tenant of an API key; the configuration by default.
    """

    def __init__(self, settings: Settings, configuration: Configuration, keys: Keys | None = None) -> None:
        self._configuration, self._keys = configuration, keys or configuration
        self._admin_token = SecretFile(lambda: settings.admin_token) if settings.admin_token_file else None
        self._tokens = Tokens(configuration.member)

    def apply(self) -> None:
        """Apply the current configuration to later requests."""
        self._tokens.change(self._configuration.policy.identity)

    async def close(self) -> None:
        await self._tokens.close()

    async def tenant(self, headers: Mapping[str, str]) -> Tenant:
        """Return the tenant of a request with these headers, keys in lower case.

        Raises: Unauthenticated, PermissionDenied for who has a role and no team, Unavailable.
        """
        bearer = bearer_token(headers.get("authorization", ""))
        if not self._tokens.takes(bearer):
            return self._keys.tenant(bearer)
        found = await self._tokens.principal(bearer)
        if found.tenant is None:
            raise PermissionDenied("this token belongs to no team that may use this gateway")
        return found.tenant

    async def principal(self, headers: Mapping[str, str]) -> Principal:
        """Return who sent a request. headers, Raises: as ``tenant``."""
        bearer = bearer_token(headers.get("authorization", ""))
        if self._admin_token is not None and hmac.compare_digest(bearer.encode(), self._admin_token.secret):
            return Principal("operator", "operators' token")
        if self._tokens.takes(bearer):
            return await self._tokens.principal(bearer)
        return of_tenant(self._keys.tenant(bearer))

    def named(self, tenant: str, key: str) -> Tenant | None:
        """Return a tenant as its key sees it now; see Keys."""
        issuer, is_token, _ = key.rpartition("/")[2].partition(":")
        if not is_token:
            return self._keys.named(tenant, key)
        org, _, team = tenant.partition("/")
        known = issuer in self._configuration.policy.identity.issuers and key.startswith(f"{tenant}/")
        return self._configuration.member(org, team, key.removeprefix(f"{tenant}/")) if known else None

    @property
    def administered(self) -> bool:
        """Whether anybody can be an operator or a tenant admin."""
        return self._admin_token is not None or self._configuration.has_roles


def bearer_token(header: str) -> str:
    """Return the token of an ``authorization`` header; empty for another scheme."""
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""

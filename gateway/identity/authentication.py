"""Find out who sends a request, by its ``authorization`` header."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from gateway.config.settings import Settings
from gateway.config.tenant import Tenant
from gateway.config.tenants import Keys
from gateway.identity import principal
from gateway.identity.principal import Principal
from gateway.identity.secret_file import SecretFile


class Authentication:
    """The ways of one gateway to say who one is. keys: finds the tenant of an API key."""

    def __init__(self, settings: Settings, keys: Keys) -> None:
        self._keys, self._settings = keys, settings
        self._admin_token = SecretFile(lambda: settings.admin_token) if settings.admin_token_file else None

    async def tenant(self, headers: Mapping[str, str]) -> Tenant:
        """Return the tenant of a request with these headers, keys in lower case. Raises: Unauthenticated."""
        return self._keys.tenant(bearer_token(headers.get("authorization", "")))

    async def principal(self, headers: Mapping[str, str]) -> Principal:
        """Return who sent a request; see ``tenant``."""
        bearer = bearer_token(headers.get("authorization", ""))
        if self._admin_token is not None and hmac.compare_digest(bearer.encode(), self._admin_token.secret):
            return Principal("operator", "operators' token")
        return principal.of_tenant(await self.tenant(headers))

    @property
    def administered(self) -> bool:
        """Whether anybody can be an operator."""
        return self._admin_token is not None


def bearer_token(header: str) -> str:
    """Return the token of an ``authorization`` header; empty for another scheme."""
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""

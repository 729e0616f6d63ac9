"""Find out who sends a request, by its ``authorization`` header."""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from contract.errors import InvalidArgument, PermissionDenied, Unauthenticated, Unavailable
from gateway.admission.shared_state import SharedState
from gateway.config.configuration import Configuration
from gateway.config.settings import Settings
from gateway.config.tenant import Tenant
from gateway.identity.audit import Audit
from gateway.identity.principal import Principal, of_tenant
from gateway.identity.stored_keys import FileDocuments, RedisDocuments, StoredKeys
from gateway.identity.tokens import Tokens


class Authentication:
    """The ways of one gateway to say who one is. Call ``apply`` on the loop that serves, and ``close`` at the end.

    hook: is asked first; returns None where keys and tokens shall say who asks.
    """

    def __init__(
        self, settings: Settings, configuration: Configuration, shared_state: SharedState | None = None
    ) -> None:
        self._configuration, self._settings, self._admin_token = configuration, settings, settings.admin_token
        self._tokens = Tokens(configuration.member)
        self.hook: Callable[[Mapping[str, str]], Awaitable[Tenant | None]] | None = None
        self.audit = Audit(settings.audit_log)
        self.stored = stored_keys(settings, configuration, shared_state)
        configuration.stored_keys = bool(settings.key_store)

    async def start(self) -> None:
        if self.stored is not None:
            await self.stored.start()

    def apply(self) -> None:
        """Apply the current configuration to later requests."""
        self._tokens.change(self._configuration.policy.identity)
        if self.stored is not None:
            self.stored.principals.clear()

    async def close(self) -> None:
        await self._tokens.close()
        if self.stored is not None:
            await self.stored.close()

    async def tenant(self, headers: Mapping[str, str]) -> Tenant:
        """Return the tenant of a request with these headers, keys in lower case. Raises: Unauthenticated,
        PermissionDenied for who has a role and no team, Unavailable."""
        bearer = bearer_token(headers.get("authorization", ""))
        if self.hook is None and self.stored is None and not self._tokens.takes(bearer):
            return self._configuration.tenant(bearer)
        found = await self._caller(bearer, headers)
        if found.tenant is None:
            raise PermissionDenied("this token belongs to no team that may use this gateway")
        return found.tenant

    async def principal(self, headers: Mapping[str, str]) -> Principal:
        """Return who sent a request. headers, Raises: as ``tenant``."""
        bearer = bearer_token(headers.get("authorization", ""))
        with contextlib.suppress(InvalidArgument):  # while the file is replaced, the last token holds
            self._admin_token = self._settings.admin_token
        if self._admin_token and hmac.compare_digest(bearer.encode(), self._admin_token):
            return Principal("operator", "operators' token")
        return await self._caller(bearer, headers)

    async def _caller(self, bearer: str, headers: Mapping[str, str]) -> Principal:
        if self.hook is not None and (by_hook := await self.hook(headers)) is not None:
            return of_tenant(by_hook)
        if self._tokens.takes(bearer):
            return await self._tokens.principal(bearer)
        found = self.stored.find(bearer) if self.stored is not None else None
        try:
            return found or of_tenant(self._configuration.tenant(bearer))
        except Unauthenticated:
            if bearer and self.stored is not None and not self.stored.read:
                raise Unavailable("the API keys cannot be read now", 1.0) from None
            raise

    def named(self, tenant: str, key: str) -> Tenant | None:
        """Return a tenant as its key sees it now; see Configuration. Raises: Unavailable before keys are read."""
        issuer, is_token, _ = key.rpartition("/")[2].partition(":")
        if not is_token:
            stored = self.stored if key.startswith(f"{tenant}/") else None
            found = stored.named(key) if stored is not None else None
            found = found or self._configuration.named(tenant, key)
            if found is None and stored is not None and not stored.read:
                raise Unavailable("the API keys cannot be read now", 1.0)
            return found
        org, _, team = tenant.partition("/")
        known = issuer in self._configuration.policy.identity.issuers and key.startswith(f"{tenant}/")
        return self._configuration.member(org, team, key.removeprefix(f"{tenant}/")) if known else None

    @property
    def administered(self) -> bool:
        """Whether anybody can be an operator or a tenant admin."""
        return bool(self._admin_token) or self._configuration.has_roles


def stored_keys(
    settings: Settings, configuration: Configuration, shared_state: SharedState | None
) -> StoredKeys | None:
    """Return the keys that are kept where a setting says; None if it is not set. Raises: InvalidArgument."""
    if not settings.key_store:
        return None
    if shared_state is not None:
        return StoredKeys(RedisDocuments(shared_state), configuration.member)
    return StoredKeys(FileDocuments(Path(settings.key_store)), configuration.member)


def bearer_token(header: str) -> str:
    """Return the token of an ``authorization`` header; empty for another scheme."""
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""

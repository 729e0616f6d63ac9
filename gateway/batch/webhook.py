"""Signed calls to a client's URL when its batch has ended, retried a bounded number of times.

The signature is that of Standard Webhooks, which ``client.webhooks.unwrap`` of OpenAI's clients verifies. A retry has
the same ``webhook-id``. Only URLs of configured origins are called; redirects and response bodies are ignored.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import hmac
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp
import orjson
from yarl import URL

from contract.errors import InvalidArgument
from gateway.batch.store import Batch
from gateway.config.settings import Settings, variable

MAX_URL = 2000
TIMEOUT_S = 10.0
FIRST_WAIT_S, MAX_WAIT_S, MAX_ATTEMPTS = 5.0, 3600.0, 8
_PREFIX = "whsec_"


@dataclass(frozen=True)
class Webhooks:
    """Call webhooks of ``origins``; none turns them off. Raises: InvalidArgument, without the secret."""

    origins: Sequence[str] = ()
    secret: Callable[[], str] = str

    def __post_init__(self) -> None:
        for origin in self.origins:
            if _origin(origin) is None or URL(origin).path not in ("", "/"):
                problem = f"must be http(s)://HOST or http(s)://HOST:PORT, got {origin!r}"
                raise InvalidArgument(variable("batch_webhook_origins"), problem)
        if self.origins:
            self._key()

    def check(self, url: str) -> None:
        """Raises: InvalidArgument for a URL that may not be called."""
        if not self.origins:
            raise InvalidArgument("webhook_url", "is not supported: webhooks are not configured; poll the batch")
        if len(url) > MAX_URL or not url.isascii() or not url.isprintable() or " " in url:
            raise InvalidArgument("webhook_url", f"must be a URL of at most {MAX_URL} printable ASCII characters")
        found = _origin(url)
        if found is None or found not in {_origin(allowed) for allowed in self.origins}:
            raise InvalidArgument("webhook_url", f"must be a URL of {', '.join(self.origins)}, without credentials")

    async def call(self, batch: Batch) -> bool:
        """Report that a batch has ended. Returns whether the receiver accepted it; False for a disallowed origin."""
        try:
            self.check(batch.webhook_url)
            key = self._key()
        except InvalidArgument:
            return False
        event_id, now_s = f"evt_{batch.id.removeprefix('batch_')}", int(time.time())
        event = {"id": event_id, "object": "event", "created_at": now_s, "type": f"batch.{batch.status}"}
        body = orjson.dumps({**event, "data": {"id": batch.id}})
        signature = hmac.new(key, b"%b.%d.%b" % (event_id.encode(), now_s, body), hashlib.sha256).digest()
        headers = {
            "content-type": "application/json",
            "webhook-id": event_id,
            "webhook-timestamp": str(now_s),
            "webhook-signature": f"v1,{base64.b64encode(signature).decode()}",
        }
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
                session.post(batch.webhook_url, data=body, headers=headers, allow_redirects=False) as response,
            ):
                return 200 <= response.status < 300
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError):
            return False

    def _key(self) -> bytes:
        secret = self.secret()
        try:
            key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
        except ValueError:  # not in base64, or not in ASCII
            key = b""
        if not secret.startswith(_PREFIX) or len(key) < 24:
            problem = f"must be {_PREFIX} and at least 24 random bytes in base64"
            raise InvalidArgument(variable("batch_webhook_secret"), problem)
        return key


def configured(settings: Settings) -> Webhooks:
    """Return the webhooks that the settings describe. Raises: InvalidArgument that names the variable."""
    origins = tuple(filter(None, (part.strip() for part in settings.batch_webhook_origins.split(","))))
    return Webhooks(origins, functools.partial(settings.secret, "batch_webhook_secret"))


def wait_s(attempts: int) -> float | None:
    """Return the delay after failed attempt number ``attempts`` in seconds; None after the last."""
    return None if attempts >= MAX_ATTEMPTS else min(MAX_WAIT_S, FIRST_WAIT_S * 4.0 ** (attempts - 1))


def _origin(url: str) -> str | None:
    """Return scheme, host and port as aiohttp reads them; None if the URL has none or holds credentials."""
    try:
        found = URL(url)
        return str(found.origin()) if found.scheme in ("http", "https") and "@" not in found.raw_authority else None
    except ValueError:
        return None

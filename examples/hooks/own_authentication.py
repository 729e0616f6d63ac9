"""A hook that authenticates in its own way: a proxy in front of the gateway signs who asks.

The proxy sends ``x-caller: acme/research/alice;1795000000;<HMAC-SHA256 of what stands before, in hexadecimal>``. The
gateway's configuration has a key of that name, whose limits hold; callers need no API key.

    [hooks.proxy]
    use = "examples.hooks.own_authentication:SignedCaller"
    options = { secret = "$PROXY_SECRET" }
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Mapping

from contract.errors import Unauthenticated

HEADER = "x-caller"


class SignedCaller:
    """Finds the caller in a signed header. secret: shared with the proxy. max_age_s: of a signature."""

    def __init__(self, secret: str, max_age_s: float = 60.0) -> None:
        if len(secret) < 16:
            raise ValueError("secret must have at least 16 characters")
        self._secret, self._max_age_s = secret.encode(), max_age_s

    def authenticate(self, headers: Mapping[str, str]) -> str | None:
        signed = headers.get(HEADER)
        if signed is None:
            return None  # an API key, then
        text, _, signature = signed.rpartition(";")
        name, _, signed_s = text.partition(";")
        if not hmac.compare_digest(sign(self._secret, text).encode(), signature.encode()):
            raise Unauthenticated(f"{HEADER} must be signed with the proxy's secret")
        if not signed_s.isdecimal() or abs(time.time() - int(signed_s)) > self._max_age_s:
            raise Unauthenticated(f"{HEADER} must be signed within the last {self._max_age_s:g} s")
        return name


def sign(secret: bytes, text: str) -> str:
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()

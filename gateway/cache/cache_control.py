"""What a client's headers allow the caches to do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

HEADER = "x-trident-cache"
_MAX_AGE = re.compile(r"(?:^|[,\s])max-age=(\d{1,9})(?:$|[,\s])")


@dataclass(frozen=True)
class CacheControl:
    """The caching directives of one request.

    enabled: False for ``x-trident-cache: off`` and ``cache-control: no-store``: the request bypasses every cache.
    max_age_s: how old a cached response may be; 0 for ``no-cache``: none is served, the new one is stored.
    """

    enabled: bool = True
    max_age_s: float = float("inf")

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> CacheControl:
        """headers: keys in lower case."""
        text = headers.get("cache-control", "").lower()
        directives = {directive.strip() for directive in text.split(",")}
        off = headers.get(HEADER, "").strip().lower() in ("off", "false", "no", "0") or "no-store" in directives
        found = _MAX_AGE.search(text)
        return cls(not off, 0.0 if "no-cache" in directives else float(found[1]) if found else float("inf"))

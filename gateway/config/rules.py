"""What every table of rules has: no field that is not known, no conversion between types, no change once it is read."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _redis_url(url: str) -> str:
    """Return the URL, "" for none. Raises ValueError without the URL, which may hold a password."""
    from redis.connection import parse_url  # imported here, as most gateways have none

    try:
        if url:
            parse_url(url)
        return url
    except ValueError:
        raise ValueError("must be a URL such as redis://HOST:PORT/0, got one that cannot be read") from None


RedisUrl = Annotated[str, Field(pattern=r"^((redis|rediss|unix)://\S+)?$"), AfterValidator(_redis_url)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
PoolName = Annotated[str, Field(max_length=64, pattern=r"^[^=;,\s]*$")]


class Rules(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, strict=True)

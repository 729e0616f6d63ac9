"""The base class of tables that are read from files, and the types that several of them use."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


def _redis_url(url: str) -> str:
    """Return the URL, "" for none. Raises ValueError without the URL, which may hold a password."""
    from redis.connection import parse_url  # imported here, as most gateways have none

    try:
        if url:
            parse_url(url)
        return url
    except ValueError:
        raise ValueError("must be a URL such as redis://HOST:PORT/0, got one that cannot be read") from None


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


LIST = BeforeValidator(_tuple)  # a file's list, which is a tuple once it is read
RedisUrl = Annotated[str, Field(pattern=r"^((redis|rediss|unix)://\S+)?$"), AfterValidator(_redis_url)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
PoolName = Annotated[str, Field(max_length=64, pattern=r"^[^=;,\s]*$")]


class Rules(BaseModel):
    """A table without unknown fields and without conversion between types, which does not change once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, strict=True)

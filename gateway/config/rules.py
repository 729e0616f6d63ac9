"""The base class of tables that are read from files, and the types that several of them use."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from contract.errors import InvalidArgument


def _redis_url(url: str) -> str:
    """Return the URL, "" for none. Raises ValueError without the URL, which may hold a password."""
    if not url:
        return url
    from redis.connection import parse_url  # imported here, as most gateways have none

    try:
        if not url.isprintable() or " " in url or not url.partition("://")[2]:
            raise ValueError
        parse_url(url)
        return url
    except ValueError:
        raise ValueError("must be a URL such as redis://HOST:PORT/0, got one that cannot be read") from None


def integer(name: str, text: str, most: int) -> int:
    """Return the integer of a header or a parameter from 0 to ``most``. Raises InvalidArgument."""
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) <= most):
        raise InvalidArgument(name, f"must be an integer from 0 to {most}, got {text!r:.80}")
    return int(text)


def _names(value: Any) -> Any:
    """Return one name or several as a tuple."""
    if isinstance(value, str):
        return (value,) if value else ()
    return tuple(value) if isinstance(value, list) else value


LIST = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
NAMES = BeforeValidator(_names)
RedisUrl = Annotated[str, AfterValidator(_redis_url)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
PoolName = Annotated[str, Field(max_length=64, pattern=r"^[^=;,\s]*$")]
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Name = Annotated[str, Field(pattern=NAME)]


class Rules(BaseModel):
    """A table without unknown fields and without conversion between types, which does not change once it is read.
    docs/gateway-configuration.md says what its fields mean.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, strict=True)

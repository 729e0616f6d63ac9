"""What hooks see of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from contract.errors import TridentError
from contract.generation import Usage


@dataclass
class Call:
    """One request.

    protocol: ``http`` (OpenAI), ``grpc`` (KServe) or ``batch``. operation: such as ``chat`` or ``text_completion``.
    headers: HTTP headers or gRPC metadata, names in lower case. state: for hooks to keep things in.
    model: as the request names it, and from the first output on the name of the one that serves it.
    """

    request_id: str
    tenant: str
    protocol: str
    operation: str
    headers: Mapping[str, str]
    session: str = ""
    user: str = ""
    model: str = ""
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a request ended.

    finish_reasons: of the choices that came to their end. usage: of all choices; None where it is not known.
    error: what the caller saw; Cancelled if the caller left.
    """

    finish_reasons: tuple[str, ...]
    usage: Usage | None
    error: TridentError | None
    duration_s: float

"""The context of one public request: its tenant, its protocol and its metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from contract.priority import NORMAL
from gateway.admission.budgets import Charge
from gateway.config.tenant import Tenant
from gateway.models import ServedModel


@dataclass(frozen=True)
class RequestContext:
    """The caller of one request, and what serves it.

    protocol: ``http`` (OpenAI) or ``grpc`` (KServe). operation: ``chat``, ``batch``, an encoder's, ….
    request_id: in responses and logs. Engines get ids of their own: no caller can stop or join a request by a guess.
    carrier: HTTP headers or gRPC metadata, keys in lower case.
    session: the conversation id that session affinity uses; "" for none. user: as the body names it; "" for none.
    own_priority: the ``request_priority`` that the caller sent, 0 to 1.
    notes: what became of its prompt, by name (``prompt``, ``context``, …): headers of the response (x-trident-NAME),
        attributes of its span (trident.NAME) and fields of its log line.
    trace: the telemetry.content.ResponseTrace of its response; None without tracing.
    paid: of a stream that another gateway began: for each choice, the tokens of its output that are charged, along with
        its prompt; None for a choice of which nothing is.
    """

    tenant: Tenant
    protocol: str
    operation: str
    request_id: str
    carrier: Mapping[str, str] = field(default_factory=dict)
    session: str = ""
    own_priority: float = NORMAL
    model: ServedModel = ServedModel()
    user: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)
    trace: Any = None
    paid: Sequence[int | None] | None = None

    def charge(self, source: str = "engine") -> Charge:
        return Charge(self.request_id, self.model.name, self.operation, self.model.price, source)

    @property
    def key(self) -> str:
        """The name of its key's level; "" without keys."""
        return self.tenant.levels[-1].name if self.tenant.levels else ""

    @property
    def caller(self) -> str:
        """What stays in one pool, and on one side of a release: the conversation, else the user; "" for neither."""
        return self.session or (f"{self.tenant.name}\n{self.user}" if self.user else "")

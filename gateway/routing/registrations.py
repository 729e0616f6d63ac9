"""Replicas that register themselves: each with a lease that its beats renew, beside those of lists and DNS."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from clients.replica_set import discovery
from clients.replica_set.discovery import Discovery
from contract.errors import InvalidArgument, Overloaded, TridentError
from gateway.config.settings import Url

_LOG = logging.getLogger(__name__)
MAX_REGISTERED = 1000
STOOD_STILL_S = 1.5  # between two checks: then beats wait to be read, and no lease ends before the next check


def _address(text: str) -> str:
    try:
        return discovery.address(text)
    except InvalidArgument as exc:
        raise ValueError(exc.problem) from exc


class Registration(BaseModel):
    """What a replica says of itself with every beat.

    address: HOST:PORT of its gRPC endpoint. metrics_url: "" for the address that the settings give.
    engine: its name. manifest_sha256: of the engine's manifest.json; "" if unknown. slots: requests at once; 0 unknown.
    pool: that it belongs to. lease_s: seconds after which it is forgotten without another beat.
    state: only a ready one gets requests. expected_s: seconds until a starting one is ready, None if unknown.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    address: Annotated[str, Field(max_length=300), AfterValidator(_address)]
    metrics_url: Annotated[Url, Field(max_length=500)] = ""
    engine: Annotated[str, Field(max_length=200)] = ""
    manifest_sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    slots: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    pool: Annotated[str, Field(max_length=200)] = ""
    lease_s: Annotated[float, Field(ge=1, le=60, allow_inf_nan=False)] = 3.0
    state: Literal["starting", "ready", "draining"] = "ready"
    expected_s: Annotated[float | None, Field(ge=0, le=86_400, allow_inf_nan=False)] = None


Entry = tuple[str, Registration, float]  # name, what, and when, on the machine's monotonic clock


class Registrations:
    """The registered replicas of all pools, one at each address; ``check`` them every second. joined, left: called with
    pool and address when a replica begins and ceases to get requests."""

    def __init__(self, joined: Callable[[str, str], None], left: Callable[[str, str], None]) -> None:
        self._joined, self._left = joined, left
        self._entries: dict[str, Entry] = {}  # by address
        self._checked_s = 0.0

    def put(self, name: str, known: Registration) -> None:
        """Register a replica or renew its lease. Raises Overloaded for a new one beyond MAX_REGISTERED."""
        _, before, _ = self._entries.get(known.address, (name, None, 0.0))
        if before is None and len(self._entries) >= MAX_REGISTERED:
            raise Overloaded(f"{MAX_REGISTERED} replicas are registered, and no more are allowed", 1.0)
        if before is None or before.state != known.state:
            _LOG.info("replica %s of pool %r is %s", name, known.pool, known.state)
        if before is not None and before.pool != known.pool:
            self._left(before.pool, before.address)
        self._entries[known.address] = name, known, time.monotonic()
        (self._joined if known.state == "ready" else self._left)(known.pool, known.address)

    def known(self) -> dict[str, Entry]:
        """Return what is registered, by address."""
        return dict(self._entries)

    def learn(self, known: dict[str, Entry]) -> None:
        """Take over what another process knows; what was heard here is newer."""
        for address, entry in known.items():
            if self._entries.setdefault(address, entry) is entry and entry[1].state == "ready":
                self._joined(entry[1].pool, address)

    def withdraw(self, name: str) -> bool:
        """Forget a replica; return whether it was known. It gets no request from now on."""
        addresses = [address for address, (other, *_) in self._entries.items() if other == name]
        for address in addresses:
            self._forget(address, "it has withdrawn")
        return bool(addresses)

    def check(self, now_s: float) -> None:
        """End the leases that are over. now_s: ``time.monotonic()``."""
        late = now_s - self._checked_s > STOOD_STILL_S
        self._checked_s = now_s
        for address, (_, known, at_s) in list(self._entries.items()):
            if not late and now_s - at_s > known.lease_s:
                self._forget(address, f"no beat for {now_s - at_s:.1f} s")

    def replicas(self, pool: str, listed: Iterable[str]) -> set[str]:
        """Return the addresses of a pool's replicas that get requests. listed: by another source, of which those that
        are registered otherwise are left out."""
        known = [known for _, known, _ in self._entries.values() if known.pool == pool and known.state == "ready"]
        return set(listed) - self._entries.keys() | {one.address for one in known}

    def starting(self, pool: str) -> list[float | None]:
        """Return for each replica of a pool that starts the seconds until it is ready, None where unknown."""
        now_s = time.monotonic()
        return [
            None if known.expected_s is None else max(0.0, known.expected_s - (now_s - at_s))
            for _, known, at_s in self._entries.values()
            if known.pool == pool and known.state == "starting"
        ]

    def metrics_url(self, address: str) -> str:
        """Return the metrics URL that the replica at ``address`` gave; "" if none."""
        return self._entries[address][1].metrics_url if address in self._entries else ""

    def entries(self) -> list[dict[str, Any]]:
        """Return what is registered: the fields of each, its name, and the seconds since its last beat."""
        now_s = time.monotonic()
        return [
            {"name": name, **known.model_dump(), "beat_age_s": round(now_s - at_s, 3)}
            for name, known, at_s in sorted(self._entries.values(), key=lambda entry: entry[0])
        ]

    def _forget(self, address: str, reason: str) -> None:
        name, known, _ = self._entries.pop(address)
        _LOG.info("replica %s of pool %r is forgotten: %s", name, known.pool, reason)
        self._left(known.pool, address)


class Registered:
    """A pool's replicas for ReplicaSet: those that another source names and those that have registered."""

    def __init__(self, source: Discovery, registrations: Registrations, pool: str) -> None:
        self._source, self._registrations, self._pool = source, registrations, pool
        self._listed: Iterable[str] = ()
        self.refresh_s = getattr(source, "refresh_s", discovery.REFRESH_S)

    async def replicas(self) -> tuple[str, ...]:
        try:
            self._listed = await self._source.replicas()
        except TridentError:
            if not self._registrations.replicas(self._pool, ()):
                raise
        return tuple(sorted(self._registrations.replicas(self._pool, self._listed)))

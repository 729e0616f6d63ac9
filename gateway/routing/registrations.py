"""Replicas that register themselves: each with a lease that its beats renew, beside those of lists and DNS."""

from __future__ import annotations

import asyncio
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
# A withdrawn address that a list names too stays out for as long, which covers its drain; then probes decide.
WITHDRAWN_S = 60.0
# After the end of a lease: a gateway that stood still reads the beats that came meanwhile before it forgets replicas.
GRACE_S = 0.5


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


class Registrations:
    """The registered replicas of all pools, by name.

    joined, left: called with pool and address when a replica begins and ceases to be one that gets requests, before
    ``put`` and ``withdraw`` return.
    """

    def __init__(self, joined: Callable[[str, str], None], left: Callable[[str, str], None]) -> None:
        self._joined, self._left = joined, left
        self._entries: dict[str, tuple[Registration, float, asyncio.TimerHandle]] = {}  # what, when, its end
        self._names: dict[str, str] = {}  # by address
        self._withdrawn: dict[str, float] = {}  # until when, by address

    def put(self, name: str, registration: Registration) -> None:
        """Register a replica or renew its lease. The latest name of an address replaces others.

        Raises Overloaded for a new one beyond MAX_REGISTERED.
        """
        if name not in self._entries and len(self._entries) >= MAX_REGISTERED:
            raise Overloaded(f"{MAX_REGISTERED} replicas are registered, and no more are allowed", 1.0)
        before, other = self._take(name), self._names.get(registration.address)
        if other is not None:
            _LOG.warning("replica %s: registered as %s and now as %s", registration.address, other, name)
        gone = [known for known in (before, self._take(other or "")) if known is not None]
        end = asyncio.get_running_loop().call_later(registration.lease_s, self._lease_over, name)
        self._entries[name] = (registration, time.monotonic(), end)
        self._names[registration.address] = name
        if before is None or before.state != registration.state:
            _LOG.info("replica %s of pool %r is %s", name, registration.pool, registration.state)
        for known in gone:
            if (known.pool, known.address) != (registration.pool, registration.address):
                self._left(known.pool, known.address)
        if registration.state == "draining":
            self._withdrawn[registration.address] = time.monotonic() + WITHDRAWN_S
        elif registration.state == "ready":
            self._withdrawn.pop(registration.address, None)
            self._joined(registration.pool, registration.address)
            return
        self._left(registration.pool, registration.address)

    def withdraw(self, name: str) -> bool:
        """Forget a replica; return whether it was known. It gets no request from now on."""
        known = self._take(name)
        if known is None:
            return False
        _LOG.info("replica %s of pool %r has withdrawn", name, known.pool)
        self._withdrawn[known.address] = time.monotonic() + WITHDRAWN_S
        self._left(known.pool, known.address)
        return True

    def replicas(self, pool: str, listed: Iterable[str]) -> set[str]:
        """Return the addresses of a pool's replicas that get requests.

        listed: by another source; those that are registered otherwise, or withdrew a short time ago, are left out.
        """
        now_s = time.monotonic()
        self._withdrawn = {address: until_s for address, until_s in self._withdrawn.items() if until_s > now_s}
        entries = [known for known, *_ in self._entries.values()]
        ready = {known.address for known in entries if known.pool == pool and known.state == "ready"}
        return set(listed) - self._withdrawn.keys() - self._names.keys() | ready

    def starting(self, pool: str) -> list[float | None]:
        """Return for each replica of a pool that starts the seconds until it is ready, None where unknown."""
        now_s = time.monotonic()
        return [
            known.expected_s if known.expected_s is None else max(0.0, known.expected_s - (now_s - at_s))
            for known, at_s, _ in self._entries.values()
            if known.pool == pool and known.state == "starting"
        ]

    def metrics_url(self, address: str) -> str:
        """Return the metrics URL that the replica at ``address`` gave; "" if none."""
        return self._entries[self._names[address]][0].metrics_url if address in self._names else ""

    def entries(self) -> list[dict[str, Any]]:
        """Return what is registered: the fields of each, its name, and the seconds since its last beat."""
        now_s = time.monotonic()
        return [
            {"name": name, **known.model_dump(), "beat_age_s": round(now_s - at_s, 3)}
            for name, (known, at_s, _) in sorted(self._entries.items())
        ]

    def close(self) -> None:
        for name in list(self._entries):
            self._take(name)

    def _take(self, name: str) -> Registration | None:
        known, _, end = self._entries.pop(name, (None, 0.0, None))
        if end is not None and known is not None:
            end.cancel()
            del self._names[known.address]
        return known

    def _lease_over(self, name: str) -> None:
        known, at_s, _ = self._entries[name]
        self._entries[name] = known, at_s, asyncio.get_running_loop().call_later(GRACE_S, self._expire, name)

    def _expire(self, name: str) -> None:
        known = self._take(name)
        assert known is not None, "a lease ends only while its replica is registered"
        _LOG.warning("replica %s of pool %r: no beat for %g s", name, known.pool, known.lease_s)
        self._left(known.pool, known.address)


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

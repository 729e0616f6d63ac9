"""The rules of the scaling law: a table of TOML for each pool, every field optional and checked by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from contract import toml_table
from contract.errors import InvalidArgument
from contract.toml_table import Amount, Table

_LOG = logging.getLogger(__name__)
_Replicas = Annotated[int, Field(ge=0, le=10_000)]
_Step = Annotated[int, Field(ge=1, le=10_000)]
_Seconds = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]
_Part = Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)]
_Class = Annotated[int, BeforeValidator(lambda key: int(key) if str(key).isdecimal() else key), Field(ge=0, le=9)]
_Wait = Annotated[float, Field(ge=0.1, le=86_400, allow_inf_nan=False)]


class PoolRules(Table):
    """How one pool is scaled.

    min_replicas: with 0 the pool may be scaled to zero. warm_replicas: ready beyond what the load needs, also without.
    least_headroom: capacity beyond the load, as a part of it; with less, replicas are added.
    most_headroom: with one replica less and still so much, one is removed; what is added leaves so much.
    up_cooldown_s: between two additions. down_cooldown_s: a removal needs so long without more load and without change.
    step_up, step_down: replicas added or removed at once. zero_after_s: without any work before the last one goes.
    start_s: from the order of a replica until it is ready, as long as no start was measured.
    slow_start_s: from then on until it gets its full share; TRIDENT_GATEWAY_SLOW_START_S.
    tokens_per_s: of one replica with all slots taken, as long as none was measured; 0: unknown.
    wait_s: seconds in which the queued work of a class is to be worked off, beyond the time that a new replica takes;
        a class that is not listed has those of the next more urgent one that is.
    replica_hour, cost_per_hour: price of one replica, and what all of them may cost, in one currency; 0: no ceiling.
    """

    min_replicas: _Replicas = 1
    max_replicas: Annotated[int, Field(ge=1, le=10_000)] = 10
    warm_replicas: _Replicas = 0
    least_headroom: _Part = 0.2
    most_headroom: _Part = 0.4
    up_cooldown_s: _Seconds = 60.0
    down_cooldown_s: _Seconds = 300.0
    step_up: _Step = 8
    step_down: _Step = 1
    zero_after_s: _Seconds = 900.0
    start_s: _Seconds = 60.0
    slow_start_s: _Seconds = 30.0
    tokens_per_s: Amount = 0.0
    wait_s: Mapping[_Class, _Wait] = {0: 2.0, 1: 10.0, 5: 60.0, 9: 600.0}
    time_of_day: bool = True
    replica_hour: Amount = 0.0
    cost_per_hour: Amount = 0.0

    @property
    def ceiling(self) -> int:
        """The most replicas: ``max_replicas``, or what ``cost_per_hour`` pays for."""
        if not (self.cost_per_hour and self.replica_hour):
            return self.max_replicas
        return int(min(self.max_replicas, self.cost_per_hour / self.replica_hour + 1e-9))

    def wait_of(self, priority: int) -> float:
        """Return ``wait_s`` of a class."""
        listed = sorted(self.wait_s)
        return self.wait_s[max((known for known in listed if known <= priority), default=listed[0])]

    @model_validator(mode="after")
    def _consistent(self) -> PoolRules:
        if not self.wait_s:
            raise ValueError("wait_s: must name one class at least, got none")
        if self.least_headroom > self.most_headroom:
            raise ValueError(f"most_headroom: must be at least least_headroom, got {self.most_headroom:g}")
        if self.cost_per_hour and not self.replica_hour:
            raise ValueError("replica_hour: must be set with cost_per_hour, got 0")
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas: must be at most max_replicas, got {self.min_replicas}")
        if max(self.min_replicas, 1) > self.ceiling:
            allowed = "must pay for min_replicas and for one replica at least"
            raise ValueError(f"cost_per_hour: {allowed}, got {self.cost_per_hour:g}")
        return self


class Rules(Table):
    """The rules of all pools. defaults: of pools without a table, and of fields that a table leaves out."""

    defaults: PoolRules = PoolRules()
    pools: Mapping[str, PoolRules] = {}

    @model_validator(mode="before")
    @classmethod
    def _full(cls, table: Any) -> Any:
        """Give every pool what it does not name from the defaults."""
        pools, defaults = (table.get(name, {}) if isinstance(table, dict) else None for name in ("pools", "defaults"))
        if not (isinstance(pools, dict) and isinstance(defaults, dict)):
            return table
        full = {name: {**defaults, **own} if isinstance(own, dict) else own for name, own in pools.items()}
        return {**table, "pools": full}

    def of(self, pool: str) -> PoolRules:
        return self.pools.get(pool, self.defaults)


def read(path: str) -> Rules:
    """Read the file; "" for the defaults alone. Raises InvalidArgument."""
    return toml_table.checked(Rules, toml_table.read(path) if path else {}, path)


class RulesFile:
    """The rules of a file, read again when it has changed; one that is wrong then leaves them as they were."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.rules = read(path)
        self._changed_ns = self._modified_ns()

    def refresh(self) -> None:
        changed_ns = self._modified_ns()
        if changed_ns == self._changed_ns:
            return
        self._changed_ns = changed_ns
        try:
            self.rules = read(self._path)
            _LOG.info("%s was read again", self._path)
        except InvalidArgument as exc:
            _LOG.error("the rules stay as they were: %s", exc)

    def _modified_ns(self) -> int:
        try:
            return Path(self._path).stat().st_mtime_ns if self._path else 0
        except OSError:
            return 0

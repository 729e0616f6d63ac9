"""The pools of replicas and their shares: those of the environment, changed by the configuration file. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from contract.errors import InvalidArgument
from gateway.config.policy import PoolRules
from gateway.config.settings import Settings, replica_source, variable


@dataclass(frozen=True)
class Pools:
    """Which pools there are.

    sources: HOST:PORT,… or the URL of a discovery, by pool.
    weights: share of the requests, by pool; None: the environment sets none, and all pools have equal shares.
    encoders, candidates: pools without a share of their own: requests name an encoder, a release has its candidate's.
    held: seconds that requests wait for a replica while the pool has none, by pool; others refuse at once.
    """

    sources: Mapping[str, str]
    weights: Mapping[str, float] | None = None
    encoders: frozenset[str] = frozenset()
    candidates: frozenset[str] = frozenset()
    held: Mapping[str, float] = field(default_factory=dict)

    @property
    def shares(self) -> dict[str, float]:
        """The weight of every pool, 0 of encoders."""
        if self.weights is None:
            return {pool: float(pool not in self.encoders | self.candidates) for pool in self.sources}
        return {pool: self.weights.get(pool, 0.0) for pool in self.sources}

    @property
    def generating(self) -> dict[str, float]:
        """The weight of every pool with generating models."""
        return {pool: weight for pool, weight in self.shares.items() if pool not in self.encoders}

    def changed(self, path: str, rules: Mapping[str, PoolRules], candidates: frozenset[str] = frozenset()) -> Pools:
        """Return these pools with the changes of the file at ``path``: its section [pools], and candidates of releases.

        Raises InvalidArgument for a pool without replicas, or without a weight while others have one, and if all are 0.
        """
        if not rules:
            return replace(self, candidates=candidates)
        listed = {pool: rule.replicas for pool, rule in rules.items() if rule.replicas is not None}
        for pool, where in listed.items():
            try:
                replica_source(where)
            except InvalidArgument as exc:
                raise InvalidArgument(f"{path}: pools.{pool}.replicas", exc.problem) from exc
        # The pool without a name is the one of a single pool; named pools replace it.
        encoders = self.encoders | {pool for pool, rule in rules.items() if rule.kind == "encoder"}
        kept = {pool: where for pool, where in self.sources.items() if pool or listed.keys() <= encoders}
        sources = {**kept, **listed}
        held = {pool: rule.hold_s for pool, rule in rules.items() if rule.scale_to_zero}
        for pool in rules:
            if pool not in sources:
                known = ", ".join(filter(None, sources)) or "none"
                problem = f"must have replicas, or be a pool of {variable('replicas')}, which names {known}"
                raise InvalidArgument(f"{path}: pools.{pool}", problem)
        weighted = {pool: rule.weight for pool, rule in rules.items() if rule.weight is not None}
        if not weighted:
            return Pools(sources, self.weights, encoders, candidates, held)
        for pool in sources.keys() - encoders - candidates:
            if pool not in weighted and self.weights is None:
                problem = f"has no weight while {', '.join(weighted)} has one: must be a number from 0 to 1e9"
                raise InvalidArgument(f"{path}: pools.{pool}", problem)
        weights = {**(self.weights or {}), **weighted}
        if sum(weights.get(pool, 0.0) for pool in sources) <= 0:
            raise InvalidArgument(f"{path}: pools", "all weights are 0; one at least must be more")
        return Pools(sources, weights, encoders, candidates, held)


def of(settings: Settings) -> Pools:
    """Return the pools that the environment sets."""
    return Pools(settings.pools, settings.weights if settings.pool_weights else None, frozenset(settings.encoders))

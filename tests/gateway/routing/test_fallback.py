"""The next target of a request that failed before its first token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from contract.errors import Overloaded
from contract.generation import GenerationRequest
from gateway.config.tenant import Tenant
from gateway.request_context import RequestContext
from gateway.routing.fallback import REPLICAS, Fallback

REQUEST = GenerationRequest("one", max_tokens=5)
HTTP = RequestContext(Tenant(), "http", "chat", "r")
GRPC = RequestContext(Tenant(), "grpc", "chat", "r")


class Targets:
    """``pool`` is a target of replicas, ``far`` an upstream."""

    def members(self, target: str, request: GenerationRequest) -> list[str]:
        return [target]

    def accepts(self, target: str, requests: Sequence[GenerationRequest]) -> bool:
        return target in ("pool", "far")

    def has_pool(self, target: str, requests: Sequence[GenerationRequest]) -> bool:
        return target == "pool"

    def wait_s(self, targets: Sequence[str], request: GenerationRequest) -> float | None:
        return 0.2 if "far" in targets else None


class Replicas:
    def __init__(self, healthy: bool) -> None:
        self.healthy = healthy

    def serves(self, pool: str) -> bool:
        return self.healthy


def fallback(*targets: str, healthy: bool = True) -> Fallback:
    return Fallback(Targets(), Replicas(healthy), lambda: targets, Counter())


@pytest.mark.parametrize(
    ("context", "tried", "expected"),
    [
        (HTTP, {REPLICAS}, "far"),
        (HTTP, {REPLICAS, "far"}, "pool"),
        (HTTP, {"far"}, "pool"),
        (HTTP, {"far", "pool"}, REPLICAS),
        (HTTP, {REPLICAS, "far", "pool"}, None),
        (GRPC, {REPLICAS}, "pool"),
        (GRPC, {REPLICAS, "pool"}, None),
    ],
)
def test_targets_come_in_order_each_once_then_the_replicas(context, tried, expected):
    assert fallback("unknown", "far", "pool").next_target(context, REQUEST, tried) == expected


def test_replicas_that_are_down_are_no_target():
    assert fallback("pool", healthy=False).next_target(HTTP, REQUEST, {"pool"}) is None


def test_retry_after_is_the_upstreams_where_the_pool_is_down():
    refusal = Overloaded("full", 9.0)
    assert fallback("far").retry_after_s(HTTP, REQUEST, refusal) == 9.0
    assert fallback("far", healthy=False).retry_after_s(HTTP, REQUEST, refusal) == 1.0
    assert fallback("far", healthy=False).retry_after_s(GRPC, REQUEST, refusal) == 9.0
    assert fallback(healthy=False).retry_after_s(HTTP, REQUEST, refusal) == 9.0

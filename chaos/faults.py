"""The faults there are: what each is done to, for how long, and what callers may see of it."""

from __future__ import annotations

from dataclasses import dataclass

REPLICAS, GATEWAYS, REDIS = ("replica-1", "replica-2"), ("gateway-1", "gateway-2"), ("redis",)


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    targets: what it can be done to. for_s: seconds that it may last, least and most; None: it is over at once.
    needs: "redis" or "envoy", or "".
    replica_out: requests can lose a replica. gateway_out: streams at that gateway break off. silent: a stream may
        hear nothing until the gateway's timeouts. budgets_out: tenants with budgets may be refused.
    process: what a signal is sent to: tritonserver, engine, supervisor, worker, process, or a model whose stub it is.
    """

    targets: tuple[str, ...]
    for_s: tuple[float, float] | None = None
    needs: str = ""
    replica_out: bool = False
    gateway_out: bool = False
    silent: bool = False
    budgets_out: bool = False
    process: str = ""


def _kinds() -> dict[str, Kind]:
    kinds = {}
    for name in ("tritonserver", "engine", "tokenizer", "detokenizer", "supervisor"):
        kinds[f"kill.{name}"] = Kind(REPLICAS, replica_out=True, process=name)
    for name in ("tritonserver", "engine", "detokenizer", "supervisor"):
        kinds[f"stop.{name}"] = Kind(REPLICAS, (0.5, 3.0), replica_out=True, silent=True, process=name)
    # gateway-1 has two workers, gateway-2 is one process.
    kinds["kill.worker"] = Kind(("gateway-1",), gateway_out=True, process="worker")
    kinds["stop.worker"] = Kind(("gateway-1",), (0.5, 3.0), silent=True, process="worker")
    kinds["kill.gateway"] = Kind(("gateway-2",), gateway_out=True, process="process")
    kinds["stop.gateway"] = Kind(("gateway-2",), (0.5, 3.0), silent=True, process="process")
    kinds["kill.redis"] = Kind(REDIS, needs="redis", budgets_out=True, process="process")
    kinds["stop.redis"] = Kind(REDIS, (0.5, 4.0), needs="redis", budgets_out=True, process="process")
    kinds["envoy.delay"] = Kind(REPLICAS, (1.0, 4.0), needs="envoy")
    kinds["envoy.abort"] = Kind(REPLICAS, (1.0, 4.0), needs="envoy", replica_out=True)
    kinds["envoy.throttle"] = Kind(REPLICAS, (1.0, 3.0), needs="envoy", silent=True)
    kinds["envoy.reset"] = Kind(REPLICAS, needs="envoy", replica_out=True)
    kinds["fail.engine.step"] = Kind(REPLICAS, (0.2, 1.0), replica_out=True)
    kinds["fail.engine.kv"] = Kind(REPLICAS, (0.5, 3.0), silent=True)
    kinds["fail.disk.slow"] = Kind(GATEWAYS + REPLICAS, (1.0, 4.0))
    kinds["fail.disk.full"] = Kind(GATEWAYS + REPLICAS, (1.0, 4.0))
    kinds["fail.redis.away"] = Kind(GATEWAYS, (1.0, 4.0), needs="redis", budgets_out=True)
    kinds["fail.metrics.lie"] = Kind(GATEWAYS, (1.0, 4.0))
    kinds["fail.clock.jump"] = Kind(GATEWAYS + REPLICAS, (1.0, 4.0))
    kinds["fail.descriptors.few"] = Kind(GATEWAYS, (0.5, 2.0), gateway_out=True, replica_out=True, budgets_out=True)
    return kinds


KINDS = _kinds()

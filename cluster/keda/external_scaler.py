"""KEDA's external scaler (externalscaler.proto of KEDA 2.20, all five calls) on the scaling law.

A ScaledObject's trigger names the pool in its metadata: ``pool: NAME``. The only metric is the number of replicas that
the pool needs, with a target of 1 for each, so that the HPA's number is the law's. For a pool of which nothing was ever
known calls fail with UNAVAILABLE, and KEDA's ``fallback`` holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio
from prometheus_client import CollectorRegistry, start_http_server

from cluster.keda import externalscaler_pb2 as pb
from cluster.scaling.law import Decision
from cluster.scaling.scaler import Scaler
from cluster.scaling.settings import Settings
from contract.errors import InvalidArgument

METRIC = "trident_wanted_replicas"
LOOK_S = 0.25  # between two looks at the decision of a stream


@dataclass
class ExternalScaler:
    """The calls. Each names its pool in ``scalerMetadata``."""

    scaler: Scaler

    async def IsActive(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        return pb.IsActiveResponse(result=(await self._decision(request, context)).wanted > 0)

    async def StreamIsActive(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """Tell at once and at every change, so that a pool at zero need not wait to be asked."""
        told: bool | None = None
        while True:
            active = (await self._decision(request, context)).wanted > 0
            if active is not told:
                told = active
                yield pb.IsActiveResponse(result=active)
            await asyncio.sleep(LOOK_S)

    async def GetMetricSpec(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        return pb.GetMetricSpecResponse(metricSpecs=[pb.MetricSpec(metricName=METRIC, targetSize=1, targetSizeFloat=1)])

    async def StreamMetricSpec(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """Tell the target, which never changes, and leave the stream open: KEDA opens one that ends again."""
        yield await self.GetMetricSpec(request, context)
        await asyncio.Event().wait()

    async def GetMetrics(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        if request.metricName not in ("", METRIC):
            message = f"metricName: must be {METRIC}, got {request.metricName!r}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
        wanted = (await self._decision(request.scaledObjectRef, context)).wanted
        value = pb.MetricValue(metricName=METRIC, metricValue=wanted, metricValueFloat=wanted)
        return pb.GetMetricsResponse(metricValues=[value])

    async def _decision(self, ref: Any, context: grpc.aio.ServicerContext) -> Decision:
        pool = ref.scalerMetadata.get("pool", "")
        decision = self.scaler.decisions.get(pool)
        if decision is None:
            pools = ", ".join(name or "''" for name in self.scaler.decisions) or "no pool yet"
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"pool: nothing is known of {pool!r}, but of {pools}")
        assert decision is not None, "abort raises"
        return decision


async def start(scaler: Scaler, host: str, port: int) -> tuple[grpc.aio.Server, int]:
    """Serve on ``port``, 0 for a free one; return the server and its port."""
    calls, server = ExternalScaler(scaler), grpc.aio.server()
    service, handlers = pb.DESCRIPTOR.services_by_name["ExternalScaler"], {}
    for method in service.methods:
        handler = (grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler)[method.server_streaming]
        request, answer = (getattr(pb, kind.name) for kind in (method.input_type, method.output_type))
        handlers[method.name] = handler(getattr(calls, method.name), request.FromString, answer.SerializeToString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
    bound = server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    await server.start()
    return server, bound


async def serve(scaler: Scaler, settings: Settings) -> int:
    """Serve KEDA and Prometheus until SIGTERM or Ctrl-C. Raises InvalidArgument: a port cannot be bound."""
    registry, loop, name = CollectorRegistry(), asyncio.get_running_loop(), "metrics_port"
    registry.register(scaler)
    try:
        page, thread = start_http_server(settings.metrics_port, settings.host, registry)
        name = "grpc_port"
        server, port = await start(scaler, settings.host, settings.grpc_port)
    except (OSError, RuntimeError) as exc:
        problem = f"must be a free port of {settings.host}, got {getattr(settings, name)}: {exc}"
        raise InvalidArgument(settings.variable(name), problem) from exc
    print(f"external scaler on {settings.host}:{port}, metrics on {settings.host}:{page.server_port}", flush=True)
    deciding = asyncio.create_task(scaler.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, deciding.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await deciding
    finally:
        await server.stop(1.0)
        page.shutdown()
        page.server_close()
        thread.join()
    return 0

"""KEDA's external scaler by a real gRPC client, as KEDA calls it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from cluster.keda import external_scaler
from cluster.keda import externalscaler_pb2 as pb
from cluster.scaling.law import Decision
from cluster.scaling.scaler import Scaler
from cluster.scaling.settings import Settings
from tests.cluster.scaling.test_reader import Pages, page, pages  # noqa: F401

SERVICE = "/externalscaler.ExternalScaler/"
REF = pb.ScaledObjectRef(name="main", namespace="llm", scalerMetadata={"pool": "main"})


class Decided:
    """What the calls need of a Scaler."""

    def __init__(self) -> None:
        self.decisions: dict[str, Decision] = {}

    def wants(self, wanted: int) -> None:
        self.decisions["main"] = Decision(wanted, "load", "", 0, 0.0, 0.0, 0.0)


class Keda:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def unary(self, name: str, request, answer):
        call = self._channel.unary_unary(SERVICE + name, type(request).SerializeToString, answer.FromString)
        return call(request, timeout=60)

    def stream(self, name: str, answer):
        call = self._channel.unary_stream(SERVICE + name, pb.ScaledObjectRef.SerializeToString, answer.FromString)
        return call(REF, timeout=60)

    def metrics(self, name: str = external_scaler.METRIC):
        request = pb.GetMetricsRequest(scaledObjectRef=REF, metricName=name)
        return self.unary("GetMetrics", request, pb.GetMetricsResponse)


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> Decided:
    monkeypatch.setattr(external_scaler, "LOOK_S", 0.01)
    return Decided()


@pytest.fixture
async def keda(decided: Decided) -> AsyncIterator[Keda]:
    server, port = await external_scaler.start(decided, "127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Keda(channel)
    await server.stop(0)


async def test_the_metric_is_the_wanted_replicas_with_a_target_of_one(decided: Decided, keda: Keda):
    decided.wants(3)
    [spec] = (await keda.unary("GetMetricSpec", REF, pb.GetMetricSpecResponse)).metricSpecs
    assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == (external_scaler.METRIC, 1, 1.0)
    [value] = (await keda.metrics(spec.metricName)).metricValues
    assert (value.metricName, value.metricValue, value.metricValueFloat) == (spec.metricName, 3, 3.0)
    decided.wants(0)
    [value] = (await keda.metrics()).metricValues
    assert (value.metricValue, value.metricValueFloat) == (0, 0.0)


async def test_a_pool_is_active_while_it_wants_a_replica(decided: Decided, keda: Keda):
    for wanted, active in ((0, False), (1, True)):
        decided.wants(wanted)
        assert (await keda.unary("IsActive", REF, pb.IsActiveResponse)).result is active


async def test_activity_is_pushed_at_once_and_when_it_changes(decided: Decided, keda: Keda):
    decided.wants(2)
    stream = keda.stream("StreamIsActive", pb.IsActiveResponse)
    assert (await stream.read()).result is True
    decided.wants(5)
    decided.wants(0)
    assert (await stream.read()).result is False
    decided.wants(1)
    assert (await stream.read()).result is True
    stream.cancel()


async def test_the_metric_spec_is_pushed_once_and_its_stream_stays(decided: Decided, keda: Keda):
    stream = keda.stream("StreamMetricSpec", pb.GetMetricSpecResponse)
    assert (await stream.read()).metricSpecs[0].metricName == external_scaler.METRIC
    more = asyncio.ensure_future(stream.read())
    await asyncio.sleep(0.05)
    assert not more.done()
    more.cancel()
    stream.cancel()


async def test_what_was_never_known_is_unavailable_so_that_kedas_fallback_holds(keda: Keda):
    calls = (keda.metrics(), keda.unary("IsActive", REF, pb.IsActiveResponse))
    for call in (*calls, keda.stream("StreamIsActive", pb.IsActiveResponse).read()):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "nothing is known of 'main'" in caught.value.details()


async def test_another_metric_is_refused_by_name(decided: Decided, keda: Keda):
    decided.wants(1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await keda.metrics("s0-other")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "must be trident_wanted_replicas, got 's0-other'" in caught.value.details()


@pytest.mark.slow
async def test_while_the_gateways_pages_are_away_every_call_tells_what_was_known(pages: Pages, monkeypatch):  # noqa: F811
    monkeypatch.setattr(external_scaler, "LOOK_S", 0.01)
    pages.texts = {"1": page(queued=1e6, speed=100)}
    scaler = Scaler(Settings(gateways=f"{pages.base}/1", interval_s=0.02, stale_s=0.1))
    server, port = await external_scaler.start(scaler, "127.0.0.1", 0)
    deciding = asyncio.create_task(scaler.run())
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    keda = Keda(channel)

    async def until(rule: str) -> None:
        deadline_s = time.monotonic() + 60
        while "main" not in scaler.decisions or scaler.decisions["main"].rule != rule:
            assert time.monotonic() < deadline_s, scaler.plan()
            await asyncio.sleep(0.01)

    async def check(wanted: int) -> None:
        assert (await keda.metrics()).metricValues[0].metricValue == wanted
        assert (await keda.unary("IsActive", REF, pb.IsActiveResponse)).result
        assert len((await keda.unary("GetMetricSpec", REF, pb.GetMetricSpecResponse)).metricSpecs) == 1

    try:
        await until("load")
        active = keda.stream("StreamIsActive", pb.IsActiveResponse)
        spec = keda.stream("StreamMetricSpec", pb.GetMetricSpecResponse)
        assert (await active.read()).result and (await spec.read()).metricSpecs[0].targetSize == 1
        await check(9)
        for outage in (503, "no page of a gateway", page(queued="NaN")):
            pages.texts["1"] = outage
            await until("unknown")
            await check(9)
            pages.texts["1"] = page(queued=0)
            await until("cooldown")  # it has no work now, and nothing goes at once
            await check(9)
        assert not active.done() and not spec.done()
        active.cancel()
        spec.cancel()
    finally:
        deciding.cancel()
        await asyncio.gather(deciding, return_exceptions=True)
        await channel.close()
        await server.stop(0)


async def test_it_listens_at_an_ipv6_address(decided: Decided):
    decided.wants(2)
    server, port = await external_scaler.start(decided, "::1", 0)
    async with grpc.aio.insecure_channel(f"[::1]:{port}") as channel:
        assert [value.metricValue for value in (await Keda(channel).metrics()).metricValues] == [2]
    await server.stop(None)

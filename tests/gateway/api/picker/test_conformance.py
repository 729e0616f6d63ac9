"""The conformance cases of the Gateway API Inference Extension, as far as Envoy and the picker decide them.

Each test is named as its case. What a controller alone does, conditions in the status of a resource, is not here: what
such a resource becomes in Envoy is.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.gateway.api.picker import envoys
from tests.gateway.api.picker.endpoints import Pool, pool
from tests.gateway.api.picker.test_envoy import asked, by_header, idle, post
from tests.gateway.running import until

pytestmark = pytest.mark.slow
PER_ROUTE = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
SERVED = "x-conformance-test-served-endpoint"


def virtual_host(table: dict[str, Any], listener: int = 0) -> dict[str, Any]:
    [chain] = table["static_resources"]["listeners"][listener]["filter_chains"]
    [host] = chain["filters"][0]["typed_config"]["route_config"]["virtual_hosts"]
    return host


def second_pool(table: dict[str, Any], second: Pool) -> None:
    """Adds the clusters picker2 and replicas2."""
    clusters = table["static_resources"]["clusters"]
    urls = ([second.running.picker_url], second.urls)
    for cluster, own in zip(copy.deepcopy(clusters[:2]), urls, strict=True):
        cluster["name"] = cluster["load_assignment"]["cluster_name"] = cluster["name"] + "2"
        endpoints = [{"endpoint": {"address": envoys.address(url)}} for url in own]
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
        clusters.append(cluster)


def asking(cluster: str) -> dict[str, Any]:
    """What makes a route, or a part of one, ask another picker."""
    overrides = {"grpc_service": {"envoy_grpc": {"cluster_name": cluster}}}
    return {"typed_per_filter_config": {"envoy.filters.http.ext_proc": {"@type": PER_ROUTE, "overrides": overrides}}}


@contextlib.asynccontextmanager
async def two_pools(folder: Path, change: Callable[[dict[str, Any]], None]) -> AsyncIterator[tuple[str, Pool, Pool]]:
    """An Envoy with two pools, which ``change`` routes to."""
    async with pool(2) as one, pool(2) as two:

        def both(table: dict[str, Any]) -> None:
            second_pool(table, two)
            change(table)

        async with asked(folder, one, both) as url:
            yield url, one, two


def requests_of(running: Pool) -> list[int]:
    return [len(endpoint.seen) for endpoint in running.endpoints]


async def test_InferencePoolAccepted():
    """The configuration that stands for a pool is accepted as it is."""
    command = [envoys.binary(), "--mode", "validate", "-c", str(envoys.ROOT / "examples" / "envoy.yaml")]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, log = await process.communicate()
    assert process.returncode == 0, log.decode()


async def test_GatewayFollowingEPPRouting(tmp_path):
    """Requests reach only endpoints that the picker names, be it one or several."""
    async with pool(3) as running, asked(tmp_path, running, by_header) as url:
        urls = [endpoint.url for endpoint in running.endpoints]
        for size in (1, 2, 3):
            for allowed in itertools.combinations(urls, size):
                answers = [await post(url, x_test_subset=",".join(allowed)) for _ in range(3)]
                assert {body["endpoint"] for _, _, body in answers} <= {*allowed}
        assert all(requests_of(running))


async def test_GatewayFollowingEPPRoutingWithDataParallelism(tmp_path):
    """Endpoints with one address and several ports are told apart by their ports."""
    async with pool(3) as running, asked(tmp_path, running, by_header) as url:
        first, _, third = (endpoint.url for endpoint in running.endpoints)
        for _ in range(6):
            assert (await post(url, x_test_subset=f"{first},{third}"))[0] == 200
        assert requests_of(running)[1] == 0 and sum(requests_of(running)) == 6


async def test_GatewayDestinationEndpointServed(tmp_path):
    """The endpoint that served is told to the picker, which books it, and may be told to the caller."""

    def show(table: dict[str, Any]) -> None:
        by_header(table)
        value = "%DYNAMIC_METADATA(envoy.lb:x-gateway-destination-endpoint-served)%"
        virtual_host(table)["response_headers_to_add"] = [{"header": {"key": SERVED, "value": value}}]

    async with pool(2) as running, asked(tmp_path, running, show) as url:
        for endpoint in running.endpoints:
            status, headers, _ = await post(url, x_test_subset=endpoint.url)
            assert (status, headers[SERVED]) == (200, endpoint.url)
        await until(lambda: idle(running))
        assert all(replica.breaker.failures == 0 for replica in running.running.service.replicas.all())


async def test_EppUnAvailableFailOpen(tmp_path):
    """With failure_mode_allow requests are served while the picker is not there."""

    def fail_open(table: dict[str, Any]) -> None:
        by_header(table)
        envoys.http_filters(table)[1]["typed_config"]["failure_mode_allow"] = True
        table["static_resources"]["clusters"][0]["load_assignment"]["endpoints"] = []

    async with pool(1) as running, envoys.envoy(tmp_path, "127.0.0.1:1", [running.endpoints[0].url], fail_open) as url:
        assert [(await post(url))[0] for _ in range(4)] == [200] * 4


async def test_InferencePoolInvalidEPPService(tmp_path):
    """Without failure_mode_allow a picker that is not there is a 5xx."""
    async with pool(1) as running, envoys.envoy(tmp_path, "127.0.0.1:1", running.urls) as url:
        assert 500 <= (await post(url))[0] < 600
        assert requests_of(running) == [0]


async def test_InferencePoolMissingEPPRef(tmp_path):
    """A pool without a picker is a cluster as any other."""

    def without(table: dict[str, Any]) -> None:
        envoys.http_filters(table).pop(0)

    async with pool(1) as running:
        async with envoys.envoy(tmp_path, "127.0.0.1:1", [running.endpoints[0].url], without) as url:
            assert (await post(url))[0] == 200


async def test_HTTPRouteInvalidInferencePoolRef(tmp_path):
    """A route to a pool that does not exist is a 5xx, and a picker is not asked for long."""

    def elsewhere(table: dict[str, Any]) -> None:
        virtual_host(table)["routes"][0]["route"]["cluster"] = "none"
        chain = table["static_resources"]["listeners"][0]["filter_chains"][0]
        chain["filters"][0]["typed_config"]["route_config"]["validate_clusters"] = False

    async with pool(1) as running, asked(tmp_path, running, elsewhere) as url:
        assert 500 <= (await post(url))[0] < 600
        await until(lambda: idle(running))
        assert requests_of(running) == [0]


async def test_InferencePoolHTTPRoutePortValidation(tmp_path):
    """The picked endpoint's port counts, whatever port the caller or the route names."""
    async with pool(1) as running, asked(tmp_path, running) as url:
        for host in ("pool", "pool:80", "pool:1234"):
            status, _, body = await post(url, host=host)
            assert (status, body["endpoint"]) == (200, running.endpoints[0].url)


@pytest.mark.parametrize("protocol", ["http_protocol_options", "http2_protocol_options"])
async def test_InferencePoolAppProtocol(tmp_path, protocol):
    """Endpoints are reached over the protocol of their pool: HTTP/1.1, or HTTP/2 without TLS."""

    def speak(table: dict[str, Any]) -> None:
        [options] = table["static_resources"]["clusters"][1]["typed_extension_protocol_options"].values()
        del options["use_downstream_protocol_config"]
        options["explicit_http_config"] = {protocol: {}}

    async with pool(1) as running:
        if protocol == "http_protocol_options":
            async with asked(tmp_path, running, speak) as url:
                assert (await post(url))[0] == 200
            return
        # A replica's gRPC port speaks HTTP/2 only: that it answers, with a gRPC status, is what shows it.
        [replica] = running.replicas
        async with envoys.envoy(tmp_path, running.running.picker_url, [replica.url], speak) as url:
            async with aiohttp.ClientSession() as session:
                path = "/inference.GRPCInferenceService/None"
                headers = {"content-type": "application/grpc", "te": "trailers"}
                async with session.post(f"http://{url}{path}", headers=headers, data=b"\0\0\0\0\0") as answer:
                    assert (answer.status, answer.headers["grpc-status"]) == (200, "12")


async def test_HTTPRouteMultipleRulesDifferentPools(tmp_path):
    """Rules by path ask the picker of their own pool."""

    def by_path(table: dict[str, Any]) -> None:
        first = virtual_host(table)["routes"][0]
        second = {"match": {"prefix": "/v1/chat/"}, "route": {**first["route"], "cluster": "replicas2"}}
        virtual_host(table)["routes"] = [second | asking("picker2"), first]

    chat = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
    async with two_pools(tmp_path, by_path) as (url, one, two):
        for _ in range(3):
            assert (await post(url))[0] == (await post(url, chat, "/v1/chat/completions"))[0] == 200
        assert (sum(requests_of(one)), sum(requests_of(two))) == (3, 3)
        await until(lambda: idle(one) and idle(two))


async def test_GatewayWeightedAcrossTwoInferencePools(tmp_path):
    """Weights draw the pool, and each request stays in the pool whose picker was asked."""

    def weighted(table: dict[str, Any]) -> None:
        route = virtual_host(table)["routes"][0]["route"]
        del route["cluster"]
        parts = [{"name": "replicas", "weight": 70}, {"name": "replicas2", "weight": 30, **asking("picker2")}]
        route["weighted_clusters"] = {"clusters": parts}

    async with two_pools(tmp_path, weighted) as (url, one, two):
        names = {endpoint.url: number for number, each in enumerate((one, two)) for endpoint in each.endpoints}
        answers = await asyncio.gather(*(post(url) for _ in range(200)))
        drawn = Counter(names[body["endpoint"]] for status, _, body in answers if status == 200)
        assert drawn[0] + drawn[1] == 200 and 100 <= drawn[0] <= 175
        for number, each in enumerate((one, two)):
            assert sum(requests_of(each)) == drawn[number]
            answered = each.running.service.metrics.requests.labels("ext_proc", "text_completion", "OK")
            await until(lambda answered=answered, number=number: answered._value.get() == drawn[number])


def second_gateway(table: dict[str, Any], port: int) -> None:
    """Adds a listener whose route goes to the second pool."""
    listeners = table["static_resources"]["listeners"]
    listeners.append({**copy.deepcopy(listeners[0]), "name": "second", "address": envoys.address(f"127.0.0.1:{port}")})
    route = virtual_host(table, 1)["routes"][0]
    route["route"]["cluster"] = "replicas2"
    route |= asking("picker2")


async def test_HTTPRouteMultipleGatewaysDifferentPools(tmp_path):
    """Two listeners with pools of their own do not mix them."""
    port = envoys.free_port()
    async with two_pools(tmp_path, lambda table: second_gateway(table, port)) as (url, one, two):
        for number in range(3):
            assert (await post(url))[0] == (await post(f"127.0.0.1:{port}"))[0] == 200
            assert (sum(requests_of(one)), sum(requests_of(two))) == (number + 1, number + 1)


async def test_InferencePoolResolvedRefsCondition(tmp_path):
    """Where its route is gone a gateway answers 404, and the other one goes on."""
    port = envoys.free_port()

    def routeless(table: dict[str, Any]) -> None:
        second_gateway(table, port)
        virtual_host(table)["routes"] = []

    async with two_pools(tmp_path, routeless) as (url, one, two):
        assert (await post(url))[0] == 404 and (await post(f"127.0.0.1:{port}"))[0] == 200
        await until(lambda: idle(one) and idle(two))
        assert (sum(requests_of(one)), sum(requests_of(two))) == (0, 1)

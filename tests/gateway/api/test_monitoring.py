"""The monitoring listener, and what the public port keeps to itself."""

from __future__ import annotations

import pytest

from contract.errors import InvalidArgument
from gateway.config.settings import Settings
from tests.fakes.replica import FakeReplica
from tests.gateway.running import gateway

KEY = "tri-0123456789abcdefghij"
API_KEYS = {"TRIDENT_GATEWAY_API_KEYS": f"acme/research/alice={KEY}"}
REQUEST = {"model": "demo", "prompt": "one two", "max_tokens": 3}
PUBLIC = ("/metrics", "/health/live", "/health/ready", "/health/deep", "/openapi.json", "/v1/models")


async def test_no_tenant_and_no_replica_is_named_on_the_public_port():
    async with FakeReplica() as replica, gateway(replica, environ=API_KEYS, deep_probes=True) as running:
        status, _, _ = await running.post("/v1/completions", REQUEST, authorization=f"Bearer {KEY}")
        assert status == 200
        for path in PUBLIC:
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Bearer {KEY}"}):
                status, text = await running.get(path, **headers)
                assert "acme" not in text and replica.url not in text, path
                assert status == 404 or path != "/metrics"
        page = await running.metrics_page()
        assert 'tenant="acme/research"' in page and replica.url in page


async def test_metrics_are_on_the_monitoring_port_with_and_without_keys():
    for environ in ({}, API_KEYS):
        async with FakeReplica() as replica, gateway(replica, environ=environ) as running:
            assert (await running.get("/metrics"))[0] == 404
            assert "trident_gateway_in_flight 0.0" in await running.metrics_page()


def test_a_monitoring_port_of_its_own_follows_the_http_port():
    assert Settings().own_metrics_port == 9002
    assert Settings(http_port=7000).own_metrics_port == 7002
    assert Settings(http_port=0).own_metrics_port == 0  # a free one beside a free one
    assert Settings(http_port=65_535).own_metrics_port == 0
    assert Settings(monitoring_port=1234).own_metrics_port == 1234
    found = Settings.from_environment({"TRIDENT_GATEWAY_MONITORING_PORT": "0"})
    assert found.own_metrics_port == 0
    with pytest.raises(InvalidArgument, match="TRIDENT_GATEWAY_MONITORING_PORT"):
        Settings(monitoring_port=65_536)

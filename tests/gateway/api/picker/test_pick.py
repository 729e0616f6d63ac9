"""Where a replica serves each form of requests. The rest of a pick is tested through its endpoint."""

from __future__ import annotations

import pytest

from gateway.api.picker.pick import endpoint
from gateway.config.settings import Settings

SETTINGS = Settings(picker_endpoints={"10.0.0.3:8001": "10.0.0.3:7000"})


@pytest.mark.parametrize(
    ("replica", "form", "where"),
    [
        ("10.0.0.1:8001", "grpc", "10.0.0.1:8001"),
        ("10.0.0.1:8001", "triton", "10.0.0.1:8000"),
        ("10.0.0.1:8001", "openai", "10.0.0.1:9000"),
        ("[fd00::1]:8001", "triton", "[fd00::1]:8000"),
        ("10.0.0.3:8001", "openai", "10.0.0.3:7000"),
        ("10.0.0.3:8001", "grpc", "10.0.0.3:8001"),
        ("replica-0.svc:8001", "grpc", ""),
    ],
)
def test_an_endpoint_is_an_address_and_a_port(replica, form, where):
    assert endpoint(SETTINGS, replica, form) == where

"""The replica of the tests leaves no connection behind, at whatever moment it stops."""

from __future__ import annotations

import asyncio
import gc
import socket
import urllib.parse
import warnings

import pytest

from tests.fakes.replica import FakeReplica, echo


@pytest.mark.parametrize("passes", range(8))
async def test_a_connection_taken_while_it_stops_is_closed(passes: int) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ResourceWarning)
        async with FakeReplica(echo) as replica:
            url = urllib.parse.urlparse(replica.metrics_url)
            with socket.create_connection((url.hostname, url.port)):
                for _ in range(passes):
                    await asyncio.sleep(0)
        gc.collect()
    assert [str(warning.message) for warning in told] == []

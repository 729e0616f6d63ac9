"""Batches as a part of the gateway: there only where a database is set, and only with settings that can be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contract.errors import InvalidArgument
from gateway.config.settings import variable
from tests.gateway.running import gateway


async def test_the_endpoints_are_there_only_with_a_database(tmp_path: Path) -> None:
    async with gateway(batch_db=tmp_path / "b") as running:
        status, body = await running.get("/v1/batches")
        assert status == 200 and '"data":[]' in body
    async with gateway() as running:
        assert (await running.get("/v1/batches"))[0] == 404


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"batch_webhook_origins": "https://a.test", "batch_webhook_secret": "short"}, "batch_webhook_secret"),
        ({"batch_webhook_origins": "ftp://a.test"}, "batch_webhook_origins"),
    ],
)
async def test_a_setting_that_cannot_be_used_is_named(tmp_path: Path, settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        async with gateway(batch_db=tmp_path / "b", **settings):
            pass
    assert caught.value.field == variable(field)

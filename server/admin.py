"""Triton's management API over HTTP, with the key only we know."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import json
from dataclasses import dataclass
from urllib.parse import urlsplit

from contract.errors import EngineFailed, TridentError, Unavailable, from_text
from server.command import ADMIN_HEADER


@dataclass(frozen=True)
class Admin:
    """Every call raises Unavailable if the server does not answer, EngineFailed if it says no."""

    http_url: str
    key: str
    timeout_s: float = 5.0

    async def is_ready(self) -> bool:
        """What /v2/health/ready says; False also while nobody answers."""
        try:
            await self._call("GET", "/v2/health/ready")
        except TridentError:
            return False
        return True

    async def states(self) -> dict[str, str]:
        """Model → READY, LOADING, UNLOADING, UNAVAILABLE, or "" if it was never loaded."""
        index = json.loads(await self._call("POST", "/v2/repository/index"))
        return {model["name"]: model.get("state", "") for model in index}

    async def load(self, model: str, timeout_s: float) -> None:
        await self._call("POST", f"/v2/repository/models/{model}/load", timeout_s)

    async def unload(self, model: str) -> None:
        await self._call("POST", f"/v2/repository/models/{model}/unload")

    async def fail_readiness(self, model: str) -> None:
        """Makes /v2/health/ready and ServerReady say no until the server ends; loaded models go on as before.

        Triton is not ready while a model it was told to load has failed. ``model`` names one that cannot load: its
        files come with the call, and its backend does not exist.
        """
        empty = {"data_type": "TYPE_INT32", "dims": [1]}
        config = {
            "name": model,
            "backend": "none",
            "input": [empty | {"name": "in"}],
            "output": [empty | {"name": "out"}],
        }
        files = {"config": json.dumps(config), "file:1/none": base64.b64encode(b"none").decode()}
        body = json.dumps({"parameters": files}).encode()
        with contextlib.suppress(EngineFailed):  # it says that the model failed to load
            await self._call("POST", f"/v2/repository/models/{model}/load", body=body)

    async def _call(self, method: str, path: str, timeout_s: float | None = None, body: bytes | None = None) -> bytes:
        return await asyncio.to_thread(
            fetch, self.http_url + path, method, {ADMIN_HEADER: self.key}, timeout_s or self.timeout_s, body
        )


def fetch(
    url: str,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    timeout_s: float = 5.0,
    body: bytes | None = None,
) -> bytes:
    """Body of a 200 answer. Unavailable if there is none, EngineFailed with the server's words for another status."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    try:
        connection.request(method, parts.path, body, headers or {})
        response = connection.getresponse()
        answer = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"{method} {url}: no answer ({error or type(error).__name__})") from error
    finally:
        connection.close()
    if response.status != 200:
        words = answer.decode(errors="replace")
        raise from_text(words) or EngineFailed(f"{method} {url}: {response.status} {words}".strip())
    return answer

"""Client of Triton's management API over HTTP."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import json
from dataclasses import dataclass
from urllib.parse import urlsplit

from contract.errors import EngineFailed, TridentError, Unavailable, from_text
from server.triton_command import ADMIN_HEADER


@dataclass(frozen=True)
class AdminClient:
    """Loads and unloads models, and reads their states. key: unlocks the management API.

    All methods but ``is_ready`` raise Unavailable: the server does not answer; EngineFailed: it answers with an error.
    """

    http_url: str
    key: str

    async def is_ready(self) -> bool:
        """Return whether /v2/health/ready answers with 200."""
        try:
            await self._call("GET", "/v2/health/ready")
        except TridentError:
            return False
        return True

    async def states(self) -> dict[str, str]:
        """Return READY, LOADING, UNLOADING, UNAVAILABLE or "" (never loaded) by model."""
        index = json.loads(await self._call("POST", "/v2/repository/index"))
        return {model["name"]: model.get("state", "") for model in index}

    async def load(self, model: str, timeout_s: float) -> None:
        await self._call("POST", f"/v2/repository/models/{model}/load", timeout_s)

    async def unload(self, model: str) -> None:
        await self._call("POST", f"/v2/repository/models/{model}/unload")

    async def fail_readiness(self, model: str) -> None:
        """Make /v2/health/ready and ServerReady false until the server ends; loaded models keep serving.

        Triton is not ready while a requested model has failed to load: ``model``, whose backend does not exist.
        """
        one = {"data_type": "TYPE_INT32", "dims": [1]}
        config = {"name": model, "backend": "none", "input": [one | {"name": "in"}], "output": [one | {"name": "out"}]}
        files = {"config": json.dumps(config), "file:1/none": base64.b64encode(b"none").decode()}
        body = json.dumps({"parameters": files}).encode()
        with contextlib.suppress(EngineFailed):  # the load fails, as intended
            await self._call("POST", f"/v2/repository/models/{model}/load", body=body)

    async def _call(self, method: str, path: str, timeout_s: float = 5.0, body: bytes | None = None) -> bytes:
        headers = {ADMIN_HEADER: self.key}
        return await asyncio.to_thread(fetch, self.http_url + path, method, headers, timeout_s, body)


def fetch(
    url: str,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    timeout_s: float = 5.0,
    body: bytes | None = None,
) -> bytes:
    """Return the body of a 200 response. Raises Unavailable: none; EngineFailed or the body's error: another status."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=timeout_s)
    try:
        connection.request(method, parts.path, body, headers or {})
        response = connection.getresponse()
        content = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"{method} {url}: no response ({error or type(error).__name__})") from error
    finally:
        connection.close()
    if response.status != 200:
        message = content.decode(errors="replace")
        raise from_text(message) or EngineFailed(f"{method} {url}: {response.status} {message}".strip())
    return content

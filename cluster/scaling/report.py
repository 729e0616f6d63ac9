"""Tell the gateways what was decided, for their page /console (docs/releases.md)."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from pathlib import Path

import aiohttp

from cluster.scaling.law import Decision
from contract.errors import InvalidArgument

_LOG = logging.getLogger(__name__)
_GATEWAYS = re.compile(r"dns:///?[^/,\s]+:\d{1,5}|[^/,\s]+:\d{1,5}(,[^/,\s]+:\d{1,5})*")
MAX_DECISIONS, MAX_REASON = 100, 2000  # of one report, as the gateways take it


async def addresses(name: str) -> list[str]:
    """Return HOST:PORT of every address of ``dns:///NAME:PORT``. Raises OSError.

    ``clients.replica_set.discovery`` does the same and cannot be imported here: Ray's environment has no tritonclient.
    """
    host, _, port = name.removeprefix("dns:").strip("/").rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    hosts = sorted({str(address[0]) for *_, address in found})
    return [f"{f'[{one}]' if ':' in one else one}:{port}" for one in hosts]


class Report:
    """The latest decision of each pool, in ``decisions``.

    gateways: HTTP endpoints, as TRIDENT_REGISTER. token_file: of /admin/.
    Raises InvalidArgument for other addresses.
    """

    def __init__(self, gateways: str, token_file: str | Path) -> None:
        if not _GATEWAYS.fullmatch(gateways):
            raise InvalidArgument("consoles", f"must be HOST:PORT,HOST:PORT or dns:///NAME:PORT, got {gateways!r}")
        self._gateways, self._token_file = gateways, Path(token_file)
        self.decisions: dict[str, Decision] = {}
        self._failed = False

    async def send(self, http: aiohttp.ClientSession) -> None:
        """Send the decisions to every gateway, which keeps those that differ. Does not raise."""
        told = [
            {"pool": pool, "replicas": decided.wanted, "rule": decided.rule, "reason": decided.reason[:MAX_REASON]}
            for pool, decided in [*self.decisions.items()][:MAX_DECISIONS]
        ]
        try:
            headers = {"authorization": f"Bearer {self._token_file.read_text('utf-8').strip()}"}
            to = await addresses(self._gateways) if self._gateways.startswith("dns:") else self._gateways.split(",")
            puts = (self._put(http, f"http://{address}/admin/scaling", told, headers) for address in to)
            failed = [one for one in await asyncio.gather(*puts, return_exceptions=True) if one is not None]
        except (OSError, ValueError) as exc:
            failed = [exc]
        if failed and not self._failed:
            _LOG.warning("decisions cannot be told to the gateways: %s", failed[0] or type(failed[0]).__name__)
        self._failed = bool(failed)

    async def _put(self, http: aiohttp.ClientSession, url: str, told: list[dict], headers: dict[str, str]) -> None:
        async with http.put(url, json={"decisions": told}, headers=headers) as answer:
            answer.raise_for_status()

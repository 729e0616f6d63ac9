"""Registers this server at the gateways: a beat a second, a withdrawal before it drains (docs/fleet.md).

Each gateway is told by itself and with a time limit, so that one which hangs delays neither the others nor the server.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from clients.replica_set import discovery
from contract.background import Background
from contract.errors import TridentError
from server.settings import Settings

BEAT_S = 1.0
LEASE_S = 3.0
TIMEOUT_S = 2.0  # of a beat and of a withdrawal
NOTICE_S = 0.2  # from the withdrawal to the drain: requests that were on their way arrive
MAX_ANSWER_BYTES = 4096


class Registration:
    """What the gateways are told of one server.

    fields: of the engine, as ``PUT /admin/replicas`` takes them.
    state: returns the state, and the seconds until a starting server is ready, None if unknown.
    report: receives one line when a gateway begins to refuse or accept beats.
    """

    def __init__(
        self,
        settings: Settings,
        fields: dict[str, Any],
        state: Callable[[], tuple[str, float | None]],
        report: Callable[[str], None],
    ) -> None:
        self._settings, self._fields, self._state, self._report = settings, fields, state, report
        self._source = discovery.source(settings.register_)
        self._tls = ssl.create_default_context(cafile=settings.register_ca) if settings.register_ca else None
        dns, _, name = settings.register_.partition("dns://")
        # Of the gateways' certificates: their addresses are not in it.
        self._server_name = name.lstrip("/").rpartition(":")[0] if self._tls and not dns else None
        self._gateways: tuple[str, ...] = ()
        self._problems: dict[str, str] = {}  # by gateway, of the latest beat; "" if it was accepted
        self._in_turn: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tasks = Background()
        self._tasks.start(self._keep_resolving())
        self._tasks.start(self._keep_beating())

    def changed(self) -> None:
        """Tell the gateways at once that the state has changed."""
        for gateway in self._gateways:
            self._tasks.start(self._tell(gateway, "PUT"))

    async def told(self, method: str = "PUT") -> None:
        """Wait until every gateway has been told the state, at most TIMEOUT_S."""
        tasks = [asyncio.create_task(self._tell(gateway, method)) for gateway in self._gateways]
        if tasks:
            await asyncio.wait(tasks, timeout=TIMEOUT_S)
        for task in tasks:
            task.cancel()

    async def withdraw(self) -> None:
        """Tell every gateway within TIMEOUT_S + NOTICE_S that the server drains: none sends it requests then."""
        await self.told()
        if self._gateways:
            await asyncio.sleep(NOTICE_S)

    async def close(self) -> None:
        """End the beats and make the gateways forget the server."""
        await self._tasks.cancel()
        await self.told("DELETE")

    async def _keep_resolving(self) -> None:
        while True:
            problem = ""
            try:
                self._gateways = await self._source.replicas()
            except TridentError as error:
                problem = str(error)
            self._note("", problem)
            await asyncio.sleep(BEAT_S)

    async def _keep_beating(self) -> None:
        while True:
            for gateway in self._gateways:
                if not self._in_turn[gateway].locked():
                    self._tasks.start(self._tell(gateway, "PUT"))
            await asyncio.sleep(BEAT_S if self._gateways else 0.05)

    async def _tell(self, gateway: str, method: str) -> None:
        """Send one message after those that are on their way: an old state must not arrive behind a new one."""
        async with self._in_turn[gateway]:
            try:
                problem = await asyncio.wait_for(self._request(gateway, method), TIMEOUT_S)
            except asyncio.TimeoutError:
                problem = f"no answer within {TIMEOUT_S:g} s"
            except (OSError, ValueError) as error:
                problem = str(error)
        self._note(gateway, problem)

    async def _request(self, gateway: str, method: str) -> str:
        """Return what is wrong with the gateway's answer, or "". Raises OSError, ValueError."""
        settings = self._settings
        host, _, port = gateway.rpartition(":")
        reader, writer = await asyncio.open_connection(
            host.strip("[]"), int(port), ssl=self._tls, server_hostname=self._server_name
        )
        try:
            own = settings.advertise or settings.host
            if own == "0.0.0.0":  # the address with which this machine reaches the gateway
                own = writer.get_extra_info("sockname")[0]
            address = f"{own}:{settings.grpc_port}"
            body = json.dumps(self._body(own, address)).encode() if method == "PUT" else b""
            token = settings.register_token_file.read_text().strip() if settings.register_token_file else ""
            head = (
                f"{method} /admin/replicas/{address} HTTP/1.1\r\nhost: {gateway}\r\nauthorization: Bearer {token}\r\n"
                f"content-length: {len(body)}\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
            )
            writer.write(head.encode() + body)
            answer = ""
            while len(answer) < MAX_ANSWER_BYTES and (part := await reader.read(MAX_ANSWER_BYTES)):
                answer += part.decode(errors="replace")
        finally:
            writer.close()
        status = answer.split(" ", 2)[1:2]
        if not status:
            return "it closed the connection"
        return "" if status == ["200"] else f"HTTP {status[0]}: {answer.rpartition(chr(10))[2][:300]}"

    def _body(self, host: str, address: str) -> dict[str, Any]:
        state, expected_s = self._state()
        return {
            "address": address,
            "metrics_url": f"http://{host}:{self._settings.metrics_port}/metrics",
            "pool": self._settings.register_pool.replace("{engine}", self._settings.engine),
            "lease_s": LEASE_S,
            "state": state,
            "expected_s": expected_s,
            **self._fields,
        }

    def _note(self, gateway: str, problem: str) -> None:
        before, self._problems[gateway] = self._problems.get(gateway, ""), problem
        if problem != before:
            who = f"gateway {gateway}" if gateway else "TRIDENT_REGISTER"
            self._report(f"{who}: {problem or 'accepts the registration'}")

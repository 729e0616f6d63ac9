"""Read what the gateways' metrics pages say of their pools, add it up, and tell the gateways what was decided.

A page that cannot be read counts with its latest reading until that is ``stale_s`` old; then the sum is incomplete.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from cluster.scaling.law import Decision, Load
from contract import prometheus
from contract.errors import InvalidArgument
from contract.prometheus import Metrics

_LOG = logging.getLogger(__name__)
_POOL, _REPLICA = "trident_gateway_pool_", "trident_gateway_replica_"
PREFIXES = _POOL, _REPLICA  # of what is read of a page
_ARRIVED, _BACKLOG = f"{_POOL}arrived_tokens_total", f"{_POOL}backlog_tokens"
MAX_BYTES, LARGEST = 4 * 1024 * 1024, 1e15
TIMEOUT_S = 2.0  # of one page
_RATE_S = 15.0  # arriving tokens are counted over so long, or since the reading before
_CONSOLES = re.compile(r"dns:///?[^/,\s]+:\d{1,5}|[^/,\s]+:\d{1,5}(,[^/,\s]+:\d{1,5})*")
MAX_DECISIONS, MAX_REASON = 100, 2000  # that a gateway takes at once


@dataclass(eq=False)
class _Page:
    """One gateway's page. read_s: when it was read last, 0: never. arrived: (time, tokens by pool) of late."""

    read_s: float = 0.0
    metrics: Metrics = field(default_factory=Metrics)
    arrived: tuple[tuple[float, dict[str, float]], ...] = ()
    problem: str = ""

    def take(self, metrics: Metrics, now_s: float) -> None:
        """Raises ValueError for a page that no gateway writes."""
        if _ARRIVED not in metrics:
            raise ValueError("it has no pools: not the metrics page of a gateway")
        if not all(labels.get("priority", "").isdecimal() for labels, _ in metrics.matching(_BACKLOG)):
            raise ValueError(f"{_BACKLOG}: the label priority must be a class")
        for name, samples in metrics.samples.items():
            for labels, value in samples:
                if not 0 <= value < LARGEST:  # NaN is not
                    raise ValueError(f"{name}{labels}: must be from 0 to {LARGEST:g}, got {value}")
        arrived = metrics.by_label(_ARRIVED, "pool")
        if self.arrived and any(tokens < self.arrived[-1][1].get(pool, 0.0) for pool, tokens in arrived.items()):
            self.arrived = ()  # the gateway was started again
        while len(self.arrived) > 1 and now_s - self.arrived[1][0] >= _RATE_S:
            self.arrived = self.arrived[1:]
        self.arrived = (*self.arrived, (now_s, arrived))
        self.metrics, self.read_s = metrics, now_s

    def rate(self, pool: str) -> float | None:
        """Return the tokens that come per second; None until two readings tell."""
        told = [(at_s, tokens[pool]) for at_s, tokens in self.arrived if pool in tokens]
        (from_s, first), (to_s, last) = told[0], told[-1]
        return (last - first) / (to_s - from_s) if to_s > from_s else None


class Reader:
    """Reads pages: ``await read(session)`` from time to time, and ``load(pool)`` at any time, from any thread.

    gateways: URLs of metrics pages, or ``dns:///NAME:PORT``, every address of which is a gateway.
    consoles, token_file: HTTP endpoints, as TRIDENT_REGISTER, that are told ``decisions`` for their page /console
        (docs/releases.md), and the file with their token; without both, none is.
    """

    def __init__(
        self, gateways: Sequence[str], stale_s: float = 15.0, consoles: str = "", token_file: str | Path | None = None
    ) -> None:
        self._gateways = tuple(_checked(url.strip()) for url in gateways if url.strip())
        if not self._gateways:
            raise InvalidArgument("gateways", "must name one metrics page at least, got none")
        if consoles and not _CONSOLES.fullmatch(consoles):
            raise InvalidArgument("consoles", f"must be HOST:PORT,HOST:PORT or dns:///NAME:PORT, got {consoles!r}")
        self._stale_s, self._consoles, self._token_file = stale_s, consoles, Path(token_file) if token_file else None
        self.decisions: dict[str, Decision] = {}  # the latest of each pool
        self._told = True
        self._pages: dict[str, _Page] = {}
        self._resolved: dict[str, list[str]] = {}
        self._unresolved: set[str] = set()  # names that the latest reading could not resolve

    async def watch(self, after: Callable[[], None], interval_s: float) -> None:
        """Read the pages again and again, call ``after`` each time, and tell the decisions."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(TIMEOUT_S)) as http:
            while True:
                await self.read(http)
                after()
                await self.tell(http)
                await asyncio.sleep(interval_s)

    async def tell(self, http: aiohttp.ClientSession) -> None:
        """Send the decisions to every gateway, which keeps those that differ. Does not raise."""
        if not (self._consoles and self._token_file):
            return
        rows = [
            {"pool": pool, "replicas": decided.wanted, "rule": decided.rule, "reason": decided.reason[:MAX_REASON]}
            for pool, decided in [*self.decisions.items()][:MAX_DECISIONS]
        ]

        async def put(address: str) -> None:
            async with http.put(f"http://{address}/admin/scaling", json={"decisions": rows}, headers=headers) as answer:
                answer.raise_for_status()

        try:
            headers = {"authorization": f"Bearer {self._token_file.read_text('utf-8').strip()}"}
            to = await _addresses(self._consoles) if self._consoles.startswith("dns:") else self._consoles.split(",")
            failed = [one for one in await asyncio.gather(*map(put, to), return_exceptions=True) if one is not None]
        except (OSError, ValueError) as exc:
            failed = [exc]
        if failed and self._told:
            _LOG.warning("decisions cannot be told to the gateways: %s", failed[0] or type(failed[0]).__name__)
        self._told = not failed

    async def read(self, http: aiohttp.ClientSession) -> None:
        """Read every page once. Does not raise for a page that fails, which is logged when that begins."""
        await asyncio.gather(*(self._resolve(name) for name in self._gateways if name.startswith("dns:")))
        urls = [url for gateway in self._gateways for url in self._resolved.get(gateway, [gateway])]
        self._pages = {url: self._pages.get(url, _Page()) for url in urls}
        await asyncio.gather(*(self._read(http, url, page) for url, page in self._pages.items()))

    async def _resolve(self, gateway: str) -> None:
        try:
            self._resolved[gateway] = [f"http://{address}/metrics" for address in await _addresses(gateway)]
            self._unresolved.discard(gateway)
        except (OSError, UnicodeError) as exc:  # those that were known stay
            if gateway not in self._unresolved:
                _LOG.warning("%s does not resolve: %s", gateway, exc)
            self._unresolved.add(gateway)

    async def _read(self, http: aiohttp.ClientSession, url: str, page: _Page) -> None:
        try:
            if url.startswith("dns:"):
                raise ValueError("the name has not resolved yet")
            async with http.get(url) as response:
                response.raise_for_status()
                text = b""
                async for part in response.content.iter_any():
                    text += part
                    if len(text) > MAX_BYTES:
                        raise ValueError(f"larger than {MAX_BYTES} bytes")
            page.take(prometheus.parse(text.decode(), PREFIXES), time.monotonic())
            page.problem = ""
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as exc:
            if not page.problem:
                _LOG.warning("%s cannot be read: %s", url, exc or type(exc).__name__)
            page.problem = str(exc) or type(exc).__name__

    def problems(self) -> dict[str, str]:
        """Return what is wrong with pages, by URL."""
        return {url: page.problem for url, page in self._pages.items() if page.problem}

    def _fresh(self) -> list[_Page]:
        oldest_s = time.monotonic() - self._stale_s
        return [page for page in self._pages.values() if page.read_s > oldest_s]

    @property
    def complete(self) -> bool:
        """Whether every page is fresh."""
        return 0 < len(self._fresh()) == len(self._pages)

    def pools(self) -> list[str]:
        """Return the pools that any fresh page names."""
        return sorted({pool for page in self._fresh() for pool in page.metrics.by_label(_ARRIVED, "pool")})

    def load(self, pool: str) -> Load | None:
        """Return the load of a pool; None if no page tells it."""
        fresh = self._fresh()
        telling = [page for page in fresh if any(page.metrics.matching(_ARRIVED, pool=pool))]
        if not telling:
            return None
        pages, rates = [page.metrics for page in telling], [page.rate(pool) for page in telling]
        cost = _mean(page.value(f"{_POOL}token_cost", pool=pool) for page in pages) or 1.0
        told = [one for page in pages for one in page.matching(f"{_REPLICA}healthy", pool=pool)]
        healthy = {labels.get("replica", "") for labels, value in told if value}
        starting_s = [value for page in pages for _, value in page.matching(f"{_POOL}starting_seconds", pool=pool)]
        tokens_per_s = _mean(_of_replicas(pages, "tokens_per_second", pool))
        if not tokens_per_s and healthy:  # what the whole pool did while requests waited
            drained = sum(page.value(f"{_POOL}drain_tokens_per_second", pool=pool) for page in pages)
            tokens_per_s = drained * cost / len(healthy)
        return Load(
            complete=self.complete,
            queued=_by_class(pages, pool, "queued"),
            running=_by_class(pages, pool, "running"),
            queued_requests=sum(page.value(f"{_POOL}waiting", pool=pool) for page in pages),
            running_requests=sum(page.value(f"{_POOL}running", pool=pool) for page in pages),
            arrived_per_s=None if None in rates else sum(filter(None, rates)),
            cost=cost,
            ready=len(healthy),
            starting=int(max(page.value(f"{_POOL}starting", pool=pool) for page in pages)),
            starting_s=max(starting_s) if starting_s else None,
            tokens_per_s=tokens_per_s,
            slots=_mean(_of_replicas(pages, "slots", pool)),
        )


async def _addresses(name: str) -> list[str]:
    """Return HOST:PORT of every address of ``dns:///NAME:PORT``. Raises OSError.

    ``clients.replica_set.discovery`` cannot be imported here: Ray's environment has no tritonclient.
    """
    host, _, port = name.removeprefix("dns:").strip("/").rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    hosts = sorted({str(address[0]) for *_, address in found})
    return [f"{f'[{one}]' if ':' in one else one}:{port}" for one in hosts]


def _checked(url: str) -> str:
    parts = urlsplit(url)
    try:
        if parts.scheme == "dns":
            host, _, port = f"{parts.netloc}{parts.path}".strip("/").rpartition(":")
            if host and "/" not in host and 0 < int(port) < 65536:
                return url
        elif parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return url if parts.path.strip("/") else f"{url.rstrip('/')}/metrics"
    except ValueError:
        pass
    raise InvalidArgument("gateways", f"must be http://HOST:PORT/metrics or dns:///NAME:PORT, got {url!r}")


def _by_class(pages: Iterable[Metrics], pool: str, state: str) -> dict[int, float]:
    found: defaultdict[int, float] = defaultdict(float)
    for page in pages:
        for labels, tokens in page.matching(_BACKLOG, pool=pool, state=state):
            found[int(labels["priority"])] += tokens
    return found


def _of_replicas(pages: Iterable[Metrics], name: str, pool: str) -> list[float]:
    """Return a number of each replica: the mean of the gateways that know it."""
    known: defaultdict[str, list[float]] = defaultdict(list)
    for page in pages:
        for labels, value in page.matching(f"{_REPLICA}{name}", pool=pool):
            known[labels.get("replica", "")].append(value)
    return [_mean(values) for values in known.values()]


def _mean(values: Iterable[float]) -> float:
    """Return the mean of those that are known, that is not 0; 0 if none is."""
    known = [value for value in values if value]
    return sum(known) / len(known) if known else 0.0

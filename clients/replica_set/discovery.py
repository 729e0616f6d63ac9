"""Find the replicas: a fixed list, a DNS name, or a file that another program keeps up to date.

Discovery repeats, every ``refresh_s`` of the source where it has one. A source that fails raises Unavailable, and the
caller keeps the replicas it knew before: an old list serves better than none.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Protocol, cast

from contract.errors import InvalidArgument, Unavailable

DEFAULT_PORT = 8001
REFRESH_S = 30.0  # of sources that set none
_HOST = re.compile(r"[\w.%-]+|\[[\w:.%-]+\]", re.ASCII)
_FORMS = "'HOST:PORT,HOST:PORT', 'dns:///NAME:PORT' or 'file:///PATH'"


class Discovery(Protocol):
    """Names the replicas that should exist now."""

    async def replicas(self) -> tuple[str, ...]:
        """``HOST:PORT`` of each, without repeats, sorted. Raises Unavailable if they cannot be found out."""


class Static:
    """A fixed list."""

    def __init__(self, urls: Iterable[str]) -> None:
        self._urls = _clean(urls)
        if not self._urls:
            raise InvalidArgument("replicas", "the list is empty; name at least one HOST:PORT")

    async def replicas(self) -> tuple[str, ...]:
        return self._urls


Resolve = Callable[[str, int], Awaitable[Iterable[str]]]


class Dns:
    """Every address that a name has, as a headless Kubernetes service gives it one per pod."""

    refresh_s = 5.0

    def __init__(self, name: str, port: int = DEFAULT_PORT, resolve: Resolve | None = None) -> None:
        self._name, self._port, self._resolve = name, port, resolve or _addresses

    async def replicas(self) -> tuple[str, ...]:
        try:
            addresses = await self._resolve(self._name, self._port)
        except (OSError, UnicodeError) as exc:  # UnicodeError: a label that is empty or too long
            problem = getattr(exc, "strerror", None) or exc
            raise Unavailable(f"the name {self._name!r} does not resolve: {problem}") from exc
        found = _clean(
            f"[{address}]:{self._port}" if ":" in address else f"{address}:{self._port}" for address in addresses
        )
        if not found:
            raise Unavailable(f"the name {self._name!r} has no address")
        return found


class File:
    """One HOST:PORT a line; ``#`` begins a comment. Replace the file by renaming, so that no half of it is read."""

    refresh_s = 0.5

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    async def replicas(self) -> tuple[str, ...]:
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as exc:
            raise Unavailable(f"cannot read the replicas in {str(self._path)!r}: {exc}") from exc
        try:
            found = _clean(line.partition("#")[0] for line in lines)
        except InvalidArgument as exc:
            raise Unavailable(f"{str(self._path)!r} is not a list of replicas: {exc}") from exc
        if not found:
            raise Unavailable(f"{str(self._path)!r} names no replica")
        return found


def source(where: str | Iterable[str] | Discovery) -> Discovery:
    """The source that ``where`` describes; a Discovery is returned as it is. Raises InvalidArgument."""
    if isinstance(where, str):
        if where.startswith("file://"):
            return File(where.removeprefix("file://"))
        if where.startswith("dns://"):
            name, port = _split(where.removeprefix("dns://").lstrip("/"))
            return Dns(name, port)
        if "://" in where:
            raise InvalidArgument("replicas", f"must be {_FORMS}, got {where!r}")
        return Static(where.split(","))
    if hasattr(where, "replicas"):
        return cast(Discovery, where)
    urls = list(where) if isinstance(where, Iterable) else [None]
    if not all(isinstance(url, str) for url in urls):
        raise InvalidArgument("replicas", f"must be {_FORMS}, a list of HOST:PORT, or a Discovery, got {where!r}")
    return Static(urls)


def _clean(urls: Iterable[str]) -> tuple[str, ...]:
    """Stripped, checked, without repeats, sorted."""
    stripped = {url.strip() for url in urls} - {""}
    return tuple(sorted(map(address, stripped)))


def address(url: str) -> str:
    """Return ``HOST:PORT`` of ``HOST:PORT`` or ``HOST``. Raises InvalidArgument."""
    host, port = _split(url)
    return f"{host}:{port}"


def _split(url: str) -> tuple[str, int]:
    """``HOST:PORT``, ``HOST`` or ``[IPV6]:PORT``; the host keeps its brackets."""
    host, colon, port = url.rpartition(":")
    if not colon or url.endswith("]"):
        host, port = url, str(DEFAULT_PORT)
    if not _HOST.fullmatch(host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidArgument("replicas", f"must be HOST:PORT with a port from 1 to 65535, got {url!r}")
    return host, int(port)


async def _addresses(name: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]

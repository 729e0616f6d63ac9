"""Replicas to talk to: one that plays the scripts of the test that asked for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.fakes.replica import FakeReplica, Script, SeenRequest, echo, replica_in_thread


class Playlist:
    """Scripts in the order they shall be played; the last one goes on for ever. Empty: the default echo."""

    def __init__(self) -> None:
        self.scripts: list[Script] = []

    def set(self, *scripts: Script) -> None:
        self.scripts = list(scripts)

    def __call__(self, seen: SeenRequest) -> Script:
        if not self.scripts:
            return echo(seen)
        return self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]


@pytest.fixture
def playlist() -> Playlist:
    return Playlist()


@pytest_asyncio.fixture
async def replica(playlist: Playlist) -> AsyncIterator[FakeReplica]:
    """A replica on the test's own event loop."""
    async with FakeReplica(playlist) as running:
        yield running


@pytest.fixture
def threaded_replica(playlist: Playlist) -> Iterator[FakeReplica]:
    """A replica on a loop of its own, for callers that block."""
    with replica_in_thread(playlist) as running:
        yield running

"""SIGHUP reads the configuration again, or stops a process without a file."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from gateway import signals
from tests.gateway.running import until


class Configuration:
    def __init__(self, path: str | None) -> None:
        self.path, self.reloads = path, 0

    async def reload(self) -> None:
        self.reloads += 1


@pytest.fixture(autouse=True)
def usual_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


async def hang_up(configuration: Configuration, stopped: list[int]) -> None:
    loop = asyncio.get_running_loop()
    signals.handle(loop, configuration, lambda again: stopped.append(1))
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: bool(configuration.reloads or stopped))
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


async def test_a_file_is_read_again():
    configuration, stopped = Configuration("gateway.toml"), []
    await hang_up(configuration, stopped)
    assert configuration.reloads == 1 and not stopped


async def test_without_a_file_the_process_stops():
    configuration, stopped = Configuration(None), []
    await hang_up(configuration, stopped)
    assert configuration.reloads == 0 and stopped


async def test_a_closed_terminal_stops_the_process(monkeypatch: pytest.MonkeyPatch):
    open_terminal = iter([True, False])
    monkeypatch.setattr(signals, "has_terminal", lambda: next(open_terminal))
    configuration, stopped = Configuration("gateway.toml"), []
    await hang_up(configuration, stopped)
    assert configuration.reloads == 0 and stopped


async def test_an_ignored_signal_stays_ignored_without_a_file():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals.handle(asyncio.get_running_loop(), Configuration(None), lambda again: None)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

"""Signals to a gateway: SIGTERM and Ctrl-C stop it, SIGHUP makes it read the configuration file again."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from functools import partial

from contract.background import Background
from gateway.config.configuration import Configuration

_LOG = logging.getLogger(__name__)
TERMINAL = "/dev/tty"  # the process's own, if it has one


def handle(loop: asyncio.AbstractEventLoop, configuration: Configuration, stop: Callable[[bool], None]) -> None:
    """Install the handlers.

    stop: called with False for the first signal to stop, with True for the same one again. SIGHUP is one where there is
        no configuration file, and where the process's terminal was closed; where it is ignored, as nohup leaves it, it
        only makes the file be read again.
    """
    seen: set[signal.Signals] = set()
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    on_terminal = has_terminal()
    reloading = Background()

    def on_stop(number: signal.Signals) -> None:
        # Ctrl-C reaches workers and their parent, which sends SIGTERM: only the same signal twice means hurry.
        if not seen or number in seen:
            stop(number in seen)
        seen.add(number)

    def on_hangup() -> None:
        closed = on_terminal and not has_terminal()
        if not ignored and (closed or configuration.path is None):
            on_stop(signal.SIGHUP)
        elif not closed:
            _LOG.info("SIGHUP: reading %s", configuration.path)
            reloading.start(configuration.reload())

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, partial(on_stop, number))
    if configuration.path is not None or not ignored:
        loop.add_signal_handler(signal.SIGHUP, on_hangup)


def has_terminal() -> bool:
    """Return whether the process has a controlling terminal that is still open. The kernel takes a closed one away
    from all processes of its session before they get SIGHUP."""
    try:
        os.close(os.open(TERMINAL, os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True

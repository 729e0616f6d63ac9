"""SIGHUP: reload the configuration file, or stop if the terminal was closed."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable

from gateway.config.configuration import Configuration

_LOG = logging.getLogger(__name__)
TERMINAL = "/dev/tty"  # the process's own, if it has one


def handle(loop: asyncio.AbstractEventLoop, configuration: Configuration, stop: Callable[[], None]) -> None:
    """Install the handler of SIGHUP.

    The configuration file is read again. ``stop`` is called instead where there is no file, and where the process's
    terminal was closed. Nothing is installed where SIGHUP is ignored, as nohup leaves it, and there is no file.
    """
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    if ignored and configuration.path is None:
        return
    on_terminal = has_terminal()
    reloading: set[asyncio.Task] = set()

    def on_hangup() -> None:
        closed = on_terminal and not has_terminal()
        if not ignored and (closed or configuration.path is None):
            stop()
        elif not closed:
            _LOG.info("SIGHUP: reading %s", configuration.path)
            task = loop.create_task(configuration.reload())
            reloading.add(task)
            task.add_done_callback(reloading.discard)

    loop.add_signal_handler(signal.SIGHUP, on_hangup)


def has_terminal() -> bool:
    """Return whether the process has a controlling terminal that is still open. The kernel takes a closed one away
    from all processes of its session before they get SIGHUP."""
    try:
        os.close(os.open(TERMINAL, os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True

"""The abort of streams; test_supervisor.py tests drains with a real server."""

import asyncio
import os
import socket

from server import drain


async def test_an_abort_reaches_the_engines_control_socket_as_one_line_also_if_it_listens_late():
    name = f"trident-test-{os.getpid()}"
    aborting = asyncio.create_task(drain.keep_aborting(name, "the server is shutting down"))
    await asyncio.sleep(0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as engine:
        engine.bind(f"\0{name}")
        engine.settimeout(60)
        for _ in range(2):
            assert await asyncio.to_thread(engine.recv, 4096) == b"abort the server is shutting down"
    assert not aborting.done()
    aborting.cancel()

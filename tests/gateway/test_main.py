"""The gateway as a process: what signals do to it, and how it says that it cannot start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.fakes.replica import FakeReplica, Script
from tests.gateway.running import until

pytestmark = pytest.mark.slow

TOKENS = 40
REQUEST = {"model": "demo", "prompt": "x", "max_tokens": TOKENS, "stream": True}


@contextlib.asynccontextmanager
async def process(replica: FakeReplica, **settings: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The process, and the URL of its HTTP endpoint."""
    ports = {"HTTP_PORT": "0", "GRPC_PORT": "0", "MONITORING_PORT": "0", "METRICS_PORT": "0"}
    named = {**ports, "DEEP_PROBES": "false", "REPLICAS": replica.url}
    environ = os.environ | {f"TRIDENT_GATEWAY_{name}": value for name, value in (named | settings).items()}
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", env=environ, cwd=Path(__file__).parents[2], stdout=-1, stderr=-1
    )
    words: list[bytes] = []
    try:
        words = (await asyncio.wait_for(started.stdout.readline(), 60.0)).split()
        yield started, f"http://{words[1].decode()}" if words[:1] == [b"http"] else ""
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()
        if words[:1] != [b"http"]:  # shown where the test fails
            print(words, (await started.stderr.read()).decode(errors="replace"))


# Without a configuration file there is nothing to read again, and SIGHUP stops as well.
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_ends_it_when_the_streams_have_ended(number: signal.Signals):
    async with FakeReplica(lambda seen: Script((" a",) * TOKENS, gap_s=0.02)) as replica:
        async with process(replica) as (gateway, url), aiohttp.ClientSession() as session:
            async with session.post(f"{url}/v1/completions", json=REQUEST) as answer:
                await until(lambda: replica.counts.running == 1, 60.0)
                gateway.send_signal(number)
                text = await answer.text()
            assert text.count('"text":" a"') == TOKENS and text.endswith("data: [DONE]\n\n")
            assert await asyncio.wait_for(gateway.wait(), 60.0) == 0


async def test_a_second_signal_ends_the_streams_at_once_and_they_hear_why():
    async with FakeReplica(lambda seen: Script((" a", " b"), stall_after=1)) as replica:
        async with process(replica, DRAIN_S="600") as (gateway, url), aiohttp.ClientSession() as session:
            async with session.post(f"{url}/v1/completions", json=REQUEST) as answer:
                await until(lambda: replica.counts.running == 1, 60.0)
                gateway.send_signal(signal.SIGTERM)
                while await ready(session, url):
                    await asyncio.sleep(0.01)
                gateway.send_signal(signal.SIGTERM)
                assert "the gateway is stopping" in await answer.text()
            assert await asyncio.wait_for(gateway.wait(), 60.0) == 0


async def ready(session: aiohttp.ClientSession, url: str) -> bool:
    async with session.get(f"{url}/health/ready") as answer:
        return answer.status == 200


@pytest.mark.parametrize("setting", ["HTTP_PORT", "GRPC_PORT", "MONITORING_PORT"])
async def test_a_port_that_is_taken_is_named(setting: str):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with FakeReplica() as replica:
            async with process(replica, **{setting: str(taken.getsockname()[1])}) as (gateway, _):
                output = (await asyncio.wait_for(gateway.stderr.read(), 60.0)).decode()
                assert await gateway.wait() == 2
    assert f"error: TRIDENT_GATEWAY_{setting}: cannot listen at 127.0.0.1" in output and "Traceback" not in output


async def test_sighup_reads_the_file_again_and_ends_no_stream(tmp_path: Path):
    config = tmp_path / "gateway.toml"
    config.write_text("[admission]\n")
    async with FakeReplica(lambda seen: Script((" a",) * TOKENS, gap_s=0.05)) as replica:
        async with process(replica, CONFIG=str(config)) as (gateway, url), aiohttp.ClientSession() as session:
            async with session.post(f"{url}/v1/completions", json=REQUEST) as answer:
                await until(lambda: replica.counts.running == 1, 60.0)
                gateway.send_signal(signal.SIGHUP)
                output = await lines_until(gateway, "the configuration was read again")
                config.write_text("[admission]\nmax_wait_s = -1\n")
                gateway.send_signal(signal.SIGHUP)
                output += await lines_until(gateway, "the configuration stays as it was")
                gateway.send_signal(signal.SIGHUP)
                gateway.send_signal(signal.SIGHUP)
                text = await answer.text()
            assert text.count('"text":" a"') == TOKENS and text.endswith("data: [DONE]\n\n")
            assert await ready(session, url)
            config.write_text("[admission]\nmax_wait_s = 5\n")
            gateway.send_signal(signal.SIGHUP)
            output += await lines_until(gateway, "the configuration was read again")
            assert output.count("stays as it was") == 1 and "max_wait_s" in output
            gateway.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(gateway.wait(), 60.0) == 0


async def lines_until(process: asyncio.subprocess.Process, part: str) -> str:
    """What it logs up to the line with ``part``."""
    output = ""
    while part not in output:
        line = (await asyncio.wait_for(process.stderr.readline(), 60.0)).decode()
        assert line, f"it ended without saying {part!r}:\n{output}"
        output += line
    return output


@pytest.mark.skipif(sys.platform != "linux", reason="how a terminal goes away is Linux's")
def test_a_closed_terminal_drains_even_with_a_file(tmp_path: Path):
    config = tmp_path / "gateway.toml"
    config.write_text("")
    named = {"HTTP_PORT": "0", "GRPC_PORT": "0", "METRICS_PORT": "0", "CONFIG": str(config), "LOG_LEVEL": "info"}
    environ = os.environ | {f"TRIDENT_GATEWAY_{name}": value for name, value in named.items()}
    log = tmp_path / "log"
    master, slave = pty.openpty()
    # The session's leader is a shell, as in a terminal; ours is a process of its session.
    command = f"trap : HUP; {sys.executable} -m gateway 2>{log} & echo pid $!; wait; wait"
    with subprocess.Popen(
        [sys.executable, "-c", TERMINAL_LEADER, command], env=environ, cwd=Path(__file__).parents[2], stdin=slave,
        stdout=slave, stderr=slave, start_new_session=True,
    ) as shell:  # fmt: skip
        os.close(slave)
        try:
            output = b""
            while b"Ctrl-C stops it" not in output:
                output += os.read(master, 4096)
            pid = int(re.search(rb"pid (\d+)", output)[1])
            os.kill(pid, signal.SIGHUP)  # the terminal is there: it is read again
            deadline = 6000
            while "the configuration was read again" not in log.read_text():
                deadline -= 1
                assert deadline and shell.poll() is None, log.read_text()
                asyncio.run(asyncio.sleep(0.01))
            os.close(master)  # the terminal closes
            os.kill(pid, signal.SIGHUP)  # as the shell does with its jobs
            shell.wait(60)
            assert "draining" in log.read_text()
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGKILL)


TERMINAL_LEADER = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv("/bin/bash", ["bash", "-c", sys.argv[1]])
"""


async def test_it_says_to_people_where_it_is_and_what_to_try():
    async with FakeReplica() as replica:
        async with process(replica) as (gateway, url), aiohttp.ClientSession() as session:
            text = ""
            while "Ctrl-C stops it" not in text:
                text += (await asyncio.wait_for(gateway.stdout.readline(), 60.0)).decode()
            assert f"{url}/v1" in text and "import openai" in text
            [metrics] = re.findall(r"http://\S+/metrics", text)
            async with session.get(metrics) as page:
                assert "trident_gateway_in_flight" in await page.text()
            [curl] = re.findall(r"curl -N .*\n.*", text)
            done = await asyncio.create_subprocess_shell(curl, stdout=-1, stderr=-1)
            out, _ = await asyncio.wait_for(done.communicate(), 60.0)
            assert out.endswith(b"data: [DONE]\n\n")
            gateway.send_signal(signal.SIGTERM)
            output = (await asyncio.wait_for(gateway.stderr.read(), 60.0)).decode()
            assert "files" not in output  # 1000 requests at once need no more than are allowed here


@pytest.mark.parametrize("command", [["new-key"], ["samples", "new-key"]])  # flushes itself; leaves it to the end
def test_a_command_whose_reader_has_gone_ends_without_a_word(command: list[str]):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "gateway", *command], cwd=Path(__file__).parents[2], stdout=writer, stderr=-1, timeout=60
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


async def test_the_first_line_names_an_ipv6_address_as_urls_do():
    async with FakeReplica(lambda seen: Script((" a",))) as replica, process(replica, HOST="::1") as (_, url):
        async with aiohttp.ClientSession() as session, session.get(f"{url}/health/live") as answer:
            assert url.startswith("http://[::1]:") and answer.status == 200

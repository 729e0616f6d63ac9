"""The message of a ready server, and progress on a terminal and in a file."""

import asyncio
import io
import re

from server import console
from server.console import ready_message
from server.settings import ROOT, Settings


class Terminal(io.StringIO):
    def isatty(self):
        return True


async def shown(out, monkeypatch):
    monkeypatch.setattr(console, "SPIN_INTERVAL_S", 0.001)
    monkeypatch.setattr(console, "LINE_INTERVAL_S", 0.001)
    async with console.progress("starting", out):
        while out.getvalue().count("starting") < 3:
            await asyncio.sleep(0.001)
    return out.getvalue()


async def test_a_terminal_gets_one_line_that_is_cleared_at_the_end(monkeypatch):
    text = await shown(Terminal(), monkeypatch)
    assert "\n" not in text and text.endswith("\r\033[K")
    assert console.SPINNER[0] in text and console.SPINNER[1] in text


async def test_a_file_gets_lines_with_the_elapsed_seconds(monkeypatch):
    lines = (await shown(io.StringIO(), monkeypatch)).splitlines()
    assert len(lines) >= 3 and all(re.fullmatch(r"  starting … \d+ s", line) for line in lines)


async def test_a_short_block_prints_nothing_into_a_file():
    out = io.StringIO()
    async with console.progress("starting", out):
        pass
    assert out.getvalue() == ""


def test_endpoints_and_engine_are_listed():
    text = ready_message(Settings(engine="mine", grpc_port=9001, http_port=9000, metrics_port=9002))
    assert "engine mine" in text and "127.0.0.1:9001" in text and "http://127.0.0.1:9002/metrics" in text
    assert "curl -N http://127.0.0.1:9000/v2/models/ensemble/generate_stream" in text


def test_the_client_command_names_the_url_only_if_it_is_not_the_default():
    assert "--url" not in ready_message(Settings())
    assert "-m clients --url 127.0.0.1:9001 " in ready_message(Settings(grpc_port=9001))


def test_tls_is_mentioned_only_if_it_is_on():
    assert "TLS" not in ready_message(Settings())
    certificates = ROOT / "tests" / "clients" / "certificates"
    settings = Settings(tls_cert=certificates / "server.pem", tls_key=certificates / "server.key")
    assert "ModelStreamInfer over TLS" in ready_message(settings)


def test_the_admin_key_is_not_printed():
    assert "secret-key" not in ready_message(Settings(admin_key="secret-key"))


def test_an_encoder_is_called_by_its_own_name():
    text = ready_message(Settings(), "encoder")
    assert "model encoder, ModelInfer\n" in text and "/v2/models/encoder/infer" in text and "clients" not in text

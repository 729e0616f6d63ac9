"""Progress display on a terminal and in a file."""

import asyncio
import io
import re

from server import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


async def shown(out, monkeypatch):
    monkeypatch.setattr(progress, "SPIN_INTERVAL_S", 0.001)
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.001)
    async with progress.show("starting", out):
        while out.getvalue().count("starting") < 3:
            await asyncio.sleep(0.001)
    return out.getvalue()


async def test_a_terminal_gets_one_line_that_is_cleared_at_the_end(monkeypatch):
    text = await shown(Terminal(), monkeypatch)
    assert "\n" not in text and text.endswith("\r\033[K")
    assert progress.SPINNER[0] in text and progress.SPINNER[1] in text


async def test_a_file_gets_lines_with_the_elapsed_seconds(monkeypatch):
    lines = (await shown(io.StringIO(), monkeypatch)).splitlines()
    assert len(lines) >= 3 and all(re.fullmatch(r"  starting … \d+ s", line) for line in lines)


async def test_a_short_block_prints_nothing_into_a_file():
    out = io.StringIO()
    async with progress.show("starting", out):
        pass
    assert out.getvalue() == ""

"""A real headless Chromium, driven over its DevTools protocol by aiohttp's websockets."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WITHOUT = "there is no Chromium here; Debian's package is called chromium"
START_S, ANSWER_S = 60.0, 60.0


class Page:
    """One tab. ``problems``: what the console said of errors, violations of the content security policy included."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict]] = {}
        self.problems: list[str] = []

    async def read(self) -> None:
        async for message in self._socket:
            event = message.json()
            if "id" in event:
                self._waiting.pop(event["id"]).set_result(event)
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                self.problems.append(event["params"]["entry"]["text"])
            elif event["method"] == "Runtime.exceptionThrown":
                self.problems.append(str(event["params"]["exceptionDetails"]))

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._waiting[number] = answered = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        event = await asyncio.wait_for(answered, ANSWER_S)
        assert "error" not in event, event
        result: dict[str, Any] = event["result"]
        return result

    async def run(self, script: str) -> Any:
        """Return the value of a script, awaited."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, script: str) -> None:
        """Return once the script's value is true."""
        deadline_s = asyncio.get_running_loop().time() + ANSWER_S
        while not await self.run(script):
            assert asyncio.get_running_loop().time() < deadline_s, f"it did not come to hold: {script}"
            await asyncio.sleep(0.02)

    async def key(self, name: str, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=name,
                code=name,
                text=text if kind == "keyDown" else "",
                windowsVirtualKeyCode={"Tab": 9, "Enter": 13, "Escape": 27}.get(name, 0),
            )

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def look(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """Set the size of the window and the colour scheme."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self, path: Path) -> None:
        picture = await self.call("Page.captureScreenshot", captureBeyondViewport=False)
        path.write_bytes(base64.b64decode(picture["data"]))


@contextlib.asynccontextmanager
async def page(url: str) -> AsyncIterator[Page]:
    """A tab that shows ``url``; the browser ends with the block."""
    assert PROGRAM is not None, WITHOUT
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        arguments = [
            "--headless=new",
            "--remote-debugging-port=0",
            f"--user-data-dir={folder}",
            "--no-first-run",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
        ]
        if os.geteuid() == 0:
            arguments.append("--no-sandbox")
        nowhere = asyncio.subprocess.DEVNULL
        browser = await asyncio.create_subprocess_exec(PROGRAM, *arguments, stdout=nowhere, stderr=nowhere)
        try:
            port = await _port(Path(folder) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer:
                    address = (await answer.json())["webSocketDebuggerUrl"]
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    made = Page(socket)
                    reading = asyncio.create_task(made.read())
                    for domain in ("Page", "Runtime", "Log"):
                        await made.call(f"{domain}.enable")
                    await made.call("Page.navigate", url=url)
                    await made.until(f"location.href === {url!r} && document.readyState === 'complete'")
                    yield made
                    reading.cancel()
                    await asyncio.gather(reading, return_exceptions=True)
        finally:
            with contextlib.suppress(ProcessLookupError):
                browser.kill()
            await browser.wait()


async def _port(path: Path) -> int:
    deadline_s = asyncio.get_running_loop().time() + START_S
    while not path.exists() or not path.read_text():
        assert asyncio.get_running_loop().time() < deadline_s, "Chromium did not start"
        await asyncio.sleep(0.05)
    return int(path.read_text().split()[0])

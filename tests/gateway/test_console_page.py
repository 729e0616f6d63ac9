"""The operators' page in a real browser: by keyboard, on a phone's screen, and with hostile names."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
import pytest

from tests.fakes.replica import FakeReplica, Script
from tests.gateway import browser
from tests.gateway.running import gateway, until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(browser.PROGRAM is None, reason=browser.WITHOUT)]
TOKEN = "0123456789abcdef"
HOSTILE = '<img src=x onerror="document.title=`owned`">'
CONFIG = '[releases.r]\nstable = "stable"\ncandidate = "next"\nweight = 5\n'


async def sign_in(page: browser.Page, token: str = TOKEN) -> None:
    await page.type(token)
    await page.key("Enter", "\r")


async def test_an_operator_looks_shifts_rolls_back_and_chats_without_a_mouse(tmp_path: Path):
    (tmp_path / "token").write_text(TOKEN)
    script = Script((" <b>one</b>", " two", " three"), gap_s=0.01)
    async with FakeReplica(lambda seen: script) as one, FakeReplica(lambda seen: script) as two:
        where = f"stable={one.url};next={two.url}"
        files = {"config": CONFIG, "admin_token_file": tmp_path / "token"}
        async with (
            gateway(one, two, replicas=where, **files) as running,
            browser.page(running.base_url + "/console") as page,
        ):
            await page.until("document.activeElement.id === 'token'")
            await sign_in(page, "wrong-token-0123")
            await page.until("document.getElementById('sign-in-problem').textContent.includes('not the gateway')")
            page.problems.clear()  # the browser tells of the 401
            await sign_in(page)
            await page.until("document.getElementById('connection').textContent === 'ready'")
            await page.until("document.querySelectorAll('#replica-rows tr').length === 2")
            assert "1 of 1 healthy" in await page.run("document.querySelector('#pool-cards .card').textContent")

            # What a scaler reports is text.
            headers = {"authorization": f"Bearer {TOKEN}"}
            async with aiohttp.ClientSession(headers=headers) as session:
                report = {"decisions": [{"pool": HOSTILE, "replicas": 3, "reason": HOSTILE}]}
                async with session.put(f"{running.base_url}/admin/scaling", json=report) as answer:
                    assert answer.status == 200
            await page.until("document.querySelectorAll('#scaling-rows li').length === 1")
            assert HOSTILE in await page.run("document.querySelector('#scaling-rows p').textContent")
            assert await page.run("document.querySelectorAll('img').length") == 0

            # Shift and roll back, by keyboard; what is typed outlives the events.
            await page.run(
                "document.querySelector('.shift input').focus(); document.querySelector('.shift input').select()"
            )
            await page.type("40")
            await page.key("Tab")
            assert await page.run("document.activeElement.textContent") == "Shift"
            await page.key("Enter", "\r")
            await page.until("document.getElementById('confirm').open")
            assert await page.run("document.activeElement.textContent") == "Shift to 40 %"
            await page.key("Enter", "\r")
            await until(lambda: running.service.replicas.releases["r"].weight == 40)
            await page.until("!document.getElementById('confirm').open")
            await page.run("document.querySelector('.danger').focus()")
            await page.key("Enter", "\r")
            await page.key("Escape")
            assert not running.service.replicas.releases["r"].rolled_back
            await page.until("!document.getElementById('confirm').open")
            await page.key("Enter", "\r")
            await page.until("document.getElementById('confirm').open")
            await page.key("Enter", "\r")
            await until(lambda: bool(running.service.replicas.releases["r"].rolled_back))
            await page.until("document.querySelector('#release-cards .state').textContent === 'rolled back'")

            # A chat, with its timings.
            await page.until("document.getElementById('model').value !== ''")
            await page.run("document.getElementById('prompt').focus(); document.getElementById('prompt').value = ''")
            await page.type(HOSTILE)
            await page.run("document.getElementById('send').click()")
            await page.until("document.getElementById('messages').textContent.includes('tokens/s')")
            said = await page.run(
                "[...document.querySelectorAll('.message > p:first-child')].map((p) => p.textContent)"
            )
            assert said == [HOSTILE, " <b>one</b> two three"]
            assert "first token" in await page.run("document.querySelector('.assistant .note').textContent")
            assert await page.run("document.querySelectorAll('img, .message b').length") == 0
            assert await page.run("document.title") == "Trident console" and page.problems == []

            # Nothing is wider than the screen, and both colour schemes differ.
            colours = set()
            for dark in (False, True):
                for width in (320, 390, 1280):
                    await page.look(width, 800, dark=dark, phone=width < 1000)
                    assert await page.run("document.documentElement.scrollWidth") <= width
                colours.add(await page.run("getComputedStyle(document.body).backgroundColor"))
            assert len(colours) == 2

            # The token is kept for this tab, and forgotten on demand.
            await page.call("Page.reload")
            await page.until("document.getElementById('connection')?.textContent === 'ready'")
            await page.run("document.getElementById('sign-out').click()")
            assert await page.run("sessionStorage.getItem('trident.token')") is None
            await page.until("!document.getElementById('sign-in').hidden")


async def test_a_chat_that_is_cleared_during_an_answer_begins_anew(tmp_path: Path):
    (tmp_path / "token").write_text(TOKEN)
    scripts = iter([Script((" begun", " on"), stall_after=1), Script((" two",)), Script((" three",))])
    async with FakeReplica(lambda seen: next(scripts)) as replica:
        async with (
            gateway(replica, admin_token_file=tmp_path / "token") as running,
            browser.page(running.base_url + "/console") as page,
        ):
            await page.until("document.activeElement.id === 'token'")
            await sign_in(page)
            await page.until("document.getElementById('model').value !== ''")

            async def say(text: str, answer: str) -> list[str]:
                """Return the texts of the request, once this answer is shown."""
                await page.run(f"document.getElementById('prompt').value = '{text}'")
                await page.run("document.getElementById('send').click()")
                await page.until(f"document.getElementById('messages').textContent.includes('{answer}')")
                return [message["content"] for message in json.loads(replica.seen[-1].value("messages"))]

            assert await say("one", "begun") == ["one"]
            await page.run("document.getElementById('clear').click()")
            await page.until("!document.getElementById('send').disabled")
            assert await say("another", "two") == ["another"]
            await page.until("!document.getElementById('send').disabled")
            assert await say("more", "three") == ["another", " two", "more"]

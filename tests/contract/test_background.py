"""Tasks that run beside requests."""

from __future__ import annotations

import asyncio

import pytest

from contract.background import Background


async def test_done_waits_for_tasks_that_others_begin_and_raises_nothing():
    background, ended = Background(), []

    async def second() -> None:
        await asyncio.sleep(0)
        ended.append("second")

    async def first() -> None:
        background.start(second())
        raise ValueError("is not raised by done")

    task = background.start(first())
    await background.done()
    assert ended == ["second"]
    with pytest.raises(ValueError):
        await task


async def test_cancel_ends_what_runs():
    background = Background()
    task = background.start(asyncio.sleep(3600))
    await background.cancel()
    assert task.cancelled()
    await background.done()

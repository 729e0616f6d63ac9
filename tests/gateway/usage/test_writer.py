"""Items are written in batches, in order, once; a database that fails loses nothing until too many wait."""

from __future__ import annotations

import asyncio
import threading

import pytest

from contract.errors import Unavailable
from gateway.usage import writer
from gateway.usage.writer import Writer


class Disk:
    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.fails = False
        self.may_write = threading.Event()
        self.may_write.set()

    def write(self, batch: list[int]) -> None:
        assert self.may_write.wait(60)
        if self.fails:
            raise Unavailable("full", 1.0)
        self.batches.append(batch)

    @property
    def items(self) -> list[int]:
        return [item for batch in self.batches for item in batch]


def made() -> tuple[Writer[int], Disk]:
    disk = Disk()
    return Writer(list, disk.write), disk


async def test_what_is_added_is_written_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "WRITE_S", 0.01)
    wrote, disk = made()
    for item in range(5):
        wrote.add(item)
    while disk.items != list(range(5)):
        await asyncio.sleep(0.005)
    assert len(disk.batches) == 1
    await wrote.aclose()


async def test_all_that_wait_at_once_share_one_write() -> None:
    wrote, disk = made()
    disk.may_write.clear()

    async def commit(item: int) -> None:
        wrote.add(item)
        await wrote.commit()
        assert item in disk.items

    tasks = [asyncio.ensure_future(commit(item)) for item in range(3)]
    await asyncio.sleep(0.01)
    tasks += [asyncio.ensure_future(commit(item)) for item in range(3, 50)]
    await asyncio.sleep(0.01)
    disk.may_write.set()
    await asyncio.gather(*tasks)
    assert disk.items == list(range(50)) and len(disk.batches) <= 3
    await wrote.aclose()


async def test_a_disk_that_fails_loses_nothing_until_too_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MOST", 3)
    lost: list[int] = []
    disk = Disk()
    wrote: Writer[int] = Writer(list, disk.write, lambda: lost.append(1))
    disk.fails = True
    wrote.add(0)
    with pytest.raises(Unavailable):
        await wrote.commit()
    for item in range(1, 6):
        wrote.add(item)
    assert len(lost) == 3
    disk.fails = False
    await wrote.aclose()
    assert disk.items == [0, 1, 2]


async def test_a_gateway_that_ends_with_a_full_disk_ends() -> None:
    wrote, disk = made()
    disk.fails = True
    wrote.add(0)
    await wrote.aclose()

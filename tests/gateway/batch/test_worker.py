"""The worker over a real database: what runs, what runs again, what never does, and who goes first."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

for needed in ("starlette", "orjson", "pydantic", "prometheus_client", "opentelemetry.sdk", "aiohttp"):
    pytest.importorskip(needed)

from prometheus_client import CollectorRegistry

from contract.errors import EngineFailed, InvalidArgument, NotFound, Overloaded, Unavailable
from gateway.batch.pace import Signals
from gateway.batch.store import Batch, BatchStore, File, Line
from gateway.batch.webhook import Webhooks
from gateway.batch.worker import MAX_ATTEMPTS, BatchMetrics, BatchWorker
from gateway.config.settings import Settings
from gateway.config.tenant import LOWEST_PRIORITY, Tenant
from gateway.request_context import RequestContext
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.running import until

USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "completion_tokens_details": {"reasoning_tokens": 1}}
DONE = {"object": "text_completion", "usage": USAGE}
CALM = Signals()


def submitted(store: BatchStore, count: int, tenant: str = "a", window_s: float = 3600.0) -> Batch:
    body = {"model": "demo", "prompt": tenant}
    lines = [
        {"custom_id": f"{tenant}{n}", "method": "POST", "url": "/v1/completions", "body": {**body, "max_tokens": n + 1}}
        for n in range(count)
    ]
    file_id = store.open_file(tenant, "in.jsonl")
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    for number, start in enumerate(range(0, len(data), 100)):  # lines lie across the borders of parts
        store.append(file_id, number, data[start : start + 100])
    store.close_file(tenant, file_id)
    return store.create_batch(
        tenant,
        "",
        endpoint="/v1/completions",
        input_file_id=file_id,
        completion_window="1h",
        window_s=window_s,
        metadata={},
    )


def results(store: BatchStore, tenant: str, file_id: str | None) -> list[dict]:
    return [json.loads(line) for line in b"".join(store.content(tenant, file_id)).splitlines()] if file_id else []


@contextlib.asynccontextmanager
async def working(
    store: BatchStore,
    answer: Callable,
    signals: Callable[[], Signals] = lambda: CALM,
    tenant: Callable[[str, str], Tenant | None] = lambda name, key: Tenant(name),
    **more: Any,
) -> AsyncIterator[BatchWorker]:
    settings = Settings(batch_max_running=8)
    worker = BatchWorker(
        store, answer, tenant, signals, CollectorRegistry(), Webhooks(), settings, **{"tick_s": 0.02, **more}
    )
    await worker.start()
    try:
        yield worker
    finally:
        await worker.close()


def over(store: BatchStore, batch: Batch, status: str = "completed") -> Callable[[], bool]:
    return lambda: store.batch(batch.tenant, batch.id).status == status


async def test_lines_run_as_their_tenant_in_the_lowest_class_and_under_the_batch_label(tmp_path: Path):
    contexts: list[RequestContext] = []

    async def answer(form: type, context: RequestContext, body: bytes) -> dict:
        contexts.append(context)
        return DONE

    store = BatchStore(tmp_path / "b")
    batch = submitted(store, 300)
    async with working(store, answer):
        await until(over(store, batch))
    done = store.batch("a", batch.id)
    assert (done.total, done.completed, done.failed) == (300, 300, 0)
    assert (done.input_tokens, done.output_tokens, done.reasoning_tokens) == (600, 900, 300)
    assert {(one.tenant.name, one.tenant.priority, one.operation) for one in contexts} == {
        ("a", LOWEST_PRIORITY, "batch")
    }
    assert len({one.request_id for one in contexts}) == 300


@pytest.mark.slow
async def test_lack_of_room_makes_a_line_wait_and_nothing_is_lost(tmp_path: Path):
    calls: Counter[bytes] = Counter()

    async def answer(form: type, context: RequestContext, body: bytes) -> dict:
        calls[body] += 1
        if calls[body] <= 2 * MAX_ATTEMPTS:
            raise Overloaded("full", 0.0) if calls[body] % 2 else Unavailable("no replica", 0.0)
        return DONE

    store = BatchStore(tmp_path / "b")
    batch = submitted(store, 3)
    async with working(store, answer):
        await until(over(store, batch))
    assert store.batch("a", batch.id).completed == 3 and set(calls.values()) == {2 * MAX_ATTEMPTS + 1}


async def test_a_line_that_breaks_the_engine_fails_after_its_tries_and_alone(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("gateway.batch.worker.BatchWorker._retry", _at_once)
    calls: Counter[int] = Counter()

    async def answer(form: type, context: RequestContext, body: bytes) -> dict:
        number = json.loads(body)["max_tokens"]
        calls[number] += 1
        if number == 2:
            raise EngineFailed("it broke")
        if number == 3:
            raise InvalidArgument("temperature", "is wrong")
        return DONE

    store = BatchStore(tmp_path / "b")
    batch = submitted(store, 4)
    async with working(store, answer):
        await until(over(store, batch))
    done = store.batch("a", batch.id)
    assert (done.completed, done.failed) == (2, 2) and calls == {1: 1, 2: MAX_ATTEMPTS, 3: 1, 4: 1}
    broken, wrong = results(store, "a", done.error_file_id)
    assert broken["response"]["status_code"] == 500 and wrong["response"]["status_code"] == 400
    assert wrong["response"]["body"]["error"]["param"] == "temperature"


def _at_once(self: BatchWorker, run: Any, held: Any, pause_s: float) -> None:
    run.waiting.append(held)


async def test_a_defect_leaves_the_line_pending_and_the_worker_alive(tmp_path: Path, caplog):
    async def answer(form: type, context: RequestContext, body: bytes) -> dict:
        if context.tenant.name == "a":
            raise ZeroDivisionError("a defect")
        return DONE

    store = BatchStore(tmp_path / "b")
    broken, fine = submitted(store, 1), submitted(store, 5, "b")
    async with working(store, answer):
        await until(over(store, fine))
        assert store.batch("a", broken.id).status == "in_progress"
    assert "unhandled exception" in caplog.text


async def test_a_line_that_meets_a_defect_fails_after_its_tries_and_alone(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setattr("gateway.batch.worker.MAX_PAUSE_S", 0.0)
    calls: Counter[int] = Counter()

    async def answer(form: type, context: RequestContext, body: bytes) -> dict:
        number = json.loads(body)["max_tokens"]
        calls[number] += 1
        if number == 2:
            raise ZeroDivisionError("a defect")
        return DONE

    store = BatchStore(tmp_path / "b")
    batch = submitted(store, 3)
    async with working(store, answer):
        await until(over(store, batch))
    done = store.batch("a", batch.id)
    assert (done.completed, done.failed) == (2, 1) and calls == {1: 1, 2: MAX_ATTEMPTS, 3: 1}
    [broken] = results(store, "a", done.error_file_id)
    assert (broken["custom_id"], broken["response"]["status_code"]) == ("a1", 500)
    message = broken["response"]["body"]["error"]["message"]
    assert broken["id"] in message and "defect" not in message
    assert caplog.text.count(f"unhandled exception in request {broken['id']}") == MAX_ATTEMPTS


async def test_a_key_that_is_gone_ends_its_lines(tmp_path: Path):
    async def answer(form: type, context: RequestContext, body: bytes) -> dict:
        return DONE

    store = BatchStore(tmp_path / "b")
    batch = submitted(store, 2)
    async with working(store, answer, tenant=lambda name, key: None):
        await until(over(store, batch))
    failed = results(store, "a", store.batch("a", batch.id).error_file_id)
    assert [one["response"]["status_code"] for one in failed] == [401, 401]


async def test_tenants_take_turns(tmp_path: Path):
    order: list[str] = []

    async def answer(form: type, context: RequestContext, body: bytes) -> dict:
        order.append(context.tenant.name)
        return DONE

    store = BatchStore(tmp_path / "b")
    large, small = submitted(store, 200, "large"), submitted(store, 10, "small")
    ready = asyncio.Event()

    def signals() -> Signals:
        started = [store.batch(one.tenant, one.id).status == "in_progress" for one in (large, small)]
        ready.set() if all(started) else None
        return CALM if ready.is_set() else Signals(healthy=False)

    async with working(store, answer, signals):
        await until(over(store, small))
        await until(over(store, large))
    assert order.index("small") < 10
    last = len(order) - 1 - order[::-1].index("small")
    assert last < 40  # ten of the small one's among forty, however many the large one has


async def test_what_did_not_run_in_its_window_expires(tmp_path: Path, clock):
    clock.now_s = 1e9

    async def answer(form: type, context: RequestContext, body: bytes) -> dict:
        if json.loads(body)["max_tokens"] > 1:
            await asyncio.Event().wait()
        return DONE

    store = BatchStore(tmp_path / "b", clock=clock)
    batch = submitted(store, 20, window_s=3600.0)
    async with working(store, answer, now=clock) as worker:
        await until(lambda: store.batch("a", batch.id).completed == 1)
        clock.advance(3599)
        await until(lambda: worker.running > 0)
        clock.advance(1)
        await until(over(store, batch, "expired"))
        assert worker.running == 0
    done = store.batch("a", batch.id)
    assert (done.total, done.completed, done.failed) == (20, 1, 19) and done.expired_at
    assert {one["error"]["code"] for one in results(store, "a", done.error_file_id)} == {"batch_expired"}


async def test_a_cut_gives_the_youngest_lines_up_and_they_run_again(tmp_path: Path):
    seen = {"now": CALM}
    calls: Counter[bytes] = Counter()
    gate = asyncio.Event()

    async def answer(form: type, context: RequestContext, body: bytes) -> dict:
        calls[body] += 1
        await gate.wait()
        return DONE

    store = BatchStore(tmp_path / "b")
    batch = submitted(store, 8)
    async with working(store, answer, lambda: seen["now"]) as worker:
        await until(lambda: worker.running == 8)
        seen["now"] = Signals(degraded=True)
        await until(lambda: worker.running == 0)
        assert worker.pace.allowed == 0
        gate.set()
        seen["now"] = CALM
        await until(over(store, batch))
    assert set(calls.values()) == {2} and store.batch("a", batch.id).completed == 8


@pytest.mark.slow
async def test_lines_that_were_given_up_often_enough_run_to_their_end(tmp_path: Path):
    seen = {"now": CALM}
    started: list[int] = []
    looked = 0
    goes_on = asyncio.Event()

    async def answer(form: type, context: RequestContext, body: bytes) -> dict:
        started.append(1)
        await goes_on.wait()
        return DONE

    def signals() -> Signals:
        nonlocal looked
        looked += 1
        return seen["now"]

    store = BatchStore(tmp_path / "b")
    batch = submitted(store, 1)
    async with working(store, answer, signals) as worker:
        for _ in range(3):
            await until(lambda: worker.running == 1)
            seen["now"] = Signals(waiting=9)
            await until(lambda: worker.running == 0)
            seen["now"] = CALM
        await until(lambda: worker.running == 1)
        seen["now"], looked = Signals(waiting=9), 0
        await until(lambda: looked >= 3)
        assert worker.running == 1
        goes_on.set()
        await until(over(store, batch))
    assert len(started) == 4


async def test_one_worker_works_on_a_database_and_the_next_takes_over(tmp_path: Path):
    served: list[str] = []

    def answering(name: str) -> Callable:
        async def answer(form: type, context: RequestContext, body: bytes) -> dict:
            served.append(name)
            return DONE

        return answer

    store, other = BatchStore(tmp_path / "b"), BatchStore(tmp_path / "b")
    async with working(other, answering("second")) as second:
        await until(lambda: second.pace.allowed > 0)  # it has the database
        async with working(store, answering("first")):
            batch = submitted(store, 20)
            await until(over(store, batch))
        assert set(served) == {"second"} and second.pace.allowed
    async with working(store, answering("first")):
        batch = submitted(store, 3)
        await until(over(store, batch))
    assert served[-3:] == ["first"] * 3


async def test_a_validation_that_was_interrupted_begins_again(tmp_path: Path):
    async def answer(form: type, context: RequestContext, body: bytes) -> dict:
        return DONE

    store = BatchStore(tmp_path / "b")
    batch = submitted(store, 20)
    # Half of its lines were read when the process died.
    store.add_lines(batch.id, [Line(batch.id, n, f"a{n}", b"{}") for n in range(10)])
    async with working(store, answer):
        await until(over(store, batch))
    assert store.batch("a", batch.id).total == 20


async def test_an_input_that_is_gone_fails_the_batch(tmp_path: Path):
    async def answer(form: type, context: RequestContext, body: bytes) -> dict:
        return DONE

    store = BatchStore(tmp_path / "b")
    batch = submitted(store, 1)
    with sqlite3.connect(tmp_path / "b") as db:
        db.execute("DELETE FROM files")
    with pytest.raises(NotFound):
        store.file("a", batch.input_file_id)
    async with working(store, answer):
        await until(over(store, batch, "failed"))
    assert store.batch("a", batch.id).errors[0]["code"] == "input_file_missing"


async def test_a_defect_in_a_validation_fails_that_batch_and_others_go_on(tmp_path: Path, monkeypatch, caplog):
    async def answer(form: type, context: RequestContext, body: bytes) -> dict:
        return DONE

    store = BatchStore(tmp_path / "b")
    broken, fine = submitted(store, 300), submitted(store, 5, "b")
    add_lines = store.add_lines

    def defective(batch_id: str, lines: list[Line]) -> None:
        add_lines(batch_id, lines)
        if batch_id == broken.id:
            raise ZeroDivisionError("a defect")

    monkeypatch.setattr(store, "add_lines", defective)
    async with working(store, answer):
        await until(over(store, fine))
        await until(over(store, broken, "failed"))
    [error] = store.batch("a", broken.id).errors
    assert (error["code"], error["param"], error["line"]) == ("validation_failed", "input_file_id", None)
    assert "defect" not in error["message"] and store.pending(broken.id, -1, 1) == []
    assert "unhandled exception" in caplog.text and "a defect" in caplog.text


async def test_no_line_runs_and_none_ends_while_its_key_cannot_be_read(tmp_path: Path):
    looks: list[str] = []

    async def answer(form: type, context: RequestContext, body: bytes) -> dict:
        return DONE

    def tenant(name: str, key: str) -> Tenant:
        looks.append(name)
        if len(looks) < 5:
            raise Unavailable("the API keys cannot be read now", 0.0)
        return Tenant(name)

    store = BatchStore(tmp_path / "b")
    batch = submitted(store, 3)
    async with working(store, answer, tenant=tenant):
        await until(over(store, batch))
    assert store.batch("a", batch.id).completed == 3 and len(looks) == 4 + 3


async def test_an_input_is_opened_in_a_thread(tmp_path: Path, monkeypatch):
    """Its transaction may wait for another process."""

    async def answer(form: type, context: RequestContext, body: bytes) -> dict:
        return DONE

    store = BatchStore(tmp_path / "b")
    batch = submitted(store, 1)
    threads: list[threading.Thread] = []
    file = store.file

    def opened(tenant: str, file_id: str) -> File:
        threads.append(threading.current_thread())
        return file(tenant, file_id)

    monkeypatch.setattr(store, "file", opened)
    async with working(store, answer):
        await until(over(store, batch))
    assert threads and threading.main_thread() not in threads


@pytest.mark.slow
async def test_a_gateway_that_is_killed_twice_finishes_every_line_once(tmp_path: Path):
    """A real process, SIGKILL in the middle, twice; what was finished at a kill is never asked for again."""

    def script(seen):
        return Script((" a",), first_token_s=0.05)

    path = tmp_path / "b"
    store = BatchStore(path)
    batch = submitted(store, 240, "anonymous")
    async with FakeReplica(script) as replica:
        asked_after: dict[int, Counter] = {}
        finished_before: dict[int, set[int]] = {}
        for life in range(3):
            start = len(replica.seen)
            async with _gateway_process(replica.url, path) as process:
                if life < 2:
                    expected = _finished(store, batch) + 20
                    await until(lambda at_least=expected: _finished(store, batch) >= at_least)
                    process.send_signal(signal.SIGKILL)
                    await process.wait()
                else:
                    await until(over(store, batch))
            asked_after[life] = Counter(seen.value("max_tokens") - 1 for seen in replica.seen[start:])
            pending = {line.number for line in store.pending(batch.id, -1, 1000)}
            finished_before[life + 1] = set(range(240)) - pending
        for life in (1, 2):
            assert not asked_after[life].keys() & finished_before[life]
            assert max(asked_after[life].values()) == 1
    done = store.batch("anonymous", batch.id)
    assert (done.status, done.total, done.completed, done.failed) == ("completed", 240, 240, 0)
    found = results(store, "anonymous", done.output_file_id)
    assert [one["custom_id"] for one in found] == [f"anonymous{n}" for n in range(240)]
    assert done.output_tokens == 240


def _finished(store: BatchStore, batch: Batch) -> int:
    return store.batch(batch.tenant, batch.id).completed


@contextlib.asynccontextmanager
async def _gateway_process(replica: str, path: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    environ = {
        **os.environ,
        "TRIDENT_GATEWAY_HTTP_PORT": "0",
        "TRIDENT_GATEWAY_GRPC_PORT": "0",
        "TRIDENT_GATEWAY_METRICS_PORT": "0",
        "TRIDENT_GATEWAY_DEEP_PROBES": "false",
        "TRIDENT_GATEWAY_REPLICAS": replica,
        "TRIDENT_GATEWAY_BATCH_DB": str(path),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", env=environ, cwd=Path(__file__).parents[3], stdout=-1, stderr=-3
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


def test_every_series_is_there_at_zero_and_the_stall_is_read_at_the_scrape() -> None:
    registry, stalled = CollectorRegistry(), [0.0]
    metrics = BatchMetrics(registry, lambda: stalled[0])
    for outcome in ("completed", "failed", "retried", "preempted"):
        assert registry.get_sample_value("trident_gateway_batch_lines_total", {"outcome": outcome}) == 0
    for status in ("validating", "in_progress", "finalizing", "cancelling"):
        assert registry.get_sample_value("trident_gateway_batches", {"status": status}) == 0
    stalled[0] = 7.5
    assert registry.get_sample_value("trident_gateway_batch_stalled_seconds") == 7.5
    metrics.lines.labels("completed").inc()
    assert registry.get_sample_value("trident_gateway_batch_lines_total", {"outcome": "completed"}) == 1

"""The official openai client's files and batches against a running gateway with scripted replicas."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")
for needed in ("starlette", "uvicorn", "orjson", "pydantic", "prometheus_client", "opentelemetry.sdk", "httptools"):
    pytest.importorskip(needed)

from gateway.batch.endpoints import MAX_TENANT_UPLOADS, MAX_UPLOADS
from gateway.batch.store import BatchStore, File
from gateway.config import tenants
from tests.fakes.replica import FakeReplica, Script, echo
from tests.gateway.running import Running, gateway, until

pytestmark = pytest.mark.slow

ALICE, BOB = "tri-alice-0123456789abcdef", "tri-bob-0123456789abcdefgh"
OVER = ("completed", "failed", "expired", "cancelled")


def client(running: Running, api_key: str = "any") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{running.base_url}/v1", api_key=api_key, max_retries=0)


def chat(custom_id: str, content: str = "one two", **more: Any) -> dict:
    body = {"model": "demo", "max_tokens": 3, "messages": [{"role": "user", "content": content}], **more}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def jsonl(*lines: Any) -> bytes:
    return b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)


async def made(ask: openai.AsyncOpenAI, data: bytes, endpoint: str = "/v1/chat/completions", **more: Any):
    """A batch of the lines in ``data``."""
    file = await ask.files.create(file=("in.jsonl", data), purpose="batch")
    return await ask.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"for": "a test"}, **more
    )


async def over(ask: openai.AsyncOpenAI, batch_id: str):
    for _ in range(6000):
        batch = await ask.batches.retrieve(batch_id)
        if batch.status in OVER:
            return batch
        await asyncio.sleep(0.01)
    raise AssertionError(f"the batch is still {batch.status}")


async def lines(ask: openai.AsyncOpenAI, file_id: str | None) -> list[dict]:
    if file_id is None:
        return []
    content = (await ask.files.content(file_id)).content
    return [json.loads(line) for line in content.splitlines()]


async def test_a_batch_goes_from_file_to_file(tmp_path: Path):
    def says_the_last_word(seen):
        word = json.loads(seen.value("messages"))[-1]["content"]
        return Script((f" {word}",) * seen.value("max_tokens"))

    expected = [chat(f"line-{n}", f"word{n}") for n in range(20)]
    async with (
        FakeReplica(says_the_last_word) as replica,
        gateway(replica, batch_db=tmp_path / "b") as running,
        client(running) as ask,
    ):
        batch = await made(ask, jsonl(*expected))
        assert batch.status in ("validating", "in_progress") and batch.metadata == {"for": "a test"}
        assert batch.expires_at - batch.created_at == 24 * 3600
        done = await over(ask, batch.id)
        assert done.status == "completed" and done.error_file_id is None
        assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (20, 20, 0)
        assert done.in_progress_at and done.finalizing_at and done.completed_at
        found = await lines(ask, done.output_file_id)
        assert [one["custom_id"] for one in found] == [one["custom_id"] for one in expected]
        for n, one in enumerate(found):
            assert one["error"] is None and one["response"]["status_code"] == 200
            assert one["response"]["body"]["object"] == "chat.completion"
            assert one["response"]["body"]["choices"][0]["message"]["content"] == f" word{n}" * 3
        assert done.usage.output_tokens == 60 and len(replica.seen) == 20
        assert done.usage.output_tokens_details.reasoning_tokens == 0


async def test_a_batch_tells_how_much_of_its_output_was_reasoning(tmp_path: Path):
    script = Script(("<think>", *(" perhaps",) * 8, "</think>", "yes"))
    async with (
        FakeReplica(lambda seen: script) as replica,
        gateway(replica, batch_db=tmp_path / "b", reasoning_format="tagged") as running,
        client(running) as ask,
    ):
        done = await over(ask, (await made(ask, jsonl(chat("one"), chat("two")))).id)
        assert done.usage.output_tokens_details.reasoning_tokens > 0


async def test_what_one_line_asks_wrongly_fails_alone(tmp_path: Path):
    expected = jsonl(chat("good"), chat("hot", temperature=9), chat("other", model="nobody"), b"", chat("good too"))
    async with FakeReplica() as replica, gateway(replica, batch_db=tmp_path / "b") as running, client(running) as ask:
        done = await over(ask, (await made(ask, expected)).id)
        assert done.status == "completed"
        assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (4, 2, 2)
        assert [one["custom_id"] for one in await lines(ask, done.output_file_id)] == ["good", "good too"]
        hot, other = await lines(ask, done.error_file_id)
        assert hot["custom_id"] == "hot" and hot["response"]["status_code"] == 400
        assert hot["response"]["body"]["error"]["param"] == "temperature"
        assert other["response"]["status_code"] == 404


MALFORMED = [
    (b"{not json", "invalid_json_line", None),
    (b"[1]", "invalid_json_line", None),
    (b'{"custom_id": "a\xff"}', "invalid_json_line", None),
    ({**chat("a"), "custom_id": ""}, "invalid_custom_id", "custom_id"),
    ({**chat("a"), "custom_id": 7}, "invalid_custom_id", "custom_id"),
    (chat("first"), "duplicate_custom_id", "custom_id"),
    ({**chat("a"), "method": "GET"}, "invalid_method", "method"),
    ({**chat("a"), "url": "/v1/completions"}, "mismatched_url", "url"),
    ({**chat("a"), "body": "text"}, "invalid_body", "body"),
    ({**chat("a"), "more": 1}, "unknown_field", "more"),
    (chat("a", stream=True), "invalid_body", "body.stream"),
    (json.dumps(chat("a", stop="deep")).replace('"deep"', "[" * 300 + "]" * 300).encode(), "invalid_body", "body"),
]


async def test_a_malformed_line_fails_the_batch_and_says_where(tmp_path: Path):
    async with FakeReplica() as replica, gateway(replica, batch_db=tmp_path / "b") as running, client(running) as ask:
        for line, code, param in MALFORMED:
            failed = await over(ask, (await made(ask, jsonl(chat("first"), line, chat("last")))).id)
            assert failed.status == "failed" and failed.failed_at and failed.output_file_id is None
            [error] = failed.errors.data
            assert (error.code, error.param, error.line) == (code, param, 2)
        assert not replica.seen


async def test_files_are_listed_read_and_deleted(tmp_path: Path):
    async with gateway(batch_db=tmp_path / "b") as running, client(running) as ask:
        made = [await ask.files.create(file=(f"{n}.jsonl", b"x" * n), purpose="batch") for n in (1, 300_000)]
        assert [file.bytes for file in made] == [1, 300_000] and made[1].filename == "300000.jsonl"
        assert [file.id async for file in ask.files.list()] == [made[1].id, made[0].id]
        assert [file.id async for file in ask.files.list(limit=1, order="asc")] == [made[0].id, made[1].id]
        assert [file.id async for file in ask.files.list(purpose="batch_output")] == []
        assert (await ask.files.retrieve(made[0].id)).purpose == "batch"
        assert (await ask.files.content(made[1].id)).content == b"x" * 300_000
        assert (await ask.files.delete(made[0].id)).deleted
        with pytest.raises(openai.NotFoundError):
            await ask.files.retrieve(made[0].id)
        kept = await ask.files.create(
            file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert kept.expires_at == kept.created_at + 3600


async def test_batches_are_listed_page_by_page(tmp_path: Path):
    async with FakeReplica() as replica, gateway(replica, batch_db=tmp_path / "b") as running, client(running) as ask:
        ids = [(await made(ask, jsonl(chat("a")))).id for _ in range(3)]
        page = await ask.batches.list(limit=2)
        assert [batch.id for batch in page.data] == ids[:0:-1] and page.has_more
        assert [batch.id async for batch in ask.batches.list(limit=2)] == ids[::-1]


async def test_a_cancelled_batch_keeps_what_was_done_and_frees_the_engine(tmp_path: Path):
    def script(seen):
        return Script(stall_after=0) if "stall" in seen.value("messages") else echo(seen)

    expected = [chat("done"), *(chat(f"stalls-{n}", "stall") for n in range(50))]
    async with FakeReplica(script) as replica, gateway(replica, batch_db=tmp_path / "b") as running:
        async with client(running) as ask:
            batch = await made(ask, jsonl(*expected))
            while (await ask.batches.retrieve(batch.id)).request_counts.completed < 1 or not replica.counts.running:
                await asyncio.sleep(0.01)
            assert (await ask.batches.cancel(batch.id)).status == "cancelling"
            done = await over(ask, batch.id)
            assert done.status == "cancelled" and done.cancelling_at and done.cancelled_at
            assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (51, 1, 50)
            assert [one["custom_id"] for one in await lines(ask, done.output_file_id)] == ["done"]
            left = await lines(ask, done.error_file_id)
            assert len(left) == 50 and {one["error"]["code"] for one in left} == {"batch_cancelled"}
            while replica.counts.running:
                await asyncio.sleep(0.01)
            with pytest.raises(openai.BadRequestError):
                await ask.batches.cancel(batch.id)


async def test_another_tenants_files_and_batches_are_not_there(tmp_path: Path):
    environ = {tenants.API_KEYS: f"acme/research/alice={ALICE},other/team/bob={BOB}"}
    async with FakeReplica() as replica, gateway(replica, environ=environ, batch_db=tmp_path / "b") as running:
        async with client(running, ALICE) as alice, client(running, BOB) as bob:
            batch = await made(alice, jsonl(chat("a")))
            done = await over(alice, batch.id)
            tries = [
                bob.batches.retrieve(batch.id),
                bob.batches.cancel(batch.id),
                bob.files.retrieve(batch.input_file_id),
                bob.files.content(done.output_file_id),
                bob.files.delete(done.output_file_id),
                bob.batches.create(
                    input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
                ),
                bob.batches.list(after=batch.id),
            ]
            text_shown = set()
            for one in tries:
                with pytest.raises(openai.NotFoundError) as refused:
                    await one
                text_shown.add(refused.value.body["code"])
            assert text_shown == {"not_found"}
            assert [one async for one in bob.batches.list()] == [] and [one async for one in bob.files.list()] == []
            assert len(await lines(alice, done.output_file_id)) == 1
        async with client(running, "tri-nobody") as nobody:
            for one in (nobody.batches.list(), nobody.files.create(file=b"x", purpose="batch")):
                with pytest.raises(openai.AuthenticationError):
                    await one


async def test_bounds_are_refused_by_name(tmp_path: Path):
    bounds = {"batch_max_file_bytes": 2048, "batch_max_lines": 3, "batch_max_batches": 1}
    async with FakeReplica(lambda seen: Script(stall_after=0)) as replica:
        async with gateway(replica, batch_db=tmp_path / "b", **bounds) as running, client(running) as ask:
            for size in (2049, 500_000):
                with pytest.raises(openai.APIStatusError, match="2048 bytes") as refused:
                    await ask.files.create(file=b"x" * size, purpose="batch")
                assert refused.value.status_code == 413
            assert [one async for one in ask.files.list()] == []
            failed = await over(ask, (await made(ask, jsonl(*(chat(str(n)) for n in range(4))))).id)
            assert failed.errors.data[0].code == "too_many_lines" and "3" in failed.errors.data[0].message
            await made(ask, jsonl(chat("a")))
            with pytest.raises(openai.RateLimitError, match="batches are unfinished"):
                await made(ask, jsonl(chat("a")))


@contextlib.asynccontextmanager
async def begun(running: Running, count: int, refused: int, api_key: str = "any") -> AsyncIterator[list[bytes]]:
    """Begin ``count`` uploads and yield the answers to the ``refused`` ones; the others send no more until the end."""
    head = b"POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer " + api_key.encode()
    head += b"\r\ncontent-length: 1000\r\ncontent-type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"
    uploads = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(count)]
    for _, writer in uploads:
        writer.write(head)
    answers = [asyncio.create_task(reader.readuntil(b"}}")) for reader, _ in uploads]
    try:
        await until(lambda: sum(answer.done() for answer in answers) >= refused)
        yield [answer.result() for answer in answers if answer.done()]
    finally:
        for _, writer in uploads:
            writer.close()
        await asyncio.gather(*answers, return_exceptions=True)


async def test_uploads_of_one_tenant_leave_room_for_others(tmp_path: Path):
    environ = {tenants.API_KEYS: f"acme/research/alice={ALICE},other/team/bob={BOB}"}
    async with (
        gateway(environ=environ, batch_db=tmp_path / "b", body_timeout_s=600.0) as running,
        client(running, ALICE) as alice,
        client(running, BOB) as bob,
    ):
        async with begun(running, MAX_UPLOADS, MAX_UPLOADS - MAX_TENANT_UPLOADS, ALICE) as refused:
            share = b"%d/%d files of this tenant" % (MAX_TENANT_UPLOADS, MAX_TENANT_UPLOADS)
            assert len(refused) == MAX_UPLOADS - MAX_TENANT_UPLOADS
            assert all(b" 429 " in answer and share in answer for answer in refused)
            assert (await bob.files.create(file=b"x", purpose="batch")).bytes == 1
        while True:  # until the gateway has seen that they left
            try:
                assert (await alice.files.create(file=b"x", purpose="batch")).bytes == 1
                break
            except openai.RateLimitError:
                await asyncio.sleep(0.01)


async def test_without_keys_there_is_no_share_to_keep(tmp_path: Path):
    async with gateway(batch_db=tmp_path / "b", body_timeout_s=600.0) as running:
        async with begun(running, MAX_UPLOADS + 1, 1) as [answer]:
            assert b" 429 " in answer and b"%d/%d files are" % (MAX_UPLOADS, MAX_UPLOADS) in answer


async def test_a_body_that_arrives_byte_by_byte_is_refused_in_time(tmp_path: Path):
    async with gateway(batch_db=tmp_path / "b", body_timeout_s=0.3) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"POST /v1/batches HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n")
        answer = asyncio.create_task(reader.readuntil(b"}}"))
        for _ in range(50):
            await asyncio.wait([answer], timeout=0.02)
            if not answer.done():
                writer.write(b" ")
        assert b" 504 " in await answer and b"did not arrive within 0.3 s" in answer.result()
        writer.close()


async def test_a_content_is_opened_in_a_thread(tmp_path: Path, monkeypatch):
    """Its transaction may wait for another process."""
    threads: list[threading.Thread] = []
    opened = BatchStore.file

    def file(store: BatchStore, tenant: str, file_id: str) -> File:
        threads.append(threading.current_thread())
        return opened(store, tenant, file_id)

    monkeypatch.setattr(BatchStore, "file", file)
    async with gateway(batch_db=tmp_path / "b") as running, client(running) as ask:
        made = await ask.files.create(file=b"x", purpose="batch")
        assert (await ask.files.content(made.id)).content == b"x"
    assert threads and threading.main_thread() not in threads


async def test_bad_requests_are_refused_by_name(tmp_path: Path):
    async with gateway(batch_db=tmp_path / "b") as running, client(running) as ask:
        file = await ask.files.create(file=jsonl(chat("a")), purpose="batch")
        good = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        for change, field in [
            ({"endpoint": "/v1/embeddings"}, "endpoint"),
            ({"completion_window": "999h"}, "completion_window"),
            ({"completion_window": 24}, "completion_window"),
            ({"input_file_id": ""}, "input_file_id"),
            ({"metadata": {"k": 1}}, "metadata"),
            ({"surprise": 1}, "surprise"),
            ({"webhook_url": "https://example.org/x"}, "webhook_url"),
        ]:
            status, _, text_shown = await running.post("/v1/batches", {**good, **change})
            assert status == 400 and text_shown["error"]["param"].startswith(field), (change, text_shown)
        for data in (b"", b"{", b"[]"):
            assert (await running.post("/v1/batches", data=data))[0] == 400
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await ask.files.create(file=b"x", purpose="fine-tune")
        with pytest.raises(openai.BadRequestError, match="empty"):
            await ask.files.create(file=b"", purpose="batch")
        form = {"content_type": "multipart/form-data; boundary=b"}
        for data in (b"", b"--b\r\n", b"--b\r\n\r\nno name\r\n--b--\r\n", b"junk", b"--b\r\nx: " + b"y" * 20_000):
            assert (await running.post("/v1/files", data=data, **form))[0] == 400, data[:20]
        assert (await running.post("/v1/files", data=b"{}", content_type="application/json"))[0] == 400
        for query in ("limit=0", "limit=x", "after=file-none", "purpose="):
            assert (await running.get(f"/v1/files?{query}"))[0] in (400, 404)
        assert [one.id async for one in ask.files.list()] == [file.id]


async def test_without_a_database_there_are_no_batches():
    async with gateway() as running, client(running) as ask:
        with pytest.raises(openai.NotFoundError):
            await ask.batches.list()

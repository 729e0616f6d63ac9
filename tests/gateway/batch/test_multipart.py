"""Forms with a file in them, cut and broken anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

for needed in ("starlette", "aiohttp"):
    pytest.importorskip(needed)

from starlette.requests import Request

from contract.errors import Cancelled, DeadlineExceeded, InvalidArgument
from gateway.batch.multipart import CHUNK_BYTES, MAX_FIELD_BYTES, MIN_BYTES_PER_S, file_chunks
from gateway.batch.store import FileTooLarge
from tests.gateway.conftest import SteppedClock

DATA = b'{"a": 1}\n--b not a border\r\n{"b": 2}'
FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="x.jsonl"\r\n'
    b"Content-Type: application/octet-stream\r\n\r\n" + DATA + b"\r\n--b--\r\n"
)


def request(parts: Sequence[bytes | None], boundary: bytes = b"b") -> Request:
    """A request whose body comes in these parts; None is a caller that goes."""
    messages = [
        {"type": "http.disconnect"} if part is None else {"type": "http.request", "body": part, "more_body": True}
        for part in parts
    ]
    messages.append({"type": "http.request", "body": b"", "more_body": False})
    left = iter(messages)

    async def receive() -> dict:
        return next(left)

    headers = [(b"content-type", b"multipart/form-data; boundary=" + boundary)]
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


async def read(
    parts: Sequence[bytes | None], boundary: bytes = b"b", max_bytes: int = 10**6
) -> tuple[bytes, str, dict[str, str]]:
    data, last = b"", None
    async for last in file_chunks(request(parts, boundary), 5.0, max_bytes):
        data += last.data
    assert last is not None
    return data, last.filename, last.fields


@given(st.lists(st.integers(0, len(FORM)), max_size=8).map(sorted))
def test_a_form_may_be_cut_anywhere(cuts):
    parts = [FORM[start:end] for start, end in zip([0, *cuts], [*cuts, len(FORM)], strict=True)]
    assert asyncio.run(read(parts)) == (DATA, "x.jsonl", {"purpose": "batch"})


@given(
    st.lists(
        st.tuples(
            st.integers(0, len(FORM)), st.integers(0, 30), st.binary(max_size=8) | st.sampled_from([b"\r\n", b"--b"])
        ),
        min_size=1,
        max_size=4,
    )
)
def test_a_broken_form_is_read_or_refused_by_name_and_warns_of_nothing(edits):
    form = FORM
    for place, length, instead in edits:
        form = form[:place] + instead + form[place + length :]
    try:
        data, filename, fields = asyncio.run(read([form]))
    except InvalidArgument:
        return
    for text in (filename, *fields, *fields.values()):
        text.encode()  # no lone surrogates


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (FORM.replace(b'name="file"', b'name="other"').replace(DATA, b"x" * (MAX_FIELD_BYTES + 1)), "^other: "),
        (FORM.replace(b'name="purpose"', b'name="file"'), "^file: "),
        (FORM.replace(b'name="file"; ', b'name=""; '), "named fields"),
        (FORM[: FORM.index(b"--b", 3)] + b"--b--\r\n", "^file: "),
        (b"", "cannot be read"),
        (FORM[:-20], "cannot be read"),
        (FORM.replace(b"Content-Type:", b"x: " + b"y" * 10_000 + b"\r\nContent-Type:"), "at most"),
    ],
)
async def test_what_is_wrong_is_named(form: bytes, message: str):
    with pytest.raises(InvalidArgument, match=message):
        await read([form])


async def test_a_filename_that_is_no_text_is_made_one():
    _, filename, _ = await read([FORM.replace(b"x.jsonl", b"\xff\xfe.jsonl")])
    assert filename == "\ufffd\ufffd.jsonl"


async def test_a_caller_that_goes_or_falls_silent_is_told_apart():
    with pytest.raises(Cancelled):
        await read([FORM[:150], None])
    stalled = request([])

    async def nothing() -> dict:
        await asyncio.sleep(60)
        raise AssertionError

    stalled._receive = nothing
    with pytest.raises(DeadlineExceeded, match=r"for 0\.01 s"):
        async for _ in file_chunks(stalled, 0.01, 10**6):
            pass


LONGEST = b"b" * 70  # of the boundaries that aiohttp accepts
BEFORE, AFTER = (part.replace(b"--b", b"--" + LONGEST) for part in FORM.split(DATA))
LARGE = bytes(range(256)) * (2 * CHUNK_BYTES // 256 + 100)


@given(st.lists(st.integers(1, 200) | st.integers(CHUNK_BYTES - 200, CHUNK_BYTES + 200), max_size=8))
def test_a_large_file_may_arrive_in_parts_of_any_size(sizes):
    """Also where few bytes are left to a whole chunk: fewer than the boundary has."""
    parts, start = [BEFORE], 0
    for size in sizes:
        parts.append(LARGE[start : start + size])
        start += size
    parts += [LARGE[start:] + AFTER]
    assert asyncio.run(read(parts, LONGEST)) == (LARGE, "x.jsonl", {"purpose": "batch"})


@pytest.mark.parametrize("size", range(MAX_FIELD_BYTES - 80, MAX_FIELD_BYTES + 1))
async def test_a_field_may_arrive_in_parts_of_any_size(size: int):
    value = b"v" * MAX_FIELD_BYTES
    start, end = BEFORE.replace(b"batch", value).split(value)
    form = [start, value[:size], value[size:] + end + AFTER]
    assert (await read(form, LONGEST))[2] == {"purpose": value.decode()}


async def arrived(clock: SteppedClock, bytes_per_s: float, size: int, count: int) -> None:
    """Read a form whose file arrives in ``count`` parts of ``size`` bytes."""
    form = request([BEFORE, *[b"x" * size] * count, AFTER], LONGEST)
    receive = form._receive

    async def later() -> dict:
        message = await receive()
        clock.advance(len(message["body"]) / bytes_per_s)
        return message

    form._receive = later
    async for _ in file_chunks(form, 30.0, 10**9, clock):
        pass


async def test_a_large_file_may_take_long_and_a_slow_one_is_refused(clock):
    await arrived(clock, 2 * MIN_BYTES_PER_S, 65_536, 200)
    assert clock() > 1000 + 3 * 30
    for bytes_per_s, size in ((MIN_BYTES_PER_S / 2, 65_536), (1 / 29, 1)):
        with pytest.raises(DeadlineExceeded, match=f"{MIN_BYTES_PER_S} bytes per second of the file arrived for 30 s"):
            await arrived(clock, bytes_per_s, size, 200)


async def test_a_body_without_end_is_refused_although_its_file_never_begins():
    with pytest.raises(FileTooLarge, match="at most 1000 bytes"):
        await read([b"no boundary\r\n" * 1000] * 3, max_bytes=1000)

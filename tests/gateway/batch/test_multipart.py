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
from gateway.batch.multipart import MAX_FIELD_BYTES, file_chunks

DATA = b'{"a": 1}\n--b not a border\r\n{"b": 2}'
FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="x.jsonl"\r\n'
    b"Content-Type: application/octet-stream\r\n\r\n" + DATA + b"\r\n--b--\r\n"
)


def request(parts: Sequence[bytes | None]) -> Request:
    """A request whose body comes in these parts; None is a caller that goes."""
    messages = [
        {"type": "http.disconnect"} if part is None else {"type": "http.request", "body": part, "more_body": True}
        for part in parts
    ]
    messages.append({"type": "http.request", "body": b"", "more_body": False})
    left = iter(messages)

    async def receive() -> dict:
        return next(left)

    headers = [(b"content-type", b"multipart/form-data; boundary=b")]
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


async def read(parts: Sequence[bytes | None]) -> tuple[bytes, str, dict[str, str]]:
    data, last = b"", None
    async for last in file_chunks(request(parts), 5.0):
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
        async for _ in file_chunks(stalled, 0.01):
            pass

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.wire import protobuf


@given(st.integers(0, 2**64 - 1))
def test_an_integer_of_the_wire_comes_back_as_it_was(value: int) -> None:
    encoded = protobuf.varint(value)
    assert protobuf.read_varint(encoded, 0) == (value, len(encoded))


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 2**64 - 1) | st.binary(max_size=300))))
def test_the_fields_of_a_message_come_in_order(written: list) -> None:
    data = b"".join(
        protobuf.chunk(number, value)
        if isinstance(value, bytes)
        else protobuf.varint(number << 3) + protobuf.varint(value)
        for number, value in written
    )
    assert list(protobuf.fields(data)) == written


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x0a\x05ab", "a field of 5 bytes at byte 2 reaches beyond the message's 4 bytes"),
        (b"\x0b", "wire type 3 at byte 1"),
        (b"\x08\xff", "an integer that does not end at byte 2"),
        (b"\x08" + b"\xff" * 11, "an integer that does not end"),
    ],
)
def test_what_is_no_message_is_refused_with_the_place(data: bytes, message: str) -> None:
    with pytest.raises(protobuf.WireError, match=message):
        list(protobuf.fields(data))

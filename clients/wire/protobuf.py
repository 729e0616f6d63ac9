"""Protobuf's wire format, as much of it as KServe's messages need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class WireError(ValueError):
    """Bytes that are not the message they should be."""


def varint(value: int) -> bytes:
    """``value``, 0 <= value < 2**64, in base 128, least significant group first."""
    if value <= 0x7F:
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def chunk(number: int, data: bytes) -> bytes:
    """A length-delimited field: a string, bytes or a nested message."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def text(number: int, value: str) -> bytes:
    """A string field; nothing at all when empty, as proto3 has it."""
    return chunk(number, value.encode()) if value else b""


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of one message in order: (number, integer or bytes). Fixed-width fields come as bytes."""
    at, end = 0, len(data)
    while at < end:
        key, at = read_varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = read_varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = read_varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise WireError(f"wire type {kind} at byte {at} is not one of 0, 1, 2, 5")
        if at + size > end:
            raise WireError(f"a field of {size} bytes at byte {at} reaches beyond the message's {end} bytes")
        yield key >> 3, data[at : at + size]
        at += size


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The integer at ``at`` and the position after it."""
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise WireError(f"an integer that does not end at byte {at}")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7

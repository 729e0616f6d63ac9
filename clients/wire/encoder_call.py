"""One unary call of the encoder model: rows of texts or token ids in, vectors or scores out."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from clients.wire import failures
from clients.wire.infer_request import INFER, infer_request
from clients.wire.protobuf import WireError, fields
from clients.wire.status import UnaryCall
from contract.encoder import MODEL

_NO_ID = -1  # fills a row of ids that is shorter than the longest


@dataclass(frozen=True)
class Rows:
    """What one call encodes: texts, pairs of texts, or token ids; one of ``texts`` and ``ids``.

    pairs: the second text of each pair. prompt_name: "" for the model's default. dimensions: None for the model's own.
    truncate: tokens that are kept of a text, -1 for the model's limit; None to refuse a longer one.
    """

    texts: tuple[str, ...] = ()
    pairs: tuple[str, ...] = ()
    ids: tuple[tuple[int, ...], ...] = ()
    prompt_name: str = ""
    dimensions: int | None = None
    truncate: int | None = None


@dataclass(frozen=True)
class Encoded:
    """values: little-endian f32, ``dimensions`` for each row; a score is 1. tokens: of all rows."""

    values: bytes
    dimensions: int
    tokens: int


def call(rows: Rows, request_id: str) -> UnaryCall:
    """Return the call. Raises InvalidArgument for text that is none."""
    count = len(rows.texts or rows.ids)
    inputs: list[tuple[str, str, list]] = []
    for name, texts in (("text_input", rows.texts), ("text_pair", rows.pairs)):
        if texts:
            inputs.append((name, "BYTES", list(texts)))
    if rows.ids:
        longest = max(map(len, rows.ids))
        filled = [token for row in rows.ids for token in (*row, *[_NO_ID] * (longest - len(row)))]
        inputs.append(("input_ids", "INT32", filled))
    if rows.prompt_name:
        inputs.append(("prompt_name", "BYTES", [rows.prompt_name] * count))
    for name, value in (("dimensions", rows.dimensions), ("truncate_prompt_tokens", rows.truncate)):
        if value is not None:
            inputs.append((name, "INT32", [value] * count))
    return UnaryCall(INFER, infer_request(MODEL, request_id, inputs, {}, count))


def read(response: bytes) -> Encoded:
    """Return what a ModelInferResponse holds. Raises EngineFailed for bytes that are none."""
    try:
        names, raws = [], []
        for number, value in fields(response):
            if number == 5:
                names.append(dict(fields(value))[1].decode())
            elif number == 6:
                raws.append(value)
        found = dict(zip(names, raws, strict=True))
        counts = found["num_input_tokens"]
        tokens = struct.unpack(f"<{len(counts) // 4}i", counts)
        values = found.get("embedding") or found["score"]
        return Encoded(values, len(values) // len(counts), sum(tokens))
    except (WireError, KeyError, ValueError, AttributeError, struct.error, ZeroDivisionError) as exc:
        raise failures.unreadable(exc) from exc


def batches(rows: Rows, most_rows: int, most_bytes: int) -> Sequence[slice]:
    """Return slices of the rows for one call each: at most ``most_rows``, and ``most_bytes`` unless it is one row."""
    found: list[slice] = []
    first = size = longest = 0
    count = len(rows.texts or rows.ids)
    for number in range(count):
        own = 4 * len(rows.ids[number]) if rows.ids else len(rows.texts[number].encode(errors="replace"))
        own += len(rows.pairs[number].encode(errors="replace")) if rows.pairs else 0
        longest = max(longest, own)
        size = longest * (number - first + 1) if rows.ids else size + own  # rows of ids are filled up
        if number > first and (number - first == most_rows or size > most_bytes):
            found.append(slice(first, number))
            first, size, longest = number, own, own
    return [*found, slice(first, count)]

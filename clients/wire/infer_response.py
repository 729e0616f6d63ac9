"""ModelStreamInferResponse by hand: what one streamed message adds, read in about 3 µs.

The generated protobuf classes take twice as long. A streamed response is
``ModelStreamInferResponse{1: error_message, 2: ModelInferResponse{1: model, 2: version, 3: id, 4: parameters,
5: outputs, 6: raw contents}}``. The names, fields 1 to 3, are equal for all responses of a stream; what stands between
them and the raw contents, the header, is one of a few variants for all streams. Headers that were parsed once are
remembered, and then the raw contents alone are read: those of a response that goes on all at once, by a layout that is
remembered for their sizes. The tests hold it to tritonclient's own protobufs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

from clients.wire.infer_request import STRUCT_CODES
from clients.wire.protobuf import WireError, fields, read_varint, varint
from contract import packed_delta
from contract.generation import FinishReason, Timings, TokenDelta, Usage

_INFER_RESPONSE_TAG = 0x12  # field 2, length-delimited
_NAME_TAGS = b"\x0a\x12\x1a"  # fields 1 to 3, length-delimited
_RAW_CONTENTS_TAG = 0x32  # field 6, length-delimited
_HEADERS_REMEMBERED, _LAYOUTS_REMEMBERED = 256, 1024  # layouts of each header
_SLOTS = {
    name: slot
    for slot, name in enumerate(
        ["text_output", "output_ids", "output_log_probs", "top_log_probs_ids", "top_log_probs", "finish_reason"]
        + ["stop_reason", "error_message"]
        + ["num_input_tokens", "num_output_tokens", "num_cached_tokens", "arrival_time_ns", "first_scheduled_time_ns"]
        + ["first_token_time_ns", "last_token_time_ns", "stage_time_ns", packed_delta.OUTPUT]
    )
}
_FRACTIONS = ("output_log_probs", "top_log_probs")
_NOTHING: tuple = ("", (), (), (), (), "", "", "", (), (), (), (), (), (), (), (), b"")
_TEXT, _IDS, _LOG_PROBS = _SLOTS["text_output"], _SLOTS["output_ids"], _SLOTS["output_log_probs"]
_REASON, _INPUTS, _PACKED = _SLOTS["finish_reason"], _SLOTS["num_input_tokens"], _SLOTS[packed_delta.OUTPUT]
_REASONS = {reason.value: reason for reason in FinishReason}


class _Output(NamedTuple):
    """The output that one raw content belongs to.

    slot: index into a delta's values, -1 to skip. code: of ``struct``, "" for text, "s" for bytes.
    """

    slot: int
    code: str
    size: int  # bytes of one element; 4 for text: the length in front of an empty one
    unpack_one: Callable[[bytes, int], tuple] | None  # of one number; None for text


class _Layout(NamedTuple):
    """Where the raw contents are, up to an empty finish_reason, of responses with the same sizes of them.

    unpack: reads them all. sizes: picks the tags and sizes among what was read, which must be ``expected``; the other
    fields tell where the values are.
    """

    unpack: Callable[[bytes, int], tuple]
    sizes: Callable[[tuple], Any]
    expected: tuple[bytes, ...]
    text: slice
    ids: slice
    log_probs: slice


class _Header(NamedTuple):
    """The parsed bytes between the names and the raw contents.

    data: these bytes and the tag of the first raw content, so that no header is the beginning of another.
    stops: the outputs behind an empty finish_reason need not be read, because they matter at the end only.
    layouts: by the first raw content's size and that of all; None where the outputs are to be read one by one.
    """

    data: bytes
    outputs: tuple[_Output, ...]
    final: bool
    stops: bool
    layouts: dict[tuple[int, int], _Layout | None]


class _Headers:
    """The headers of all streams of this process. Tables are replaced, never changed: other threads read them."""

    def __init__(self) -> None:
        self._known: dict[bytes, _Header] = {}
        self._sizes: tuple[int, ...] = ()

    def at(self, data: bytes, at: int) -> _Header | None:
        for size in self._sizes:
            header = self._known.get(data[at : at + size])
            if header is not None:
                return header
        return None

    def remember(self, header: _Header) -> None:
        known = self._known if len(self._known) < _HEADERS_REMEMBERED else {}
        self._known = known = {**known, header.data: header}
        self._sizes = tuple({len(data) for data in known})


_HEADERS = _Headers()
_UNKNOWN = b"\xff"  # no message begins like this


class ResponseDecoder:
    """Decode the responses of one stream. Outputs are identified by name; their order may vary."""

    def __init__(self) -> None:
        self._begin = _UNKNOWN  # names and header of the latest response, and its parsed form
        self._raws_at = 0  # behind the beginning of ``_begin``
        self._header: _Header | None = None

    def decode(self, data: bytes) -> tuple[TokenDelta | None, bool, str]:
        """(what the response adds or None if it has no outputs, whether it is the last, error message or "")."""
        try:
            if data and data[0] == _INFER_RESPONSE_TAG:
                size, at, end = data[1], 2, len(data)
                if size > 0x7F:
                    size, at = (size & 0x7F) + (data[2] << 7), 3
                    if data[2] > 0x7F:
                        size, at = read_varint(data, 1)
                if at + size == end:
                    if not data.startswith(self._begin, at):
                        self._look_up(data, at)
                    header = self._header
                    if header is not None:
                        at += self._raws_at
                        key = data[at + 1], end - at
                        layout = header.layouts.get(key)
                        if layout is not None:
                            read = layout.unpack(data, at)
                            if layout.sizes(read) == layout.expected:
                                text = read[layout.text]
                                ids, log_probs = read[layout.ids], read[layout.log_probs]
                                return TokenDelta(text[0].decode() if text else "", ids, log_probs), header.final, ""
                        values = _read_raws(data, at, header.outputs, header.stops)
                        if values is not None:
                            if header.stops and key not in header.layouts and len(header.layouts) < _LAYOUTS_REMEMBERED:
                                header.layouts[key] = _layout(data, at, header.outputs)
                            return _delta(values), header.final, ""
            return self._decode_whole(data)
        except WireError:
            raise
        except (AttributeError, IndexError, TypeError, struct.error, ValueError, OverflowError) as exc:
            raise WireError(f"{len(data)} bytes that are not a ModelStreamInferResponse: {exc}") from exc

    def _look_up(self, data: bytes, at: int) -> None:
        names_end = _names_end(data, at)
        self._header = header = _HEADERS.at(data, names_end)
        self._begin = data[at : names_end + len(header.data)] if header is not None else _UNKNOWN
        self._raws_at = len(self._begin) - 1

    def _decode_whole(self, data: bytes) -> tuple[TokenDelta | None, bool, str]:
        error, body = "", b""
        for number, value in fields(data):
            if number == 1:
                error = value.decode()
            elif number == 2:
                body += value  # protobuf merges a message field that is sent twice
        if error:
            return None, True, error
        outputs: list[_Output] = []
        raws: list[bytes] = []
        final = False
        for number, value in fields(body):
            if number == 4:
                final = final or _is_final_flag(value)
            elif number == 5:
                outputs.append(_read_output(value))
            elif number == 6:
                raws.append(value)
        if not outputs:
            return None, final, ""
        raws_at = len(body) - sum(1 + len(varint(len(raw))) + len(raw) for raw in raws)
        if len(raws) == len(outputs) and _read_raws(body, raws_at, outputs):
            header, slots = body[_names_end(body, 0) : raws_at + 1], [output.slot for output in outputs]
            end = slots.index(_REASON) if _REASON in slots else len(slots)
            # What belongs to the end of an answer stands behind its reason, all of it, and nothing else does.
            ordered = all((slot > _REASON) == (at > end) for at, slot in enumerate(slots) if slot >= 0)
            stops = end < len(slots) and ordered
            _HEADERS.remember(_Header(header, tuple(outputs), final, stops, {}))
        if len(raws) < len(outputs):  # Triton never puts contents into the tensor itself
            raise WireError(f"{len(outputs)} outputs, and contents for {len(raws)} of them")
        values = list(_NOTHING)
        for output, raw in zip(outputs, raws, strict=False):
            if output.slot >= 0:
                values[output.slot] = _value(output.code, output.size, raw, 0, len(raw))
        return _delta(values), final, ""


def _names_end(data: bytes, at: int) -> int:
    """Where the names end that begin at ``at``."""
    while at < len(data) and data[at] in _NAME_TAGS:
        size, at = data[at + 1], at + 2
        if size > 0x7F:
            size, at = read_varint(data, at - 1)
        at += size
    return at


def _read_raws(data: bytes, at: int, outputs: Sequence[_Output], stops: bool = False) -> list | None:
    """A delta's values out of the raw contents at ``at``; ``stops``: up to an empty finish_reason. None: no such."""
    values = list(_NOTHING)
    end = len(data)
    for slot, code, width, unpack_one in outputs:
        if at >= end or data[at] != _RAW_CONTENTS_TAG:
            return None
        size = data[at + 1]
        at += 2
        if size > 0x7F:
            size, at = read_varint(data, at - 1)
        if size == width:
            if unpack_one is not None:  # else an empty text
                values[slot] = unpack_one(data, at)
            elif stops and slot == _REASON:
                return values
        elif size and slot >= 0:
            values[slot] = _value(code, width, data, at, size)
        at += size
    return values if at == end else None


def _layout(data: bytes, at: int, outputs: Sequence[_Output]) -> _Layout | None:
    """The layout of the raw contents that begin at ``at``; None where they end the answer or need more than it has."""
    form, count, sizes, expected = "<", 0, [], []  # count: of what is read
    found = {_TEXT: slice(0), _IDS: slice(0), _LOG_PROBS: slice(0)}
    for slot, code, width, _ in outputs:
        size, mark = data[at + 1], data[at : at + 2]
        sizes.append(count)
        if slot == _REASON:
            if size != width:
                return None
            expected.append(mark + bytes(width))
            unpack = struct.Struct(f"{form}{2 + width}s").unpack_from
            return _Layout(unpack, itemgetter(*sizes), tuple(expected), *found.values()) if len(sizes) > 1 else None
        if size > 0x7F or (size and slot >= 0 and slot not in found):
            return None
        elements, values = 0, f"{size}x"
        if slot == _TEXT and size:
            elements, values = 1, f"{size - 4}s"
            mark += (size - 4).to_bytes(4, "little")
        elif slot in found and size:
            elements = size // width
            values = f"{elements}{code}"
        if slot in found:
            found[slot] = slice(count + 1, count + 1 + elements)
        expected.append(mark)
        form, count, at = f"{form}{len(mark)}s{values}", count + 1 + elements, at + 2 + size
    return None


def _value(code: str, width: int, data: bytes, at: int, size: int) -> str | bytes | tuple:
    """The elements of a number tensor, the first element of a text tensor, or all bytes of a packed delta."""
    if code == "s":
        return data[at : at + size]
    if code:
        if size % width:
            raise WireError(f"{size} bytes are no numbers of {width}")
        return struct.unpack_from(f"<{size // width}{code}", data, at)
    if not size:
        return ""
    first = at + 4
    end = first + int.from_bytes(data[at:first], "little")
    if end > at + size:
        raise WireError(f"{size} bytes do not hold a text that says it ends after {end - at}")
    return data[first:end].decode()


def _delta(values: list) -> TokenDelta:
    """The delta of one response, values in the order of ``_SLOTS``."""
    if values[_PACKED]:
        return packed_delta.unpack(values[_PACKED])
    text_output, ids, log_probs, top_ids, top_values, reason_text = values[: _REASON + 1]
    top = _top_log_probs(len(log_probs or ids), top_ids, top_values) if top_ids else ()
    if not reason_text:
        echoed, generated = values[_INPUTS : _INPUTS + 2]
        prompt_ids = echoed[0] if echoed and not generated else 0
        return TokenDelta(text_output, ids, log_probs, None, "", None, None, "", top, None, prompt_ids)
    reason = _REASONS.get(reason_text)
    if reason is None:
        allowed = ", ".join(_REASONS)
        raise WireError(f"finish_reason: must be one of {allowed} or empty, got {reason_text!r}")
    stop_reason, error, inputs, outputs, cached, arrival, scheduled, first, last, stages = values[_REASON + 1 : _PACKED]
    usage = timings = None
    if inputs and outputs:
        if min(inputs[0], outputs[0], *cached[:1]) < 0:
            raise WireError(f"usage: must be 0 or more, got {inputs[0]} and {outputs[0]} tokens")
        usage = Usage(inputs[0], outputs[0], cached[0] if cached else 0)
    if arrival and scheduled and first and last and first[0]:
        timings = Timings(arrival[0], scheduled[0], first[0], last[0], *(stages if len(stages) == 3 else ()))
    return TokenDelta(text_output, ids, log_probs, reason, stop_reason, usage, timings, error, top)


def _top_log_probs(count: int, ids: tuple, log_probs: tuple) -> tuple[tuple[tuple[int, float], ...], ...]:
    """Pairs (id, log probability) for each of ``count`` log probabilities, out of two tensors of [count, k]."""
    if not count or len(ids) != len(log_probs) or len(ids) % count:
        raise WireError(f"top_log_probs: {len(ids)} ids and {len(log_probs)} values do not fit {count} new tokens")
    pairs, k = tuple(zip(ids, log_probs, strict=True)), len(ids) // count
    return tuple(pairs[at : at + k] for at in range(0, len(pairs), k))


def _is_final_flag(entry: bytes) -> bool:
    parts = dict(fields(entry))
    return parts.get(1) == b"triton_final_response" and dict(fields(parts.get(2, b""))).get(1) == 1


@lru_cache(maxsize=256)
def _read_output(data: bytes) -> _Output:
    """Read an InferOutputTensor; they are the same from one stream to the next."""
    parts = dict(fields(data))
    name, datatype = (parts.get(number, b"").decode() for number in (1, 2))
    slot = _SLOTS.get(name, -1)
    if slot < 0 or (datatype == "BYTES" and isinstance(_NOTHING[slot], str)):
        return _Output(slot, "", 4, None)
    if slot == _PACKED and datatype == "UINT8":
        return _Output(slot, "s", 0, None)
    kinds = ("FP32", "FP64") if name in _FRACTIONS else ("INT32", "INT64", "UINT32", "UINT64")
    if datatype not in kinds or not isinstance(_NOTHING[slot], tuple):
        raise WireError(f"{name}: the server sends it as {datatype}, not as the ensemble's contract has it")
    form = struct.Struct("<" + STRUCT_CODES[datatype])
    return _Output(slot, STRUCT_CODES[datatype], form.size, form.unpack_from)

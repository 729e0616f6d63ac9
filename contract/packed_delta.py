"""A TokenDelta as bytes: the output of the model ``ensemble_packed``.

A response of a Triton ensemble costs more with every output that a step maps, sent or not (benchmarks/LOG.md), so all
of them are packed into one, which our clients unpack. Little-endian: the numbers of ids and of bytes of text, UINT32
each; the ids, INT32; the text, UTF-8; then JSON of the other fields, if they say anything.
"""

from __future__ import annotations

import json
import struct
from dataclasses import astuple

from contract.generation import FinishReason, Timings, TokenDelta, Usage

MODEL, OUTPUT = "ensemble_packed", "packed_delta"
WATCH, WATCHED = "watch", "watched"  # of the step that looks for disconnected clients; of no use to them
METRIC = "trident_packed_ensemble"  # of a server that has the model
_HEAD = struct.Struct("<II")


def pack(delta: TokenDelta) -> bytes:
    """Return ``delta`` as bytes, without its sections, which no ensemble makes, and without timings of no token."""
    ids, text = delta.token_ids, delta.text.encode()
    data = struct.pack(f"<II{len(ids)}i", len(ids), len(text), *ids) + text
    reason, usage, timings = delta.finish_reason, delta.usage, delta.timings
    if reason is None and not (delta.log_probs or delta.top_log_probs or delta.prompt_ids):
        return data
    rest = (
        delta.log_probs,
        reason and reason.value,
        delta.stop_reason,
        usage and (usage.input_tokens, usage.output_tokens, usage.cached_tokens),
        astuple(timings) if timings and timings.first_token_ns else None,
        delta.error,
        delta.top_log_probs,
        delta.prompt_ids,
    )
    return data + json.dumps(rest, separators=(",", ":")).encode()


def unpack(data: bytes) -> TokenDelta:
    """Read what ``pack`` made. Raises ValueError, struct.error: the bytes are something else."""
    count, size = _HEAD.unpack_from(data)
    text_at = 8 + 4 * count
    end = text_at + size
    ids, text = struct.unpack_from(f"<{count}i", data, 8), data[text_at:end].decode()
    if end == len(data):
        return TokenDelta(text, ids)
    log_probs, reason, stop_reason, usage, timings, error, top, prompt_ids = json.loads(data[end:])
    return TokenDelta(
        text,
        ids,
        tuple(log_probs),
        FinishReason(reason) if reason else None,
        stop_reason,
        Usage(*usage) if usage else None,
        Timings(*timings) if timings else None,
        error,
        tuple(tuple((id, log_prob) for id, log_prob in position) for position in top),
        None,
        prompt_ids,
    )

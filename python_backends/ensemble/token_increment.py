"""What one response of an engine adds to a stream: the same type at the engine's and at the detokenizer's end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from python_backends.ensemble.stream_state import StreamState


class TopLogProbs(NamedTuple):
    """The likeliest ids at one position, likeliest first.

    ids: k token ids.
    log_probs: k natural log probabilities, of those ids.
    """

    ids: Sequence[int]
    log_probs: Sequence[float]


class TokenIncrement(NamedTuple):
    """One response of an engine.

    state: the stream it belongs to, and how that stands after this response.
    token_ids: ids since the stream's previous response; an echoed prompt's come first.
    log_probs: one per generated id of ``token_ids``, or empty if not requested.
    top_log_probs: one entry per generated id, or empty if not requested.
    cum_log_prob: sum over all ids generated so far; 0 if the engine does not send it.
    num_output_tokens: ids generated so far; 0 if the engine does not send it.
    options: StreamOptions as JSON, in a stream's first response only.
    error: ``errors.to_text`` of the failure, with the event ERROR only.
    """

    state: StreamState
    token_ids: Sequence[int]
    log_probs: Sequence[float] = ()
    top_log_probs: Sequence[TopLogProbs] = ()
    cum_log_prob: float = 0.0
    num_output_tokens: int = 0
    options: str = ""
    error: str = ""

"""The sanity prompt: ten seconds of greedy text that show whether an engine still speaks.

Averages over held-out text can look fair while generation is broken (a stuck token, a NaN after the first step), and
a reply that a person can read says more than a number. The engine is any function from ids to the next logits.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

PROMPT = "def read_json(path):\n    "
LIMIT_S = 10.0
STUCK_TOKENS = 16

NextLogits = Callable[[Sequence[int]], np.ndarray]


@dataclass(frozen=True)
class Reply:
    """ids: what was generated. failure: why it ended early, None when it did not."""

    ids: tuple[int, ...]
    failure: str | None = None


def speak(
    next_logits: NextLogits, prompt_ids: Sequence[int], *, max_tokens: int = 32, eos_token_ids: Sequence[int] = ()
) -> Reply:
    """Greedy tokens until max_tokens, an end id (not among them) or LIMIT_S. next_logits: ids so far -> f32[vocab]."""
    ids: list[int] = []
    started_s = time.monotonic()
    while len(ids) < max_tokens:
        logits = next_logits([*prompt_ids, *ids])
        if not np.isfinite(logits).all():
            return Reply(tuple(ids), f"logits are not finite after {len(ids)} tokens")
        token = int(logits.argmax())
        if token in eos_token_ids:
            break
        ids.append(token)
        if time.monotonic() - started_s > LIMIT_S:
            break
    return Reply(tuple(ids))


def problem(reply: Reply, reference: Reply) -> str | None:
    """What is wrong with a reply, or None: a small model may repeat itself where the reference does too."""
    if reply.failure is not None:
        return reply.failure
    if not reply.ids and reference.ids:
        return "the engine says nothing where the reference does"
    if _is_stuck(reply.ids) and not _is_stuck(reference.ids):
        return f"the engine repeats token {reply.ids[-1]} where the reference does not"
    return None


def _is_stuck(ids: Sequence[int]) -> bool:
    return len(ids) >= STUCK_TOKENS and len(set(ids[-STUCK_TOKENS:])) == 1

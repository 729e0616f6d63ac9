"""A vocabulary of single characters and whole markers, and outputs written in it."""

from __future__ import annotations

from collections.abc import Sequence

from contract.generation import FinishReason, TokenDelta, Usage

MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|python_tag|>", "<|eom_id|>")
FIRST = 0x110000  # id of the first marker; below, an id is the character's number


class Letters:
    """special: the markers that are special tokens. tokens: those that are tokens at all."""

    known = True

    def __init__(self, special: Sequence[str] = (), tokens: Sequence[str] = MARKERS) -> None:
        self._tokens = {text: FIRST + number for number, text in enumerate(MARKERS) if text in tokens}
        self.special = frozenset(self._tokens[text] for text in special)

    def id(self, text: str) -> int | None:
        return self._tokens.get(text)

    def token(self, token_id: int) -> tuple[str, list[int] | None]:
        return (MARKERS[token_id - FIRST] if token_id >= FIRST else chr(token_id)), None

    def ids(self, pieces: Sequence[str]) -> list[int]:
        """The ids of an output: a piece that is a marker is its token if there is one, other text is spelled."""
        found: list[int] = []
        for piece in pieces:
            token = self.id(piece)
            found += [token] if token is not None else map(ord, piece)
        return found

    def text(self, token_id: int, skip_special: bool) -> str:
        return "" if skip_special and token_id in self.special else self.token(token_id)[0]


def deltas(
    letters: Letters,
    ids: Sequence[int],
    splits: Sequence[int],
    *,
    lag: int = 0,
    skip_special: bool = True,
    end: FinishReason = FinishReason.STOP,
) -> list[TokenDelta]:
    """An output in deltas that end after ``splits`` ids; the text follows its ids by ``lag`` characters."""
    cuts = sorted({min(split, len(ids)) for split in splits} | {len(ids)})
    text = "".join(letters.text(one, skip_special) for one in ids)
    found, at, shown = [], 0, 0
    for cut in cuts:
        last = cut == len(ids)
        upto = len("".join(letters.text(one, skip_special) for one in ids[:cut]))
        upto = len(text) if last else max(shown, upto - lag)
        usage = Usage(1, len(ids)) if last else None
        found.append(TokenDelta(text[shown:upto], tuple(ids[at:cut]), finish_reason=end if last else None, usage=usage))
        at, shown = cut, upto
    return found

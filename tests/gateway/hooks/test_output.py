"""Outputs through filters: sections stay in order, whatever is kept back and however the output is divided."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from contract.generation import FinishReason, Sections, TokenDelta, ToolCallDelta
from gateway.hooks.call import Call
from gateway.hooks.hook import HookFailed
from gateway.hooks.output import ChoiceOutput

CALL = Call("r", "t", "http", "chat", {})


class Late:
    """Keeps so many characters back, and puts the kind of the section around the whole."""

    def __init__(self, part: str, keeps: int) -> None:
        self.kept, self.part, self.keeps = f"<{part[0]}:", part, keeps

    def feed(self, text: str) -> str:
        text = self.kept + text
        cut = max(0, len(text) - self.keeps)
        self.kept = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        return self.kept + ">"


class Direct:
    """A hook whose methods are called at once. fails_after: so many calls of ``feed``."""

    def __init__(self, keeps: int = 3, fails_after: int = 1_000_000) -> None:
        self.keeps, self.left = keeps, fails_after

    async def call(self, method, *arguments, of=None, check=lambda value: value):
        if method == "output":
            return check(Late(arguments[0], self.keeps))
        self.left -= method == "feed"
        if self.left < 0:
            raise HookFailed
        return check(getattr(of, method)(*arguments))


def deltas(parts, splits) -> list[TokenDelta]:
    """An output of (kind, text) as deltas, each text divided by ``splits``."""
    found, calls = [], -1
    for kind, text in parts:
        size = next(splits)
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        calls += kind == "call"
        for n, piece in enumerate(pieces):
            part = ToolCallDelta(calls, "" if n else f"id{calls}", "" if n else "f", piece) if kind == "call" else piece
            sections = Sections(
                piece if kind == "reasoning" else "", (part,) if kind == "call" else (), ((kind, part),)
            )
            found.append(TokenDelta(piece if kind == "text" else "", sections=None if kind == "text" else sections))
            found.append(TokenDelta())  # nothing is known of the next section yet
    return [*found, TokenDelta(finish_reason=FinishReason.STOP)]


def shown(found: list[TokenDelta]) -> list[tuple[str, str]]:
    """The sections in order, as a reader of the parts sees them."""
    sections: list[list[str]] = []
    for delta in found:
        for kind, part in delta.parts:
            text = part.arguments if isinstance(part, ToolCallDelta) else part
            key = f"call{part.index}" if isinstance(part, ToolCallDelta) else kind
            if not part:
                continue
            if sections and sections[-1][0] == key:
                sections[-1][1] += text
            else:
                sections.append([key, text])
    return [(kind, text) for kind, text in sections]


async def changed(hooks, found: list[TokenDelta]) -> list[TokenDelta]:
    output = ChoiceOutput(hooks, CALL)
    return [await output.changed(delta) for delta in found]


PARTS = st.lists(st.tuples(st.sampled_from(["text", "reasoning", "call"]), st.text("abc", min_size=1)), max_size=5)


@given(PARTS, st.lists(st.integers(1, 4), min_size=5, max_size=5))
async def test_sections_are_whole_and_in_order(parts, sizes):
    found = deltas(parts, iter(sizes))
    expected = [(key, f"<{'a' if key.startswith('call') else key[0]}:{text}>") for key, text in shown(found)]
    after = await changed([Direct()], found)
    assert shown(after) == expected and len(after) == len(found)


async def test_hooks_follow_each_other():
    found = await changed([Direct(1), Direct(2)], [TokenDelta("ab"), TokenDelta("c", finish_reason=FinishReason.STOP)])
    assert "".join(delta.text for delta in found) == "<t:<t:abc>>"


async def test_a_filter_that_fails_gives_what_it_kept_where_that_is_known():
    class Plain(Late):
        def __init__(self) -> None:
            super().__init__("text", 2)
            self.kept = ""

    class Failing(Direct):
        async def call(self, method, *arguments, of=None, check=lambda value: value):
            return Plain() if method == "output" else await super().call(method, *arguments, of=of, check=check)

    found = await changed(
        [Failing(fails_after=2)], [TokenDelta("ab"), TokenDelta("cd"), TokenDelta("ef"), TokenDelta("gh")]
    )
    assert "".join(delta.text for delta in found) == "abcdefgh"

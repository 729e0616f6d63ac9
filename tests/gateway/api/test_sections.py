"""The choices of a response are cut each by itself, and their calls have ids that a replay repeats."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import pytest

from contract.generation import FinishReason, TokenDelta
from gateway.api.sections import ChoiceCutters, CutDeltas
from gateway.api.vocabulary import Vocabulary
from gateway.choices import ChoiceDelta
from gateway.tools.chat_format import HERMES, MISTRAL, ChatFormat
from gateway.tools.cutter import CutterRules

CALL = '<tool_call>{"name": "f"}</tool_call>'
END = TokenDelta(token_ids=(9,), finish_reason=FinishReason.STOP)


def items(*texts: str) -> list[ChoiceDelta]:
    deltas = [ChoiceDelta(choice, TokenDelta(text, (choice,))) for choice, text in enumerate(texts)]
    return [*deltas, *(ChoiceDelta(choice, END) for choice in range(len(texts)))]


async def cut(found: Sequence[ChoiceDelta], form: str = HERMES, response_id: str = "r") -> dict[int, list[TokenDelta]]:
    closed = []

    async def source() -> AsyncGenerator[ChoiceDelta, None]:
        try:
            for item in found:
                yield item
        finally:
            closed.append(True)

    cutters = ChoiceCutters(CutterRules(ChatFormat(form), ("f",)), Vocabulary(), response_id)
    deltas = CutDeltas(source(), cutters)
    by_choice: dict[int, list[TokenDelta]] = {}
    async for choice, delta in deltas:
        by_choice.setdefault(choice, []).append(delta)
    await deltas.aclose()
    assert closed == [True]
    return by_choice


def ids(deltas: Sequence[TokenDelta]) -> list[str]:
    return [call.id for delta in deltas if delta.sections for call in delta.sections.tool_calls if call.id]


async def test_each_choice_has_its_own_calls() -> None:
    found = await cut(items(CALL, "text", CALL + CALL))
    assert [len(ids(found[choice])) for choice in range(3)] == [1, 0, 2]
    assert "".join(delta.text for delta in found[1]) == "text"
    everything = ids(found[0]) + ids(found[2])
    assert len(set(everything)) == 3 and all(one.startswith("call_") for one in everything)


async def test_the_same_response_has_the_same_ids_and_another_has_others() -> None:
    first, again, other = [ids((await cut(items(CALL), response_id=one))[0]) for one in "rrs"]
    assert first == again != other


async def test_ids_suit_mistrals_template() -> None:
    [found] = ids((await cut(items('[TOOL_CALLS][{"name": "f"}]'), MISTRAL))[0])
    assert len(found) == 9 and found.isalnum()


async def test_closing_closes_deltas_that_were_never_read() -> None:
    async def source() -> AsyncGenerator[ChoiceDelta, None]:
        yield ChoiceDelta(0, END)

    deltas = source()
    await CutDeltas(deltas, ChoiceCutters(CutterRules(ChatFormat(), ("f",)), Vocabulary(), "r")).aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(deltas)

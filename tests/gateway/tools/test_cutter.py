"""Whatever the splits, the parts of an output are the same; sections begin and end at their tokens."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from contract.generation import FinishReason, Sections, TokenDelta, ToolCallDelta
from gateway.choices import ChoiceDelta
from gateway.tools.chat_format import HERMES, LLAMA3, MISTRAL, OPEN, TAGGED, ChatFormat
from gateway.tools.cutter import ChoiceCutters, CutDeltas, Cutter, CutterRules
from gateway.tools.vocabulary import Vocabulary
from tests.gateway.tools.letters import MARKERS, Letters, deltas

CALL, END, THINK, END_THINK, CALLS, PYTHON, EOM = MARKERS
BOTH = CutterRules(ChatFormat(HERMES, TAGGED), ("f", "g"), reasoning=True)
LLAMA = CutterRules(ChatFormat(LLAMA3), ("f", "g"), drops_special=True)
MISTRAL_RULES = CutterRules(ChatFormat(MISTRAL), ("f", "g"), drops_special=True)
LETTERS = Letters()
SPECIAL = Letters(special=(CALLS, PYTHON, EOM))


def call(name: str = "f", arguments: Any = None, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: {} if arguments is None else arguments})


def joined(parts: Sequence[TokenDelta]) -> dict[str, Any]:
    """What the deltas of one output add up to, as OpenAI's clients add them."""
    calls: dict[int, list[str]] = {}
    for part in parts:
        for one in part.sections.tool_calls if part.sections else ():
            if one.index not in calls:
                assert one.id == f"id{one.index}" and one.name, "the first delta of a call names it"
                calls[one.index] = [one.name, one.arguments]
            else:
                assert not one.id and not one.name
                calls[one.index][1] += one.arguments
    assert list(calls) == list(range(len(calls)))
    usage = parts[-1].usage
    return {
        "text": "".join(part.text for part in parts),
        "reasoning": "".join(part.sections.reasoning for part in parts if part.sections),
        "calls": [tuple(one) for one in calls.values()],
        "reasoning_tokens": usage.reasoning_tokens if usage else 0,
    }


def cut(
    pieces: Sequence[str],
    rules: CutterRules = BOTH,
    letters: Letters = LETTERS,
    splits: Sequence[int] = (),
    lag: int = 0,
    end: FinishReason = FinishReason.STOP,
) -> dict[str, Any]:
    cutter = Cutter(rules, letters, "id{}".format)
    ids = letters.ids(pieces)
    found = deltas(letters, ids, splits, lag=lag, skip_special=not rules.drops_special, end=end)
    return joined([cutter.feed(delta) for delta in found])


def parts(text: str = "", calls: Sequence[tuple[str, str]] = (), reasoning: str = "", tokens: int = 0) -> dict:
    return {"text": text, "reasoning": reasoning, "calls": list(calls), "reasoning_tokens": tokens}


@pytest.mark.parametrize("form", [TAGGED, OPEN])
@given(at=st.integers(0, 18))
def test_an_output_that_goes_on_is_cut_as_the_whole_one_is(form: str, at: int) -> None:
    pieces = ["\nw y", END_THINK, "\n\ns o", THINK, " m e", END_THINK]
    pieces = [THINK, *pieces] if form == TAGGED else pieces
    ids = LETTERS.ids(pieces)
    before, after = ids[:at], ids[at:]
    rules = CutterRules(ChatFormat(HERMES, form), reasoning=True)
    first, rest, whole = (
        joined([Cutter(one, LETTERS, str).feed(delta) for delta in deltas(LETTERS, some, ())])
        for one, some in ((rules, before), (dataclasses.replace(rules, begun=tuple(before)), after), (rules, ids))
    )
    for name in ("text", "reasoning"):
        # Blanks at the end of what came first are left out of both.
        assert "".join((first[name] + rest[name]).split()) == "".join(whole[name].split())
    assert rest["reasoning_tokens"] == whole["reasoning_tokens"]


def test_blanks_in_the_middle_of_a_section_that_goes_on_stay() -> None:
    for before, reasoning, text in (("w", " y", ""), ("w" + END_THINK, "", "y"), ("w" + END_THINK + "s", "", " y")):
        ids = LETTERS.ids([*before.partition(END_THINK)])
        rules = CutterRules(ChatFormat(HERMES, OPEN), reasoning=True, begun=tuple(ids))
        found = cut([" y"], rules)
        assert (found["reasoning"], found["text"]) == (reasoning, text)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["Hello \n"], parts("Hello \n")),
        ([CALL, "\n", call(), "\n", END], parts("", [("f", "{}")])),
        (["Wait.\n", CALL, call("f", {"x": [1, {"y": "}"}]}), END], parts("Wait.", [("f", '{"x": [1, {"y": "}"}]}')])),
        (
            [CALL, call("f", {"a": 1}), END, "\n", CALL, call("g", {"b": 2}), END],
            parts("", [("f", '{"a": 1}'), ("g", '{"b": 2}')]),
        ),
        ([CALL, call(), END, " done\n"], parts("done\n", [("f", "{}")])),
        # Keys in another order, other keys, no arguments, arguments as a string.
        ([CALL, '{"arguments": {"x": 1}, "id": [{}], "name": "f"}', END], parts("", [("f", '{"x": 1}')])),
        ([CALL, '{"name": "f"}', END], parts("", [("f", "{}")])),
        ([CALL, '{"name": "f", "arguments": null}', END], parts("", [("f", "{}")])),
        ([CALL, '{"name": "f", "arguments": "{\\"x\\": 1}"}', END], parts("", [("f", '{"x": 1}')])),
        (
            [CALL, '{"name": "f", "arguments":  { "x" : "\\u00e9\\"" } }', END],
            parts("", [("f", '{ "x" : "\\u00e9\\"" }')]),
        ),
        # The blanks before a section, else the first one after it, stay between two texts.
        (["Hi ", CALL, call(), END, "\nbye"], parts("Hi bye", [("f", "{}")])),
        (["Hi", CALL, call(), END, "\n", CALL, call(), END, " bye"], parts("Hi\nbye", [("f", "{}")] * 2)),
        (["Hi", CALL, call(), END, "bye"], parts("Hibye", [("f", "{}")])),
        ([" \n", CALL, call(), END, " bye"], parts("bye", [("f", "{}")])),
        (["Hi ", CALL, "no", END, " x"], parts(f"Hi {CALL}no{END} x")),
        (["Hi\n", THINK, " why ", END_THINK, "\nbye"], parts("Hi\nbye", (), "why", 6)),
        # What is no call is text, markers included.
        ([CALL, "no", END, " x"], parts(f"{CALL}no{END} x")),
        ([CALL, '{"x": 1}', END], parts(f'{CALL}{{"x": 1}}{END}')),
        ([CALL, " ", END], parts(f"{CALL} {END}")),
        ([CALL], parts(CALL)),
        (["a", END, "b"], parts(f"a{END}b")),
        # Markers that are spelled by other tokens, as in a quotation, are text.
        (["Write <tool_ca", "ll> first"], parts("Write <tool_call> first")),
        (
            [CALL, '{"name": "f", "arguments": {"x": "</tool', '_call>"}}', END],
            parts("", [("f", '{"x": "</tool_call>"}')]),
        ),
        # Reasoning.
        ([THINK, "\nwhy\n", END_THINK, "\n\nso"], parts("so", (), "why", 6)),
        ([THINK, "a", CALL, "b", END_THINK, CALL, call(), END], parts("", [("f", "{}")], f"a{CALL}b", 4)),
        ([THINK, "cut"], parts("", (), "cut", 3)),
        (["a", END_THINK, "b"], parts(f"a{END_THINK}b")),
        ([THINK, END_THINK, "x"], parts("x", (), "", 1)),
    ],
)
def test_an_output_has_text_calls_and_reasoning(pieces: list[str], expected: dict[str, Any]) -> None:
    assert cut(pieces) == expected
    assert cut(pieces, splits=range(1000)) == expected


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([call("f", {"x": 1}, "parameters")], parts("", [("f", '{"x": 1}')])),
        ([" ", call("f", {}, "parameters"), "; ", call("g", {}, "parameters")], parts("", [("f", "{}"), ("g", "{}")])),
        ([PYTHON, call("f", {}, "parameters"), EOM], parts("", [("f", "{}")])),
        ([PYTHON, "print(1)", EOM], parts(f"{PYTHON}print(1)")),
        ([' {"answer": 1}'], parts(' {"answer": 1}')),
        ([call("undeclared")], parts(call("undeclared"))),
        ([" {"], parts(" {")),
        (["See ", call("f")], parts("See " + call("f"))),
        (["a", EOM, "b"], parts("ab")),
    ],
)
def test_llama_writes_bare_objects_or_a_tag_before_them(pieces: list[str], expected: dict[str, Any]) -> None:
    assert cut(pieces, LLAMA, SPECIAL) == expected
    assert cut(pieces, LLAMA, SPECIAL, splits=range(1000)) == expected


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([CALLS, "[", call("f", {"x": 1}), ", ", call("g"), "]"], parts("", [("f", '{"x": 1}'), ("g", "{}")])),
        (["Hm ", CALLS, " ", call("f")], parts("Hm", [("f", "{}")])),
        ([CALLS, "[]"], parts(f"{CALLS}[]")),
        (["[TOOL_", "CALLS]"], parts("[TOOL_CALLS]")),
    ],
)
def test_mistral_writes_a_list_after_its_token(pieces: list[str], expected: dict[str, Any]) -> None:
    assert cut(pieces, MISTRAL_RULES, SPECIAL) == expected
    assert cut(pieces, MISTRAL_RULES, SPECIAL, splits=range(1000)) == expected


def test_markers_without_a_token_are_found_in_the_text() -> None:
    spelled = Letters(tokens=())
    pieces = [THINK, "why", END_THINK, CALL, call("f", {"x": CALL + END}), END]
    for splits in ((), range(1000)):
        found = cut(pieces, letters=spelled, splits=splits)
        assert found["calls"] == [("f", json.dumps({"x": CALL + END}))]
        assert (found["text"], found["reasoning"]) == ("", "why")
        assert found["reasoning_tokens"] == len("why") + len(END_THINK)


def test_under_a_guide_a_spelled_marker_begins_a_call_and_one_in_a_string_ends_none() -> None:
    rules = CutterRules(ChatFormat(HERMES), ("f",), guided=True)
    arguments = '{"x": "'
    pieces = ["<tool", "_call>", f'{{"name": "f", "arguments": {arguments}', END, CALL, '"}}', END]
    assert cut(pieces, rules)["calls"] == [("f", f'{arguments}{END}{CALL}"}}')]
    # Without one the model's own token ends the call, whatever it has forgotten to close.
    pieces = [CALL, f'{{"name": "f", "arguments": {arguments}', END, "x", CALL, call("g"), END]
    assert cut(pieces) == parts("x", [("f", arguments), ("g", "{}")])


def test_a_prompt_that_ends_inside_the_reasoning_has_no_tag_in_the_output() -> None:
    rules = CutterRules(ChatFormat(HERMES, OPEN), reasoning=True)
    assert cut(["\nwhy", END_THINK, "so"], rules) == parts("so", (), "why", 5)


def test_without_tools_calls_are_text_and_without_a_vocabulary_reasoning_is_still_counted() -> None:
    assert cut([CALL, call(), END], CutterRules(ChatFormat(HERMES), reasoning=True)) == parts(CALL + call() + END)
    unknown = Letters(tokens=())
    unknown.known = False
    pieces = [THINK, "why", END_THINK, "so"]  # 20 ids of a character each, as many as the text has
    for splits in ((), range(1000)):
        assert cut(pieces, letters=unknown, splits=splits)["reasoning_tokens"] == 3


def test_without_parallel_calls_the_first_is_the_only_one() -> None:
    rules = CutterRules(ChatFormat(HERMES), ("f", "g"), parallel=False)
    assert cut([CALL, call(), END, CALL, call("g"), END], rules)["calls"] == [("f", "{}")]


def test_what_an_upstream_has_cut_passes_unchanged() -> None:
    for first in (TokenDelta(CALL), TokenDelta(sections=Sections(tool_calls=(ToolCallDelta(0, "a", "f"),)))):
        cutter = Cutter(BOTH, LETTERS, str)
        assert cutter.feed(first) is first
        end = TokenDelta(finish_reason=FinishReason.STOP)
        assert cutter.feed(end) is end


@pytest.mark.parametrize("rest", ["</tool", f"{END}\n<tool_c", f"{END}\n", "\n"])
def test_a_marker_that_the_limit_cuts_after_a_call_is_no_text(rest: str) -> None:
    for splits in ((), range(1000)):
        pieces = [CALL, call(), *(piece for piece in rest.partition(END) if piece)]
        assert cut(pieces, splits=splits, end=FinishReason.LENGTH) == parts("", [("f", "{}")])
    assert cut([CALL, call(), END, "a <tool"], end=FinishReason.LENGTH)["text"] == "a <tool"


def test_arguments_are_sent_as_they_come() -> None:
    cutter = Cutter(BOTH, LETTERS, str)
    ids = LETTERS.ids([CALL, call("f", {"x": "abc"}), END])
    sent = [cutter.feed(delta) for delta in deltas(LETTERS, ids, range(1000))]
    pieces = [one for delta in sent if delta.sections for one in delta.sections.tool_calls]
    assert pieces[0] == ToolCallDelta(0, "0", "f", "") and len(pieces) > 8


_PIECE = st.sampled_from(
    [*MARKERS, call(), call("g", {"x": '<tool_call>\n\\"}'}), "\n", " ", "{", '"', "text", "<tool"]
)
_RULES = [BOTH, LLAMA, MISTRAL_RULES, CutterRules(ChatFormat(HERMES, OPEN), ("f",), False, True, True)]


@given(
    st.lists(_PIECE | st.text(max_size=5), max_size=12),
    st.lists(st.integers(0, 200), max_size=40),
    st.integers(0, 6),
    st.sampled_from(_RULES),
    st.sampled_from([LETTERS, SPECIAL, Letters(tokens=())]),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
@example([CALL, call(), END], [1, 5, 9], 3, BOTH, LETTERS, FinishReason.STOP)
def test_streamed_equals_whole(
    pieces: list[str], splits: list[int], lag: int, rules: CutterRules, letters: Letters, end: FinishReason
) -> None:
    whole = cut(pieces, rules, letters, end=end)
    assert cut(pieces, rules, letters, splits, lag, end) == whole
    if not any(piece in MARKERS for piece in pieces) and "{" not in "".join(pieces) and letters is LETTERS:
        if rules is BOTH:
            assert whole["text"] == "".join(pieces)


# The choices of a response are cut each by itself, and their calls have ids that a replay repeats.
A_CALL = '<tool_call>{"name": "f"}</tool_call>'
LAST = TokenDelta(token_ids=(9,), finish_reason=FinishReason.STOP)


def items(*texts: str) -> list[ChoiceDelta]:
    deltas = [ChoiceDelta(choice, TokenDelta(text, (choice,))) for choice, text in enumerate(texts)]
    return [*deltas, *(ChoiceDelta(choice, LAST) for choice in range(len(texts)))]


async def cut_choices(
    found: Sequence[ChoiceDelta], form: str = HERMES, response_id: str = "r"
) -> dict[int, list[TokenDelta]]:
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
    found = await cut_choices(items(A_CALL, "text", A_CALL + A_CALL))
    assert [len(ids(found[choice])) for choice in range(3)] == [1, 0, 2]
    assert "".join(delta.text for delta in found[1]) == "text"
    everything = ids(found[0]) + ids(found[2])
    assert len(set(everything)) == 3 and all(one.startswith("call_") for one in everything)


async def test_the_same_response_has_the_same_ids_and_another_has_others() -> None:
    first, again, other = [ids((await cut_choices(items(A_CALL), response_id=one))[0]) for one in "rrs"]
    assert first == again != other


async def test_ids_suit_mistrals_template() -> None:
    [found] = ids((await cut_choices(items('[TOOL_CALLS][{"name": "f"}]'), MISTRAL))[0])
    assert len(found) == 9 and found.isalnum()


async def test_closing_closes_deltas_that_were_never_read() -> None:
    async def source() -> AsyncGenerator[ChoiceDelta, None]:
        yield ChoiceDelta(0, LAST)

    deltas = source()
    await CutDeltas(deltas, ChoiceCutters(CutterRules(ChatFormat(), ("f",)), Vocabulary(), "r")).aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(deltas)

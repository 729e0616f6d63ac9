"""Token ids to text, increment by increment.

For every sequence of ids and every way to cut it into increments, the texts of a :class:`Stream` joined are byte for
byte what the ``tokenizers`` library's ``Tokenizer.decode`` returns for all ids at once. No later id changes text that
was returned, so it holds neither half a character nor a U+FFFD that the whole text does not have at that position. The
work per id does not depend on what was decoded before. docs/decisions/0020 compares the library's ``DecodeStream``.

An id is looked up in a :class:`_TokenTable` (filled as ids are seen, so that a vocabulary of 150,000 costs nothing at
load); the token stages and the join of ``stages.py`` make text of it, and the text stages finish the text.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders

from contract.errors import InvalidArgument, NotFound
from python_backends.detokenizer import stages

SUPPORTED_DECODERS = ("ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Sequence", "Strip")

_Step = dict[str, Any]  # a decoder as tokenizer.json writes it


class Decoding:
    """How one tokenizer turns ids into text. Made once at load, shared by all streams and threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises InvalidArgument: the tokenizer's decoder is not supported."""
        self._tokenizer = tokenizer
        self._special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        if tokenizer.decoder is None:
            raise _unsupported("no decoder")
        try:
            specification = json.loads(tokenizer.decoder.__getstate__())  # as ``tokenizer.json`` writes it
        except Exception as exc:  # the library raises nothing narrower
            raise _unsupported("a decoder written in Python") from exc
        self._plan = _Plan(_steps(specification))
        self._tables: dict[tuple[bool, bool], _TokenTable] = {}

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer | str | os.PathLike[str]) -> Decoding:
        """Make the decoding of a Tokenizer, a ``tokenizer.json``, or the folder of one.
        Raises NotFound: there is no such file.
        Raises InvalidArgument: the file cannot be read, or its decoder is not supported.
        """
        return cls(tokenizer if isinstance(tokenizer, Tokenizer) else _load(Path(tokenizer)))

    def open(self, skip_special_tokens: bool = True) -> Stream:
        """Return a new stream of text, to be used by one thread at a time."""
        return Stream(self, self._plan, skip_special_tokens)

    def special(self, token_id: int) -> str:
        """Return a special token's own text, empty for any other id."""
        token = self._tokenizer.id_to_token(token_id)
        return token if token in self._special else ""

    def bytes_of(self, token_id: int) -> bytes:
        """Return what an id adds within a text, which may be a part of a character; empty for an unknown id."""
        token = self.table(False, first=False)[token_id]
        if not isinstance(token, str):
            return token or b""
        if token in stages.BYTE_TOKENS and stages.ByteRuns in self._plan.token_stages:
            return bytes([stages.BYTE_TOKENS[token]])
        for make in self._plan.text_stages:
            if isinstance(stage := make(), stages.Substitute):
                token = stage.feed(token) + stage.finish()
        return token.encode()

    def table(self, skip_special_tokens: bool, first: bool) -> _TokenTable:
        """Return the decoded token of each id, as the first token of the text or as a later one."""
        key = (skip_special_tokens, first)
        if key not in self._tables:
            skipped = self._special if skip_special_tokens else set()
            self._tables[key] = _TokenTable(self._tokenizer, skipped, self._plan, first)
        return self._tables[key]


class _Plan:
    """A compiled decoder.

    each: steps on one token, in order; their result is kept per id.
    byte_level: the tokens are bytes for the ``Utf8`` join.
    token_stages, join, text_stages: constructors of the stages after these, in order; each stream has its own.
    first_differs: the first token of a text is decoded differently.
    """

    def __init__(self, steps: Sequence[_Step]) -> None:
        self.each: list[stages.Each] = []
        self.byte_level = False
        self.token_stages: list[Callable[[], stages.Stage[list[str]]]] = []
        self.join: Callable[[], stages.Concat | stages.Utf8] = stages.Concat
        self.text_stages: list[Callable[[], stages.Stage[str]]] = []
        joined_by = ""
        for step in steps:
            kind = step["type"]
            if joined_by:
                self.text_stages += _text_stages(step, joined_by)
            elif kind == "ByteLevel":
                if self.token_stages:
                    raise _unsupported("ByteLevel after ByteFallback")
                joined_by, self.byte_level, self.join = kind, True, stages.Utf8
            elif kind == "Fuse":
                joined_by = kind
            elif kind == "ByteFallback":
                self.token_stages.append(stages.ByteRuns)
            elif self.token_stages:
                self.token_stages.append(partial(stages.EachInTurn, _each(step)))
            else:
                self.each.append(_each(step))
        self.first_differs = any(step["type"] == "Metaspace" for step in steps[: len(self.each)])

    def decode(self, token: str, first: bool) -> str | bytes:
        for each in self.each:
            token = each(token, first)
        return stages.byte_level(token) if self.byte_level else token


class _TokenTable(dict[int, "str | bytes | None"]):
    """id -> the token after the plan's ``each`` steps; None for an id that gives no token. Filled on first use. Ids
    outside the vocabulary are not kept, so that the table never outgrows the vocabulary."""

    def __init__(self, tokenizer: Tokenizer, skipped: set[str], plan: _Plan, first: bool) -> None:
        self._tokenizer, self._skipped, self._plan, self._first = tokenizer, skipped, plan, first

    def __missing__(self, token_id: int) -> str | bytes | None:
        try:
            token = self._tokenizer.id_to_token(token_id)
        except OverflowError:  # negative, or more than 32 bits
            return None
        if token is None:
            return None
        decoded = None if token in self._skipped else self._plan.decode(token, self._first)
        self[int(token_id)] = decoded
        return decoded


class Stream:
    """The growing text of one sequence of ids.

    draft: text, in parts, that the ids so far spell but a later id may change: the characters of a run of byte tokens
        (see ``stages.ByteRuns``). If the ids ended here it would be the end of the text. ``feed`` returns it once it is
        decided; until then a stop string may be looked for in it.
    """

    def __init__(self, decoding: Decoding, plan: _Plan, skip_special_tokens: bool) -> None:
        self._table = decoding.table(skip_special_tokens, first=False)
        self._first_table = decoding.table(skip_special_tokens, first=True) if plan.first_differs else self._table
        self._at_start = plan.first_differs
        self._token_stages = [make() for make in plan.token_stages]
        self._join: Any = plan.join()
        self._text_stages = [make() for make in plan.text_stages]
        last_stage = self._token_stages[-1] if self._token_stages else None
        self._runs = last_stage if isinstance(last_stage, stages.ByteRuns) else None
        self._draft_stages: list[stages.Stage[str]] = []  # the text stages as the undecided run leaves them
        self._drafted = 0  # parts of the run's draft
        self.draft: list[str] = []

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that is decided by these ids, possibly empty."""
        table = self._table
        tokens: list[Any] = [token for token_id in token_ids if (token := table[token_id]) is not None]
        if self._at_start and tokens:
            tokens[0] = self._first_table[next(token_id for token_id in token_ids if table[token_id] is not None)]
            self._at_start = False
        for token_stage in self._token_stages:
            tokens = token_stage.feed(tokens)
        text: str = self._join.feed(tokens)
        for text_stage in self._text_stages:
            text = text_stage.feed(text)
        if self._runs is not None and (self.draft or self._runs.draft):
            self._update_draft(self._runs.draft, decided=bool(tokens))
        return text

    def finish(self) -> str:
        """Return the rest of the text after the last id. Do not feed the stream afterwards."""
        tokens: list[Any] = []
        for token_stage in self._token_stages:
            tokens = token_stage.feed(tokens) + token_stage.finish()
        text: str = self._join.feed(tokens) + self._join.finish()
        for text_stage in self._text_stages:
            text = text_stage.feed(text) + text_stage.finish()
        self.draft = []
        return text

    def _update_draft(self, parts: list[str], decided: bool) -> None:
        if decided or not self.draft:
            # A run that is open now began with this feed, after text that has passed the text stages.
            self._draft_stages = [copy.copy(stage) for stage in self._text_stages]
            self._drafted, self.draft = 0, []
        for text in parts[self._drafted :]:
            for stage in self._draft_stages:
                text = stage.feed(text)
            if text:
                self.draft.append(text)
        self._drafted = len(parts)


def _text_stages(step: _Step, joined_by: str) -> list[Callable[[], stages.Stage[str]]]:
    """Return the stages of a decoder that follows Fuse or ByteLevel: the whole text is its only token."""
    match step:
        case {"type": "Fuse"}:
            return []
        case {"type": "Strip", "content": content, "start": start, "stop": stop}:
            return [lambda: stages.StripText(content, start, stop)]
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if pattern:
            return [lambda: stages.Substitute(pattern, content)]
        case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
            content = " " if scheme == "never" else ""
            return [lambda: stages.Substitute(mark, content)]
        case {"type": "Replace"}:
            raise _unsupported(f"Replace with a regular expression after {joined_by}")
        case {"type": kind} if kind in SUPPORTED_DECODERS:
            raise _unsupported(f"{kind} after {joined_by}")
    raise _unsupported(step["type"])


def _each(step: _Step) -> stages.Each:
    match step:
        case {"type": "Strip", "content": content, "start": start, "stop": stop}:
            return stages.strip_each(content, start, stop)
        case {"type": "Replace"}:
            replace = _replace(step).decode
            return lambda token, first: replace([token])
        case {"type": "Metaspace", **options}:
            return stages.metaspace(decoders.Metaspace(**options).decode)
    raise _unsupported(step["type"])


def _replace(step: _Step) -> decoders.Decoder:
    match step["pattern"]:
        case {"Regex": pattern}:
            return decoders.Replace(Regex(pattern), step["content"])
        case {"String": pattern}:
            return decoders.Replace(pattern, step["content"])
    raise _unsupported(f"Replace with the pattern {step['pattern']!r}")


def _steps(specification: _Step) -> list[_Step]:
    """Return the decoders of a Sequence in order, those of nested Sequences included."""
    if specification["type"] == "Sequence":
        return [step for inner in specification["decoders"] for step in _steps(inner)]
    return [specification]


def _unsupported(name: object) -> InvalidArgument:
    return InvalidArgument("decoder", f"must be made of {', '.join(SUPPORTED_DECODERS)}, got {name}")


def _load(path: Path) -> Tokenizer:
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise NotFound(f"tokenizer: there is no file {path}")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as exc:  # the library raises nothing narrower, and does not name a decoder it does not know
        raise _unreadable(path, exc) from exc


def _unreadable(path: Path, problem: Exception) -> InvalidArgument:
    try:
        steps = _steps(json.loads(path.read_text(encoding="utf-8"))["decoder"])
        unknown = [step["type"] for step in steps if step["type"] not in SUPPORTED_DECODERS]
    except (ValueError, KeyError, TypeError):
        unknown = []
    if unknown:
        return _unsupported(unknown[0])
    return InvalidArgument("tokenizer", f"{path} must be a file of the tokenizers library, got: {problem}")

"""Token ids to text, piece by piece.

For every sequence of ids and every way to cut it into chunks, the pieces of a :class:`Stream` joined are byte for
byte what the ``tokenizers`` library's ``Tokenizer.decode`` makes of all ids at once. A piece is text that no later
id can change, so it holds neither half a character nor a U+FFFD that the whole text does not have at that place.
The work per id does not depend on what was decoded before.

The life of an id: it is looked up (:class:`_Pieces`, filled as ids are met, so that a vocabulary of 150,000 costs
nothing at load), the token stages and the join of ``stages.py`` make text of it, and the text stages finish it.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders

from contract.errors import InvalidArgument, NotFound
from python_backends.detokenizer import stages

SUPPORTED_DECODERS = (
    "BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Replace", "Sequence", "Strip", "WordPiece",
)  # fmt: skip


class Decoding:
    """How one tokenizer turns ids into text. Made once at load, shared by all streams and threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises InvalidArgument if the tokenizer's decoder can not be streamed."""
        self._tokenizer = tokenizer
        self._special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        self._plan = _Plan(_steps(_specification(tokenizer.decoder)))
        self._tables: dict[tuple[bool, bool, bool], _Pieces] = {}

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer | str | os.PathLike[str]) -> Decoding:
        """``tokenizer``: a Tokenizer, a ``tokenizer.json``, or the folder of one.

        Raises NotFound if there is no such file, InvalidArgument if it can not be read or streamed.
        """
        return cls(tokenizer if isinstance(tokenizer, Tokenizer) else _load(Path(tokenizer)))

    def open(self, skip_special_tokens: bool = True) -> Stream:
        """A new stream of text, to be used by one thread at a time."""
        return Stream(self, self._plan, skip_special_tokens)

    def pieces(self, skip_special_tokens: bool, first: bool, last: bool) -> _Pieces:
        """The table of what an id stands for at that place in the text."""
        key = (skip_special_tokens, first, last)
        if key not in self._tables:
            skipped = self._special if skip_special_tokens else frozenset()
            self._tables[key] = _Pieces(self._tokenizer, skipped, self._plan, first, last)
        return self._tables[key]


class _Plan:
    """A decoder, compiled: what to do to each token by itself, and what every stream needs fresh.

    each: in order, with ``byte_level`` behind it if the pieces are bytes for the ``Utf8`` join; their result is kept
    per id. token_stages, join, text_stages: makers of the stages behind it, in order.
    """

    def __init__(self, steps: Sequence[dict]) -> None:
        self.each: list[stages.Each] = []
        self.byte_level = False
        self.token_stages: list[Callable[[], stages.TokenStage]] = []
        self.join: Callable[[], stages.Concat | stages.Utf8] = stages.Concat
        self.text_stages: list[Callable[[], stages.TextStage]] = []
        is_one_text = False
        for step in steps:
            if is_one_text:
                self.text_stages += _text_stages(step)
            elif step["type"] in ("Fuse", "ByteLevel"):
                is_one_text = True
                self._join(step["type"])
            else:
                self._token_step(step)
        self.asks_first = any(each.asks_first for each in self.each)
        self.asks_last = any(each.asks_last for each in self.each)

    def piece(self, token: str, first: bool, last: bool) -> str | bytes:
        for each in self.each:
            token = each(token, first, last)
        return stages.byte_level(token) if self.byte_level else token

    def _join(self, kind: str) -> None:
        if kind == "ByteLevel":
            self.join = stages.Utf8
            if self.token_stages:
                self.token_stages.append(stages.ByteLevelInTurn)
            else:
                self.byte_level = True

    def _token_step(self, step: dict) -> None:
        if step["type"] == "ByteFallback":
            self.token_stages.append(stages.ByteRuns)
        elif step["type"] == "CTC":
            decode = _library_decoder(step).decode
            self.token_stages.append(lambda: stages.Ctc(decode))
        else:
            each = _each(step)
            if self.token_stages:
                self.token_stages.append(lambda: stages.EachInTurn(each))
            else:
                self.each.append(each)


class _Ending:
    """Keeps back what the last token so far says differently when more tokens come.

    It keeps the part on which the two readings disagree, or, where a token may not be parted because token stages
    follow, the token.
    """

    def __init__(self, decoding: Decoding, skip_special_tokens: bool, plan: _Plan) -> None:
        self._middle = decoding.pieces(skip_special_tokens, first=False, last=False)
        self._last = decoding.pieces(skip_special_tokens, first=False, last=True)
        self._only = decoding.pieces(skip_special_tokens, first=True, last=True)
        self._may_part = not plan.token_stages
        self._at_start = True
        self._if_more: list = []  # at most one piece, and so its other reading
        self._if_last: list = []

    def feed(self, token_ids: Sequence[int], pieces: list) -> list:
        if not pieces:
            return pieces
        token_id = next(token_id for token_id in reversed(token_ids) if self._middle[token_id] is not None)
        if_more = pieces[-1]
        if_last = (self._only if self._at_start and len(pieces) == 1 else self._last)[token_id]
        self._at_start = False
        pieces = self._if_more + pieces
        self._if_more, self._if_last = [], []
        if if_more != if_last:
            agreed = len(os.path.commonprefix([if_more, if_last])) if self._may_part else 0
            self._if_more, self._if_last = [if_more[agreed:]], [if_last[agreed:]]
            pieces[-1:] = [if_more[:agreed]] if self._may_part else []
        return pieces

    def finish(self) -> list:
        return self._if_last


class _Pieces(dict[int, "str | bytes | None"]):
    """id -> the token after the plan's ``each`` steps; None for an id that gives no token.

    Looked up when first asked for, and then kept. Ids outside the vocabulary are not kept, so that the table stays
    within the vocabulary whatever ids come.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: set[str], plan: _Plan, first: bool, last: bool) -> None:
        self._tokenizer, self._skipped, self._plan = tokenizer, skipped, plan
        self._first, self._last = first, last

    def __missing__(self, token_id: int) -> str | bytes | None:
        try:
            token = self._tokenizer.id_to_token(token_id)
        except OverflowError:  # negative, or more than 32 bits
            return None
        if token is None:
            return None
        piece = None if token in self._skipped else self._plan.piece(token, self._first, self._last)
        self[int(token_id)] = piece
        return piece


class Stream:
    """The text of one sequence of ids, as it grows.

    ``draft`` has text, in parts, that the ids so far spell but a later id may still take back: the characters of a
    run of byte tokens (see ``stages.ByteRuns``). If the ids ended here, it would be the end of the text. ``feed``
    gives it out once it is decided; until then a stop string may be looked for in it.
    """

    def __init__(self, decoding: Decoding, plan: _Plan, skip_special_tokens: bool) -> None:
        self._middle = decoding.pieces(skip_special_tokens, first=False, last=False)
        self._first = decoding.pieces(skip_special_tokens, first=True, last=False) if plan.asks_first else self._middle
        self._at_start = plan.asks_first
        self._ending = _Ending(decoding, skip_special_tokens, plan) if plan.asks_last else None
        self._token_stages = [make() for make in plan.token_stages]
        self._join = plan.join()
        self._text_stages = [make() for make in plan.text_stages]
        last_stage = self._token_stages[-1] if self._token_stages else None
        self._runs = last_stage if isinstance(last_stage, stages.ByteRuns) else None
        self._drafting: list[stages.TextStage] | None = None  # the text stages as the undecided run leaves them
        self._drafted = 0  # parts of the run's draft
        self.draft: list[str] = []

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that is decided by these ids: new characters, possibly none."""
        table = self._middle
        pieces = [piece for token_id in token_ids if (piece := table[token_id]) is not None]
        if self._at_start and pieces:
            pieces[0] = self._first[next(token_id for token_id in token_ids if table[token_id] is not None)]
            self._at_start = False
        if self._ending is not None:
            pieces = self._ending.feed(token_ids, pieces)
        for stage in self._token_stages:
            pieces = stage.feed(pieces)
        text = self._join.feed(pieces)
        for stage in self._text_stages:
            text = stage.feed(text)
        if self._runs is not None and (self.draft or self._runs.draft):
            self._draft(self._runs.draft, decided=bool(pieces))
        return text

    def finish(self) -> str:
        """The rest of the text, when no more ids come. The stream is not to be fed afterwards."""
        pieces = self._ending.finish() if self._ending is not None else []
        for stage in self._token_stages:
            pieces = stage.feed(pieces) + stage.finish()
        text = self._join.feed(pieces) + self._join.finish()
        for stage in self._text_stages:
            text = stage.feed(text) + stage.finish()
        self.draft = []
        return text

    def _draft(self, parts: list[str], decided: bool) -> None:
        if decided or not self.draft:
            # Whatever run is open now began with this feed, behind text that has passed the text stages.
            self._drafting = [copy.copy(stage) for stage in self._text_stages]
            self._drafted, self.draft = 0, []
        for text in parts[self._drafted :]:
            for stage in self._drafting:
                text = stage.feed(text)
            if text:
                self.draft.append(text)
        self._drafted = len(parts)


def _text_stages(step: dict) -> list[Callable[[], stages.TextStage]]:
    """What a decoder does to one text. It is the first token and the last, and no other is there to be compared."""
    match step:
        case {"type": "Fuse"}:
            return []
        case {"type": "Strip", "content": content, "start": start, "stop": stop}:
            return [lambda: stages.StripText(content, start, stop)]
        case {"type": "ByteFallback"}:
            return [stages.LoneByteToken]
        case {"type": "ByteLevel"}:
            return _whole(step)
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
            return _substitutes((pattern, content)) if pattern else _whole(step)
        case {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}:
            is_literal = pattern and not set(pattern) & set(r"\^$.|?*+()[]{}")
            return _substitutes((pattern, content)) if is_literal else _whole(step)
        case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
            return _substitutes((mark, " " if scheme == "never" else ""))
        case {"type": "BPEDecoder", "suffix": suffix}:
            return _substitutes((suffix, "")) if suffix else []
        case {"type": "WordPiece", "cleanup": cleanup}:
            return _substitutes(*stages.CLEANUP) if cleanup else []
        case {"type": "CTC", "pad_token": pad, "word_delimiter_token": delimiter, "cleanup": cleanup}:
            if cleanup and not delimiter:
                raise _unsupported("CTC with an empty word delimiter behind Fuse or ByteLevel")
            dropped = [(pad, "")] if pad else []
            return _substitutes(*dropped, *(*stages.CLEANUP, (delimiter, " ")) if cleanup else ())
    raise _unsupported(step["type"])


def _substitutes(*pairs: tuple[str, str]) -> list[Callable[[], stages.TextStage]]:
    return [lambda pattern=pattern, content=content: stages.Substitute(pattern, content) for pattern, content in pairs]


def _whole(step: dict) -> list[Callable[[], stages.TextStage]]:
    decode = _library_decoder(step).decode
    return [lambda: stages.Whole(decode)]


def _each(step: dict) -> stages.Each:
    match step["type"]:
        case None:
            return stages.Spaced()
        case "Strip":
            return stages.StripEach(step["content"], step["start"], step["stop"])
        case "Replace":
            return stages.Each(_library_decoder(step).decode)
        case "Metaspace" | "WordPiece":
            return stages.EachFirst(_library_decoder(step).decode)
        case "BPEDecoder":
            return stages.EachLast(_library_decoder(step).decode)
    raise _unsupported(step["type"])


def _library_decoder(step: dict) -> decoders.Decoder:
    match step:
        case {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}:
            return decoders.Replace(Regex(pattern), content)
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
            return decoders.Replace(pattern, content)
    options = {name: value for name, value in step.items() if name != "type"}
    return getattr(decoders, step["type"])(**options)


def _specification(decoder: decoders.Decoder | None) -> dict | None:
    """The decoder as ``tokenizer.json`` writes it."""
    if decoder is None:
        return None
    try:
        return json.loads(decoder.__getstate__())
    except Exception as exc:  # the library raises nothing narrower
        raise _unsupported("a decoder written in Python") from exc


def _steps(specification: dict | None) -> list[dict]:
    """The decoders of a Sequence in order, of nested ones too. No decoder at all is one of type None."""
    if specification is None:
        return [{"type": None}]
    if specification["type"] == "Sequence":
        return [step for inner in specification["decoders"] for step in _steps(inner)]
    return [specification]


def _unsupported(name: object) -> InvalidArgument:
    return InvalidArgument("decoder", f"{name} can not be streamed; supported are {', '.join(SUPPORTED_DECODERS)}")


def _load(path: Path) -> Tokenizer:
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise NotFound(f"tokenizer: there is no file {path}")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as exc:  # the library raises nothing narrower, and does not name the decoder it does not know
        raise _unreadable(path, exc) from exc


def _unreadable(path: Path, problem: Exception) -> InvalidArgument:
    try:
        steps = _steps(json.loads(path.read_text(encoding="utf-8"))["decoder"])
        unknown = [step["type"] for step in steps if step["type"] not in (None, *SUPPORTED_DECODERS)]
    except (ValueError, KeyError, TypeError):
        unknown = []
    return _unsupported(unknown[0]) if unknown else InvalidArgument("tokenizer", f"{path} can not be read: {problem}")

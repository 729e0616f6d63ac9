"""Encode the deltas of a response as server-sent events."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from clients.wire.completion import Completion
from contract.errors import TridentError
from contract.generation import TokenDelta, Usage
from gateway.api.error_responses import error_object
from gateway.choices import ChoiceDelta
from gateway.tools.vocabulary import Vocabulary

DONE = b"data: [DONE]\n\n"
# Line ends of str.splitlines, beside those that JSON escapes anyway: some clients split events with it.
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
_MARK = secrets.token_hex(16)  # stands for the text in a template; no client can guess it


class Formatter(ABC):
    """The JSON of the responses to one request. objects: the ``object`` of a response and of a chunk."""

    operation: str
    schema: type[Any]
    prefix: str
    objects: tuple[str, str]

    def __init__(self, request: Any, request_id: str, created_s: int, vocabulary: Vocabulary) -> None:
        self.request, self._vocabulary = request, vocabulary
        self._head = {"id": f"{self.prefix}-{request_id}", "created": created_s, "model": request.model}

    def first_chunk(self, choice: int) -> dict[str, Any] | None:
        """Return the chunk that precedes the first text, if there is one."""
        return None

    @abstractmethod
    def chunk(self, choice: int, delta: TokenDelta) -> dict[str, Any] | None:
        """Return what a delta adds; None if it adds nothing visible."""

    @abstractmethod
    def _choice(self, choice: int, completion: Completion) -> dict[str, Any]:
        """Return a choice of the complete response."""

    def usage_chunk(self, usages: Sequence[Usage | None]) -> dict[str, Any]:
        usage = usage_fields(usages, self.request.choices)
        return {**self._head, "object": self.objects[1], "choices": [], "usage": usage}

    def response(self, completions: Sequence[Completion]) -> dict[str, Any]:
        choices = [self._choice(choice, completion) for choice, completion in enumerate(completions)]
        usage = usage_fields([completion.usage for completion in completions], self.request.choices)
        return {**self._head, "object": self.objects[0], "choices": choices, "usage": usage}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.objects[1], "choices": [choice]}
        return {**chunk, "usage": None} if self.request.include_usage else chunk


class EventEncoder:
    """Encode one response's deltas as events.

    A delta that only adds text, as almost all do, is written into a template made once for each choice.

    first_event: number of the first delta, which becomes its event's ``id``; None: events have no ids.
    replayed: deltas that the client has received already on an earlier connection.
    """

    def __init__(
        self, formatter: Formatter, first_event: int | None = None, replayed: Iterable[ChoiceDelta] = ()
    ) -> None:
        self._formatter = formatter
        self._templates: dict[int, tuple[bytes, bytes]] = {}
        self._usages: dict[int, Usage | None] = {}
        self._number: int | None = None
        for item in replayed:
            self.encode(item)
        self._number = first_event

    def encode(self, item: ChoiceDelta) -> bytes:
        """Return the events of one delta: none if it adds nothing visible, two where a choice has a first event."""
        choice, delta = item
        first = b"" if choice in self._templates else self._first_events(choice)
        if delta.text and not (delta.finish_reason or delta.log_probs or delta.sections):
            before, after = self._templates[choice]
            event = b"%b%b%b" % (before, _json(delta.text), after)
        else:
            chunk = self._formatter.chunk(choice, delta)
            event = b"" if chunk is None else encode_event(chunk)
        if delta.usage is not None:
            self._usages[choice] = delta.usage
        if self._number is not None:
            if event or first:
                # The id belongs to the last event of the delta, so that a client that has it has all of the delta.
                event, first = (event, first) if event else (first, b"")
                event = b"id: %d\n%b" % (self._number, event)
            self._number += 1
        return first + event if first else event

    def end(self) -> bytes:
        """Return the usage event, if the client asked for it, and the end of the stream."""
        if not self._formatter.request.include_usage:
            return DONE
        usages = [self._usages[choice] for choice in sorted(self._usages)]
        return encode_event(self._formatter.usage_chunk(usages)) + DONE

    def failed(self, error: TridentError) -> bytes:
        return encode_event(error_object(error))

    def _first_events(self, choice: int) -> bytes:
        """Begin a choice, and those before it: OpenAI's client takes the order of first events for that of indices."""
        return b"".join(map(self._first_event, range(len(self._templates), choice + 1)))

    def _first_event(self, choice: int) -> bytes:
        first, pattern = self._formatter.first_chunk(choice), self._formatter.chunk(choice, TokenDelta(_MARK))
        assert pattern is not None, "a delta with text has a chunk"
        before, _, after = encode_event(pattern).partition(_json(_MARK))
        self._templates[choice] = before, after
        self._usages.setdefault(choice, None)
        return b"" if first is None else encode_event(first)


def encode_event(fields: Mapping[str, Any]) -> bytes:
    return b"data: %b\n\n" % _json(fields)


def usage_fields(usages: Sequence[Usage | None], choices_per_prompt: int) -> dict[str, Any]:
    """Return a response's ``usage``. A prompt counts once. usages: prompt by prompt; None for a choice without one."""
    known = [usage or Usage(0, 0) for usage in usages]
    prompts = known[::choices_per_prompt]
    input_tokens, output_tokens = sum(usage.input_tokens for usage in prompts), sum(u.output_tokens for u in known)
    return {
        "prompt_tokens": input_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": input_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
        "completion_tokens_details": {"reasoning_tokens": sum(usage.reasoning_tokens for usage in known)},
    }


def _json(value: Any) -> bytes:
    """Return JSON in one line, whichever line ends the client recognises."""
    data = orjson.dumps(value)
    if not data.isascii():
        for character, escaped in _LINE_ENDS:
            data = data.replace(character, escaped)
    return data

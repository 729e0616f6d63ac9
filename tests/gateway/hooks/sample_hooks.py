"""Hooks that tests name in configurations."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

from contract.errors import PermissionDenied

ENDED: list = []


class Upper:
    """Answers in capital letters, a word late; asks with another prompt."""

    def __init__(self, suffix: str = "") -> None:
        self.suffix = suffix

    async def request(self, request, call):
        if call.headers.get("x-forbidden"):
            raise PermissionDenied("not this one")
        if request.messages is not None:
            return replace(request, messages=({"role": "user", "content": "changed" + self.suffix},))
        return replace(request, text_input="changed" + self.suffix, max_tokens=2)

    def output(self, part, call):
        return UpperFilter(self.suffix)

    def end(self, outcome, call):
        ENDED.append((outcome, call))


class UpperFilter:
    def __init__(self, suffix):
        self.suffix, self.kept = suffix, ""

    def feed(self, text):
        given, self.kept = self.kept, text.upper()
        return given

    def finish(self):
        return self.kept + self.suffix


class Output:
    """A filter of the kind that options name."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def output(self, part, call):
        return FILTERS[self.kind]()


class Raises:
    def feed(self, text):
        raise KeyError(text)

    def finish(self):
        return "never"


# Set when a test has ended: a thread that spun on would take a core, and the interpreter's lock, from all later tests.
LET_GO = threading.Event()


class Hangs(Raises):
    def feed(self, text):
        LET_GO.wait(30)


class Spins(Raises):
    def feed(self, text):
        while not LET_GO.is_set():
            pass


class Blocks(Raises):
    async def feed(self, text):
        time.sleep(0.5)


class Waits(Raises):
    async def feed(self, text):
        await asyncio.sleep(30)


class Nonsense(Raises):
    def feed(self, text):
        return 7


class Forbids(Raises):
    def feed(self, text):
        raise PermissionDenied("the output broke a rule")


FILTERS = {kind.__name__: kind for kind in (Raises, Hangs, Spins, Blocks, Waits, Nonsense, Forbids)}


class Requests:
    """Makes of a request what options say."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def request(self, request, call):
        if self.kind == "stream":
            return replace(request, stream=not request.stream)
        if self.kind == "seed":
            return replace(request, sampling=replace(request.sampling, seed=5))
        if self.kind == "number":
            return replace(request, stop=7)
        if self.kind == "in place":
            request.messages[0]["content"] = "changed"
            raise KeyError
        if self.kind == "empty":
            return replace(request, text_input="")
        return {"messages": replace(request, text_input=None, messages=("no dictionary",))}.get(self.kind, self.kind)


class OwnKeys:
    def authenticate(self, headers):
        if headers.get("x-who") == "nobody":
            raise PermissionDenied("go away")
        return headers.get("x-who")


class Nothing:
    """Has no method of a hook."""


def broken():
    raise OSError("no such database")


observer = Upper()

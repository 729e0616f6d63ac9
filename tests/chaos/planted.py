"""A gateway or a scaler with defects that chaos must find: ``python -m tests.chaos.planted DEFECT,… PROGRAM …``."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import runpy
import sys


def leaked_permit() -> None:
    """Every fifth permit is never settled."""
    from gateway.admission.fair_admission import Permit

    settle, count = Permit.settle, itertools.count(1)

    def leaking(self, usage) -> None:
        if next(count) % 5:
            settle(self, usage)

    Permit.settle = leaking


def leaked_permit_on_leaving() -> None:
    """A permit is not settled when its caller has left."""
    from contract.errors import Cancelled
    from gateway.choices import Choices

    ended = Choices._ended

    def leaking(self, index: int) -> None:
        if not isinstance(self.generations[index].error, Cancelled):
            ended(self, index)

    Choices._ended = leaking


def leaked_slot_on_leaving() -> None:
    """A slot is not given back when its caller has left before the stream's end."""
    from gateway.generation import Generation

    close = Generation.close

    def leaking(self, error=None) -> None:
        if not self.finish_reason and not self._closed:
            self._turn.release = self._permit.claims[-1].close = lambda *_: None
        close(self, error)

    Generation.close = leaking


def leaked_permit_on_leaving_the_queue() -> None:
    """A permit is not closed when its caller left while it waited for a slot."""
    from gateway.admission.fair_admission import Permit

    close = Permit.close

    def leaking(self, used, micros=0) -> None:
        waits = any(not claim.given for claim in self.claims)
        if not (waits and isinstance(sys.exc_info()[1], asyncio.CancelledError)):
            close(self, used, micros)

    Permit.close = leaking


def leaked_cap_on_refusal() -> None:
    """A place under the gateway's own caps is not given back where those in Redis refuse the request."""
    from contract.errors import Overloaded
    from gateway.admission.concurrency import Slot

    release = Slot.release

    def leaking(self) -> None:
        if not isinstance(sys.exc_info()[1], Overloaded):
            release(self)

    Slot.release = leaking


def unnoticed_leaving() -> None:
    """A caller over HTTP that leaves is served to the end."""
    from gateway.api.response_stream import ResponseStream

    ResponseStream._on_disconnect = lambda *_: None


def repeated_end() -> None:
    """An event stream tells its end twice."""
    from gateway.api.sse import EventEncoder

    encode = EventEncoder.encode

    def repeating(self, item) -> bytes:
        again = b""
        if item.delta.finish_reason:
            again = encode(self, item._replace(delta=dataclasses.replace(item.delta, text="")))
        return encode(self, item) + again

    EventEncoder.encode = repeating


def repeated_message() -> None:
    """The last message of a stream comes twice, in both protocols."""
    from gateway.generation import Generation

    read = Generation.__anext__

    async def repeating(self):
        if (last := self.__dict__.pop("last", None)) is not None:
            return last
        delta = await read(self)
        if delta.finish_reason:
            self.last = delta
        return delta

    Generation.__anext__ = repeating


def doubled_charge() -> None:
    """Every fifth request is charged twice its tokens."""
    from gateway.admission.fair_admission import Permit

    close, count = Permit.close, itertools.count(1)
    Permit.close = lambda self, used, micros=0: close(self, used * (1 + (next(count) % 5 == 0)), micros)


def uncounted_prompt() -> None:
    """A stream whose caller left is counted without its prompt."""
    from contract.generation import Usage
    from gateway.generation import Generation

    close = Generation.close

    def forgetting(self, error=None) -> None:
        if self.usage is None and self.tokens:
            self.usage = Usage(0, self.tokens)
        close(self, error)

    Generation.close = forgetting


def doubled_prompt() -> None:
    """The prompt of a stream that was continued at another replica is counted twice."""
    from gateway.generation import Generation

    observe = Generation._observe

    def doubling(self, delta) -> None:
        observe(self, delta)
        if delta.usage is not None and self._continuation.count:
            self.usage = dataclasses.replace(delta.usage, input_tokens=2 * delta.usage.input_tokens)

    Generation._observe = doubling


def ignored_key() -> None:
    """A request that repeats another one by its Idempotency-Key is generated again."""
    from gateway.cache.coalescing import Idempotency
    from gateway.cache.records import Records

    follow, record, count = Idempotency.follow, Records.record, itertools.count()
    Idempotency.follow = lambda self, tenant, key, *rest: follow(self, tenant, f"{key} {next(count)}", *rest)
    Records.record = lambda self, tenant, key, *rest: record(self, tenant, f"{key} {next(count)}", *rest)


def ignored_cap() -> None:
    """No tenant has a cap."""
    from gateway.admission import concurrency, shared_state

    concurrency.caps = shared_state.caps = lambda *_: {}


def _with_text(change) -> None:
    """Change the text of every 25th delta that the gateway reads from a replica."""
    from clients.wire.response_reader import ResponseReader

    read, count = ResponseReader.read, itertools.count(1)

    def changed(self, data):
        delta = read(self, data)
        if delta is None or not delta.text or next(count) % 25:
            return delta
        return dataclasses.replace(delta, text=change(delta.text))

    ResponseReader.read = changed


def lost_token() -> None:
    _with_text(lambda text: "")


def doubled_token() -> None:
    _with_text(lambda text: text * 2)


def ignored_floor() -> None:
    from cluster.scaling import scaler

    decide = scaler.decide
    scaler.decide = lambda rules, *rest: decide(rules.model_copy(update={"min_replicas": 0}), *rest)


_LEAVING = (leaked_permit_on_leaving, leaked_permit_on_leaving_the_queue, leaked_slot_on_leaving, unnoticed_leaving)
_CAPS = (ignored_cap, leaked_cap_on_refusal)
_TOKENS = (repeated_end, repeated_message, lost_token, doubled_token)
_COUNTS = (doubled_charge, uncounted_prompt, doubled_prompt)
_PLANTS = (leaked_permit, *_LEAVING, *_TOKENS, *_COUNTS, ignored_key, *_CAPS, ignored_floor)
DEFECTS = {plant.__name__: plant for plant in _PLANTS}

if __name__ == "__main__":
    defects, program, *arguments = sys.argv[1:]
    for defect in defects.split(","):
        DEFECTS[defect]()
    sys.argv = [program, *arguments]
    runpy.run_module(program, run_name="__main__", alter_sys=True)

"""Those who send requests: every persona's open or closed loop, each request from its start to its only end."""

from __future__ import annotations

import asyncio
import random
import time
import zlib
from dataclasses import dataclass
from itertools import count

from benchmarks.arrivals import Arrival
from benchmarks.record import Record
from contract.errors import InvalidArgument, NotFound, TridentError
from contract.generation import GenerationRequest, Usage
from gateway.admission.fair_admission import DEGRADED_HEADER
from gateway.admission.request_class import classified
from gateway.config.policy import Policy
from gateway.config.tenant import Tenant
from gateway.request_context import RequestContext
from gateway.service import Service
from simulator.invariants import Ledger
from simulator.replica import Prompt
from simulator.routes import could_move
from simulator.scenario import Persona

_WORDS = "the quick brown fox jumps over a lazy dog while rain falls on some old grey roof "
HOUR_S = 3600.0
_IDLE_S = 1.0  # the least pause of a user who was refused or is away: time passes for one who does not think


def _text(tokens: int, head: str) -> str:
    """Return a prompt of about so many tokens, of four letters each."""
    size = max(1, 4 * tokens - len(head))
    return head + (_WORDS * (size // len(_WORDS) + 1))[:size]


def tenant(gateway: Service, name: str, persona: Persona) -> Tenant:
    """Return the tenant of a persona. Raises InvalidArgument for a key, class or model that is not in the policy."""
    key, model, policy = persona.key, persona.model, gateway.configuration.policy
    found = gateway.configuration.named(key.rpartition("/")[0], key) if key else None
    if found is None:
        if not gateway.configuration.keyless:
            raise InvalidArgument(f"personas.{name}.key", f"must be org/team/key, since there are keys, got {key!r}")
        found = Tenant()
    if persona.request_class:
        try:
            classified(policy.classes, found, persona.operation, persona.request_class)
        except InvalidArgument as exc:
            raise InvalidArgument(f"personas.{name}.class", exc.problem) from exc
    try:
        gateway.models.find(model if model or len(policy.models) > 1 else gateway.settings.triton_model, found)
    except NotFound as exc:
        allowed = ", ".join(one.name for one in gateway.models.of(found)) or "none for this key"
        raise InvalidArgument(f"personas.{name}.model", f"must be one of {allowed}, got {model!r}") from exc
    return found


def _pools(policy: Policy, model: str, every: set[str]) -> set[str]:
    """Return the pools that the policy has for a model; ``every`` where it does not say."""
    if model not in policy.models or not (pools := policy.models[model].pools):
        return every
    elsewhere = {policy.shadow.pool if policy.shadow is not None else ""}
    elsewhere |= {target.pool for target in policy.overflow.values()}
    return elsewhere.union(pools, (release.candidate for release in policy.releases.values()))


@dataclass
class Sent(Record):
    """A request of a persona. user: of a closed loop; None in an open one. nth: of the user's requests, or of the
    persona's. Equal seeds draw it by these two, whatever came of the others. leaves: tokens after which the sender
    leaves, 0: never; timer: for one who waits for a first token."""

    user: int | None = None
    nth: int = 0
    leaves: int = 0
    timer: asyncio.TimerHandle | None = None


class People:
    """One persona. ``run`` sends until ``until_s``; ``tasks`` are the requests under way, ``records`` all requests.
    gateways: take requests in turn. began_s, until_s: on the loop's clock. start_hour: time of day at began_s."""

    def __init__(
        self, name: str, persona: Persona, gateways: list[Service], ledger: Ledger, seed: int, start_hour: float
    ) -> None:
        self.name, self._persona, self._gateways, self._ledger = name, persona, gateways, ledger
        self._loop = asyncio.get_running_loop()
        self._rng = random.Random(f"{seed} {name}")
        self._arrivals = random.Random(f"{seed} {name} arrivals")
        self._start_hour, self._seed = start_hour, seed
        self.records: list[Sent] = []
        self.tasks: set[asyncio.Task[Sent]] = set()
        self._tenants = [tenant(gateway, name, persona) for gateway in gateways]
        # The whole prompts of a group begin alike, as long as they are.
        groups = range(persona.prefix_groups if persona.prefix_tokens else 0)
        self._prefixes = [_text(persona.prefix_tokens, f"{name} {group} ") for group in groups]

    async def run(self, began_s: float, until_s: float) -> None:
        persona, self._until_s = self._persona, until_s
        begin_s = began_s + persona.from_s
        end_s = min(until_s, began_s + persona.until_s) if persona.until_s is not None else until_s
        if persona.arrivals is None:
            await asyncio.gather(*(self._user(began_s, begin_s, end_s, number) for number in range(persona.users)))
            return
        for arrival in persona.arrivals.instants(self._arrivals, end_s - begin_s):
            at_s = begin_s + arrival.at_s
            if self._arrivals.random() >= self._part(at_s - began_s):
                continue
            if at_s > self._loop.time():
                await asyncio.sleep(at_s - self._loop.time())
            self._send(at_s, self._rng, arrival=arrival)

    async def _user(self, began_s: float, begin_s: float, end_s: float, number: int) -> None:
        """Send, read, think, and again; a user stays away at hours with fewer users than his number."""
        persona, nth, name = self._persona, 0, f"{self._seed} {self.name} {number}"
        rng = random.Random(name)
        await asyncio.sleep(max(0.0, begin_s - self._loop.time()) + rng.random() * persona.think_s)
        while (now_s := self._loop.time()) < end_s:
            least_s = _IDLE_S
            if number < persona.users * self._part(now_s - began_s):
                record = await asyncio.shield(self._send(now_s, random.Random(f"{name} {nth}"), number, nth))
                nth += 1
                least_s = _IDLE_S if record.error else 0.001
            await asyncio.sleep(max(least_s, rng.expovariate(1 / persona.think_s) if persona.think_s else 0.0))

    def _part(self, passed_s: float) -> float:
        """Return the part of the people that are there."""
        day = self._persona.day
        return day[int(self._start_hour + passed_s / HOUR_S) % 24] if day is not None else 1.0

    def _send(
        self, at_s: float, rng: random.Random, user: int | None = None, nth: int = 0, arrival: Arrival | None = None
    ) -> asyncio.Task[Sent]:
        persona = self._persona
        tokens, answer = persona.input.draw(rng), persona.output.draw(rng)
        if arrival is not None:
            tokens, answer = arrival.input_tokens or tokens, arrival.output_tokens or answer
        number = len(self.records)
        shared, head = ("", 0), f"{number} "
        if self._prefixes:
            group = rng.randrange(len(self._prefixes))
            tokens = max(tokens, persona.prefix_tokens + 1)
            shared, head = (f"{self.name}/{group}", persona.prefix_tokens), f"{self._prefixes[group]}{number} "
        session = ""
        if persona.sessions:
            session = f"{self.name}-{rng.randrange(persona.sessions) if user is None else user}"
        text = _text(tokens, head)
        prompt = Prompt.of(text, tokens, answer, shared, zlib.crc32(text.encode()) % 2048 << 20, session)
        record = Sent(number, at_s, at_s, user=user, nth=number if user is None else nth)
        self.records.append(record)
        request = GenerationRequest(prompt, max_tokens=persona.max_tokens or answer)
        record.leaves = rng.randint(1, 1 + answer // 2) if persona.leave and rng.random() < persona.leave else 0
        self.tasks.add(task := asyncio.create_task(self._request(record, request)))
        task.add_done_callback(self.tasks.discard)
        return task

    async def _request(self, record: Sent, request: GenerationRequest) -> Sent:
        """Send until there is an answer."""
        persona, own = self._persona, asyncio.current_task()
        self._ledger.open += 1
        if persona.patience_s and own is not None:
            record.timer = self._loop.call_later(persona.patience_s, own.cancel)
        try:
            for attempt in count():
                # By the request alone: a retry must not move the others where two policies are compared.
                number = ((record.user or 0) + record.nth + attempt) % len(self._gateways)
                try:
                    with self._ledger.asking(number, self._gateways[number], self._tenants[number].levels):
                        await self._attempt(number, record, request)
                    break
                except TridentError as error:
                    wait_s, left_s = error.retry_after_s, self._until_s - self._loop.time()
                    if attempt >= persona.retries or record.messages or not wait_s or wait_s > left_s:
                        raise
                    await asyncio.sleep(wait_s)
        except TridentError as error:
            record.error = f"{error.reason or type(error).__name__}: {error}"
            record.retry_after = bool(error.retry_after_s)
        except asyncio.CancelledError:
            record.cancelled = True
        finally:
            if record.timer is not None:
                record.timer.cancel()
            record.ended_s = self._loop.time()
            self._ledger.open -= 1
        return record

    async def _attempt(self, number: int, record: Sent, request: GenerationRequest) -> None:
        persona, ledger, service = self._persona, self._ledger, self._gateways[number]
        prompt: Prompt = request.text_input  # type: ignore[assignment]
        if persona.network_s:
            await asyncio.sleep(persona.network_s)
        carrier = {"x-trident-class": persona.request_class} if persona.request_class else {}
        caller, name = self._tenants[number], f"{self.name}-{record.index}"
        context = RequestContext(caller, "http", persona.operation, name, carrier, prompt.session)
        context = await service.routed(persona.model or service.settings.triton_model, (request,), context)
        asked_s = self._loop.time()
        choices = await service.choices((request,), context)
        began_s, rules = self._loop.time(), context.tenant.class_rules
        if began_s - asked_s > ((rules and rules.max_wait_s) or service.configuration.policy.admission.max_wait_s) + 1:
            ledger.broken("a request waited longer than max_wait_s")
        ledger.admitted(context.tenant.levels)
        failed: BaseException | None = None
        received, usage = 0, None
        try:
            async for _, delta in choices:
                if record.finish_reason:
                    ledger.broken("an answer went on after its end")
                ids = delta.token_ids
                if ids != tuple(range(prompt.base + received, prompt.base + received + len(ids))):
                    ledger.broken("a token was lost or came twice")
                if self._loop.time() > began_s + service.settings.request_timeout_s + 1:
                    ledger.broken("a request was served after its deadline")
                if ids:
                    received += len(ids)
                    record.messages.append((time.monotonic() + persona.network_s, len(ids)))
                    if record.timer is not None:
                        record.timer.cancel()
                    if 0 < record.leaves <= received and not delta.finish_reason:
                        raise asyncio.CancelledError
                if delta.finish_reason:
                    record.finish_reason, usage, record.timings = delta.finish_reason.value, delta.usage, delta.timings
            if usage is None:
                ledger.broken("an answer had no end, or none with a usage")
        except (TridentError, asyncio.CancelledError) as error:
            failed = error
            if isinstance(error, TridentError) and could_move(service, choices.generations[0], error):
                ledger.broken("a request failed though another replica had room")
            raise
        finally:
            choices.close(failed)
            ledger.released(context.tenant.levels)
            generation, used = choices.generations[0], None
            if prompt.pools - _pools(service.configuration.policy, context.model.name, prompt.pools):
                ledger.broken("a request was sent to a pool that does not serve its model")
            if usage is not None:
                record.input_tokens, record.usage_tokens = usage.input_tokens, usage.output_tokens
                most = generation.request.max_tokens
                if most > min(request.max_tokens, (rules and rules.max_tokens) or request.max_tokens):
                    ledger.broken("an answer had more tokens than its caller or its class allows")
                if most < request.max_tokens and DEGRADED_HEADER not in choices.headers:
                    ledger.broken("an answer was made shorter and its caller was not told")
                if (record.finish_reason == "length") != (prompt.answer >= most):
                    ledger.broken("an answer ended for another reason than the engine's")
                due = Usage(prompt.tokens, min(prompt.answer, most))
                ledger.answered(usage, received, due)
                cached = (generation.usage or usage).cached_tokens  # which callers may not be told
                used = Usage(prompt.tokens, received, cached)
            elif received:  # it was cut off: the prompt is charged as it was counted or estimated
                used = Usage(generation.prompt_count.likely if generation.prompt_count else 0, received)
            ledger.charged(context.tenant.levels, choices.reservation, used, context.model.price)
        if persona.network_s:
            await asyncio.sleep(persona.network_s)

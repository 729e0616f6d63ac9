"""The hooks of a gateway as its configuration names them, and their calls for one request."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Any

from prometheus_client import CollectorRegistry
from pydantic import TypeAdapter, ValidationError

from contract.errors import Cancelled, InvalidArgument, TridentError, Unauthenticated
from contract.generation import GenerationRequest, Usage
from gateway.admission.prompt_tokens import prompt_of
from gateway.choices import ChoiceDelta, total
from gateway.config.policy import HookRules
from gateway.config.tenant import Tenant
from gateway.hooks.call import Call, Outcome
from gateway.hooks.hook import HookFailed, HookMetrics, LoadedHook, WrongValue
from gateway.hooks.output import ChoiceOutput
from gateway.request_context import RequestContext

# What hooks may change of a request; the rest says how its response is read and sent.
CHANGEABLE = frozenset(
    ("text_input", "messages", "input_ids", "chat_template_kwargs", "max_tokens", "sampling", "stop", "stop_token_ids")
    + ("bad_words", "guide")
)
_REQUEST = TypeAdapter(GenerationRequest)
CLOSE_S = 2.0  # that the ends of requests may take when the gateway stops


class Hooks:
    """The hooks of one gateway. ``prepare`` those of a configuration, then ``change`` to them."""

    def __init__(self, named: Callable[[str, str], Tenant | None], registry: CollectorRegistry) -> None:
        """named: as Authentication has it."""
        self._named, self._metrics = named, HookMetrics(registry)
        self._hooks: tuple[LoadedHook, ...] = ()
        self._prepared: tuple[LoadedHook, ...] = ()
        self._ends: set[asyncio.Task] = set()

    def prepare(self, rules: Mapping[str, HookRules]) -> None:
        """Load what is new or has other rules. Raises: InvalidArgument that names the hook and the field."""
        known = {hook.name: hook for hook in self._hooks}
        self._prepared = tuple(
            known[name] if name in known and known[name].rules == rule else LoadedHook(name, rule, self._metrics)
            for name, rule in rules.items()
        )

    def change(self) -> None:
        """Call the prepared hooks for later requests."""
        for gone in {hook.name for hook in self._hooks} - {hook.name for hook in self._prepared}:
            self._metrics.out.remove(gone)
        for hook in set(self._prepared) - set(self._hooks):
            self._metrics.out.labels(hook.name).set(0)
        self._hooks = self._prepared

    @property
    def authenticate(self) -> bool:
        """Whether one of them says who sends a request."""
        return any(hook.has("authenticate") for hook in self._hooks)

    async def authenticated(self, headers: Mapping[str, str]) -> Tenant | None:
        """Return the tenant that a hook finds for a request; None if none does.

        Raises: Unauthenticated for a key that the configuration does not have, and what LoadedHook.call raises.
        """
        for hook in (hook for hook in self._hooks if hook.has("authenticate")):
            with contextlib.suppress(HookFailed):
                key = await hook.call("authenticate", headers, check=_key)
                if key is not None:
                    if (tenant := self._named(key.rpartition("/")[0], key)) is None:
                        raise Unauthenticated(f"the hook {hook.name} names a key that this gateway does not have")
                    return tenant
        return None

    def call(self, context: RequestContext) -> contextlib.AbstractContextManager[RequestHooks | None]:
        """Return the hooks of one request, None where there are none. On exit their ``end`` is called."""
        hooks = [hook for hook in self._hooks if hook.serves(context.tenant)] if self._hooks else ()
        return RequestHooks(hooks, context, self._ends) if hooks else contextlib.nullcontext()

    async def close(self) -> None:
        """Wait for the ends of requests."""
        if self._ends:
            await asyncio.wait(self._ends, timeout=CLOSE_S)


class RequestHooks:
    """The hooks of one request."""

    def __init__(self, hooks: Sequence[LoadedHook], context: RequestContext, ends: set[asyncio.Task]) -> None:
        self._hooks, self._ends, self._began_s = hooks, ends, time.monotonic()
        self._filtering = [hook for hook in hooks if hook.has("output")]
        headers, tenant = MappingProxyType(dict(context.carrier)), context.tenant.name
        self.call = Call(context.request_id, tenant, context.protocol, context.operation, headers, context.session)
        self._requests: Sequence[GenerationRequest] = ()
        self._outputs: dict[int, ChoiceOutput] = {}
        self._usages: dict[int, Usage | None] = {}
        self._finish_reasons: list[str] = []
        self.error: TridentError | None = None  # that was told in band

    def __enter__(self) -> RequestHooks:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        error = error or self.error
        seen = error if isinstance(error, TridentError) or error is None else Cancelled("the caller left")
        usages = [self._usages.get(choice) for choice in range(len(self._requests))]
        usage = total(usages, [id(prompt_of(request)) for request in self._requests])
        outcome = Outcome(tuple(self._finish_reasons), usage, seen, time.monotonic() - self._began_s)
        for hook in self._hooks:
            if hook.has("end"):
                task = asyncio.ensure_future(_ended(hook, outcome, self.call))
                self._ends.add(task)
                task.add_done_callback(self._ends.discard)

    @property
    def filters(self) -> bool:
        """Whether a hook may change the output."""
        return bool(self._filtering)

    async def changed(
        self, requests: Sequence[GenerationRequest], model: str, user: str, allowed: frozenset[str] = CHANGEABLE
    ) -> list[GenerationRequest]:
        """Return the requests as the hooks want them; each prompt is shown once for all its choices.

        model, user: as the request names them. allowed: fields that may change.
        Raises: InvalidArgument where log probabilities would show an output that hooks may change.
        """
        self._requests, self.call.model, self.call.user = requests, model, user
        sampling = requests[0].sampling
        if self._filtering and (sampling.log_probs or sampling.top_log_probs):
            raise InvalidArgument("logprobs", "must be left out: hooks of this gateway may change the output")
        found: list[GenerationRequest] = []
        for _, group in groupby(requests, key=lambda request: id(prompt_of(request))):
            choices = list(group)
            after = before = choices[0]
            for hook in self._hooks:
                if hook.has("request"):
                    check = partial(_checked, after, allowed)
                    with contextlib.suppress(HookFailed):  # a copy: a late call may still change what it was given
                        after = await hook.call("request", copy.deepcopy(after), self.call, check=check)
            if after is not before:
                choices = [_as_changed(choice, index, before, after) for index, choice in enumerate(choices)]
            found += choices
        self._requests = found
        return found

    async def output(self, item: ChoiceDelta) -> ChoiceDelta:
        """Return a delta as the hooks want it, and take note of its end."""
        choice, delta = item
        if delta.finish_reason:
            self._finish_reasons.append(delta.finish_reason.value)
            self._usages[choice] = delta.usage
        if not self._filtering:
            return item
        if choice not in self._outputs:
            self._outputs[choice] = ChoiceOutput(self._filtering, self.call)
        return ChoiceDelta(choice, await self._outputs[choice].changed(delta))


async def _ended(hook: LoadedHook, outcome: Outcome, call: Call) -> None:
    with contextlib.suppress(HookFailed, TridentError):  # it is logged and counted; the response has been sent
        await hook.call("end", outcome, call)


def _key(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise WrongValue(f"must return the name of a key or None, got {type(value).__name__}")
    return value


def _checked(before: GenerationRequest, allowed: frozenset[str], value: Any) -> GenerationRequest:
    if value is None:
        return before
    if not isinstance(value, GenerationRequest):
        raise WrongValue(f"must return a GenerationRequest or None, got {type(value).__name__}")
    try:
        after: GenerationRequest = _REQUEST.validate_python(vars(value)).validate()
        if not all(isinstance(message.get("role"), str) for message in after.messages or ()):
            raise InvalidArgument("messages", "must have roles")
    except (ValidationError, InvalidArgument, TypeError) as exc:  # of which the field is told, not the words
        field = exc.field if isinstance(exc, InvalidArgument) else ""
        if isinstance(exc, ValidationError):
            field = str(exc.errors(include_input=False)[0]["loc"][0])
        problem = f"{type(exc).__name__} of {field}" if field else type(exc).__name__
        raise WrongValue(f"must return a request that can be served: {problem}") from exc
    wrong = [name for name in vars(after) if name not in allowed and getattr(after, name) != getattr(before, name)]
    if wrong:
        raise WrongValue(f"may not change {', '.join(wrong)}; allowed here are {', '.join(sorted(allowed))}")
    return after


def _as_changed(
    choice: GenerationRequest, index: int, before: GenerationRequest, after: GenerationRequest
) -> GenerationRequest:
    """Return a choice with what a hook changed of its prompt's first one. Seeds stay apart; new ones count up."""
    changes = {name: getattr(after, name) for name in CHANGEABLE}
    seed, own, first = after.sampling.seed, choice.sampling.seed, before.sampling.seed
    if seed is not None:
        seed += index if own is None or first is None else own - first
        changes["sampling"] = dataclasses.replace(after.sampling, seed=seed % 2**64)
    return dataclasses.replace(choice, **changes)

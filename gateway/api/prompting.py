"""What happens to a chat before it is sent: the template that it names, and what is left out where it is too long."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, StrictStr

from clients.wire.request import MAX_REQUEST_ID
from contract.errors import EngineFailed, InvalidArgument, NotFound, PromptTooLong, TridentError
from contract.generation import GenerationRequest, SamplingParams
from gateway.admission.prompt_tokens import prompt_of, texts_of
from gateway.api.strict_model import LevelLimit, StrictModel
from gateway.choices import ChoiceDeltas, together
from gateway.config.policy import ContextRules, ModelRules
from gateway.config.settings import variable
from gateway.prompts import long_chat
from gateway.prompts.chat_tokens import ChatTokens, chat_tokens, context_length, context_limit, counted, prompt_bytes
from gateway.prompts.long_chat import Chat, Message
from gateway.prompts.registry import Registry
from gateway.prompts.template import Rendered, over_budget
from gateway.request_context import RequestContext
from gateway.service import Service
from gateway.tools import chat_format
from gateway.tools.cutter import ChoiceCutters, CutDeltas, CutterRules
from gateway.tools.vocabulary import vocabulary_of

_SUMMARY_TEXT = 24  # tokens around a summary in the system message, on the high side
_SUMMARY_ID = "-summary"
_LOG = logging.getLogger(__name__)


class PromptReference(StrictModel):
    """The template that a request names. id: its name, or NAME@VERSION. version: None: by the prompt's weights."""

    id: Annotated[StrictStr, Field(min_length=1, max_length=128)]
    version: Annotated[StrictStr, Field(min_length=1, max_length=64)] | None = None
    variables: Annotated[dict[StrictStr, Any], LevelLimit] | None = None

    @property
    def values(self) -> dict[str, Any]:
        """The variables. A text may be OpenAI's object ``{"type": "input_text", "text": …}``."""
        return {
            name: value["text"]
            if isinstance(value, dict) and value.keys() == {"type", "text"} and value["type"] == "input_text"
            else value
            for name, value in (self.variables or {}).items()
        }


def prepared(registry: Registry | None, reference: PromptReference, context: RequestContext) -> Rendered:
    """Return the template that a request names, rendered. Raises: InvalidArgument."""
    if registry is None:
        problem = f"is not supported: this gateway has no prompts ({variable('prompts')}); leave it out"
        raise InvalidArgument("prompt", problem)
    base = reference.id.partition("@")[0]
    version, template = registry.find(reference.id, reference.version, context.tenant, context.caller)
    return replace(template.render(reference.values), version=f"{base}@{version}")


async def weighed(used: Rendered, request: GenerationRequest, context: RequestContext) -> RequestContext:
    """Return the context with the template's version and what is over its budget. Raises: PromptTooLong."""
    notes, budgets = {**context.notes, "prompt": used.version}, used.template.budgets
    if budgets:
        messages = tuple((request.messages or ())[index] for index in used.own(request.messages or ()))
        own = texts_of(replace(request, messages=messages, tools=None))
        tokenizer = context.model.rules.tokenizer

        def count() -> str:
            return over_budget(budgets, used.tokens(lambda texts: counted(tokenizer, texts), own))

        if warning := await asyncio.to_thread(count):
            notes["prompt_warnings"] = warning
    return replace(context, notes=notes)


async def bounded(
    service: Service, requests: list[GenerationRequest], context: RequestContext, used: Rendered | None
) -> tuple[list[GenerationRequest], RequestContext]:
    """Return requests whose chat fits their model, and a context that tells what is left out. Raises: PromptTooLong."""
    request, rules, model = requests[0], context.model.rules.context, context.model.rules
    limit, messages = context_limit(model), request.messages
    if rules is None or limit is None or not messages or request.truncate_prompt_tokens is not None:
        return requests, context
    most = min(limit - request.max_tokens, rules.prompt_tokens or limit)
    if most < 1:
        return requests, context  # the replica says what max_tokens may be
    assert model.tokenizer is not None, "context_limit knows it"
    count, variables = chat_tokens(model.tokenizer), request.chat_template_kwargs

    def fits(chat: Chat, room: int = most) -> bool:
        return count.fits(chat, request.tools, variables, room)

    own = used.own(messages) if used is not None else range(len(messages))
    order = long_chat.drop_order(messages, rules.policy != "drop_oldest", own)
    summarises = rules.policy == "summarise"
    room = most - rules.summary_tokens - _SUMMARY_TEXT if summarises else most

    def cut() -> tuple[list[Message], list[Message]] | None:
        if fits(messages):
            return list(messages), []
        shorter = long_chat.shortened(messages, order, lambda chat: fits(chat, room)) if room > 0 else None
        return shorter or (long_chat.shortened(messages, order, fits) if summarises else None)

    try:
        found = await asyncio.to_thread(cut)
    except (InvalidArgument, NotFound):
        return requests, context  # the replica tells what is wrong with it
    if found is None:
        problem = f"must have at most {most} tokens, and what {rules.policy} may not leave out has more"
        raise PromptTooLong("messages", problem)
    stays, dropped = found
    if not dropped:
        return requests, context
    done, began_s = str(rules.policy), time.monotonic()
    max_s = min(rules.summary_timeout_s, (request.timeout_s or rules.summary_timeout_s) / 2)
    if summarises:
        try:
            text, tokens = await asyncio.wait_for(_summary(service, rules, dropped, context, max_s), max_s)
            shorter = long_chat.with_summary(stays, text)
            if not text.strip() or not await asyncio.to_thread(fits, shorter):
                raise EngineFailed("the summary is empty or too long")
            stays, done = shorter, f"summarise; summary_tokens={tokens}"
        except (TridentError, asyncio.TimeoutError) as exc:
            _LOG.warning("a long chat has no summary: %s", type(exc).__name__, extra={"fields": {}})  # no text of it
            found = await asyncio.to_thread(long_chat.shortened, messages, order, fits)
            assert found is not None, "the chat with room for a summary fits"
            (stays, dropped), done = found, f"keep_system; instead_of=summarise; reason={type(exc).__name__}"
    texts = texts_of(replace(request, messages=tuple(dropped), tools=None))
    lost = await asyncio.to_thread(counted, model.tokenizer, texts)
    note = f"{done}; dropped_messages={len(dropped)}; dropped_tokens={lost}"
    kept = tuple(stays)  # one object: what has the same prompt is told by identity
    left_s = request.timeout_s and request.timeout_s - (time.monotonic() - began_s)
    requests = [replace(one, messages=kept, timeout_s=left_s) for one in requests]
    return requests, replace(context, notes={**context.notes, "context": note})


async def with_room(requests: list[GenerationRequest], model: ModelRules) -> list[GenerationRequest]:
    """Lower a default ``max_tokens`` to what prompts leave of the context; a replica refuses where it is unknown."""
    if model.tokenizer is None or requests[0].truncate_prompt_tokens == -1:
        return requests
    try:
        limit = context_length(model)
        if limit is None or max(map(prompt_bytes, requests)) + requests[0].max_tokens <= limit // 2:
            return requests  # half of it is more than any template adds
        return await asyncio.to_thread(_with_room, requests, chat_tokens(model.tokenizer), limit)
    except (InvalidArgument, NotFound):
        return requests  # the replica tells what is wrong with it


def _with_room(requests: list[GenerationRequest], tokens: ChatTokens, limit: int) -> list[GenerationRequest]:
    prompts = {id(prompt_of(request)): request for request in requests}
    counts = {prompt: tokens.prompt(request, limit - 1) for prompt, request in prompts.items()}
    found = []
    for request in requests:
        kept, count = request.truncate_prompt_tokens, counts[id(prompt_of(request))]
        if kept is not None:
            count = min(kept, limit if count is None else count)
        if count is not None and count < limit < count + request.max_tokens:
            request = replace(request, max_tokens=limit - count)
        found.append(request)
    return found


async def _summary(
    service: Service, rules: ContextRules, dropped: list[Message], context: RequestContext, timeout_s: float
) -> tuple[str, int]:
    """Return a summary and its tokens, charged to the caller. Raises: TridentError."""
    assert rules.summary_model is not None, "checked by ContextRules"
    inner = replace(
        context,
        tenant=replace(context.tenant, models=()),  # the operator chose the model, whatever the caller may name
        operation="chat",
        request_id=f"{context.request_id[: MAX_REQUEST_ID - len(_SUMMARY_ID)]}{_SUMMARY_ID}",
        notes={},
    )

    def request_of(messages: Chat) -> GenerationRequest:
        chat = tuple(long_chat.summary_prompt(messages, rules.summary_tokens // 2))
        sampling = SamplingParams(temperature=0.0)
        return GenerationRequest(messages=chat, max_tokens=rules.summary_tokens, sampling=sampling, timeout_s=timeout_s)

    inner = await service.routed(rules.summary_model, [request_of(dropped)], inner)
    limit, tokenizer = context_limit(inner.model.rules), inner.model.rules.tokenizer
    if limit is not None and tokenizer is not None:
        count, order = chat_tokens(tokenizer), [[index] for index in range(len(dropped) - 1)]

        def fits(chat: Chat) -> bool:
            return count.fits(request_of(chat).messages or (), None, None, limit - rules.summary_tokens)

        newest = await asyncio.to_thread(long_chat.shortened, dropped, order, fits)
        if newest is None:
            raise PromptTooLong("messages", "must fit the model that summarises them")
        dropped = newest[0]
    choices = await service.choices([request_of(dropped)], inner)
    deltas: ChoiceDeltas = aiter(choices)
    form = chat_format.configured(service.settings, inner.model.rules)
    if form.reasoning != chat_format.NONE:  # what the model thought is no part of the summary
        cutters = ChoiceCutters(CutterRules(form, reasoning=True), vocabulary_of(tokenizer), inner.request_id)
        deltas = CutDeltas(deltas, cutters)
    try:
        [completion] = await together(deltas, inner.request_id)
    finally:
        choices.close()
    return completion.text, completion.usage.output_tokens if completion.usage else 0

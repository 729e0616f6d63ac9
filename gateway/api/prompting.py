"""What the gateway does to a chat before it is sent: the template that it names."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, StrictStr

from contract.errors import InvalidArgument
from contract.generation import GenerationRequest
from gateway.admission.prompt_tokens import COUNTED_AT_ONCE, texts_of
from gateway.api.strict_model import StrictModel
from gateway.config.settings import variable
from gateway.prompts.chat_tokens import counted
from gateway.prompts.registry import Registry
from gateway.prompts.template import Rendered, Template, over_budget
from gateway.request_context import RequestContext


class PromptReference(StrictModel):
    """The template that a request names, as OpenAI's Responses do.

    id: its name, or NAME@VERSION. version: ``1.2.0``, ``1.2``, ``1`` or ``latest``; None: by the prompt's weights.
    """

    id: Annotated[StrictStr, Field(min_length=1, max_length=128)]
    version: Annotated[StrictStr, Field(min_length=1, max_length=64)] | None = None
    variables: dict[StrictStr, Any] | None = None

    @property
    def values(self) -> dict[str, Any]:
        """The variables. A text may be OpenAI's object ``{"type": "input_text", "text": …}``."""
        return {
            name: value["text"]
            if isinstance(value, dict) and value.keys() == {"type", "text"} and value["type"] == "input_text"
            else value
            for name, value in (self.variables or {}).items()
        }


class Prepared:
    """The template of one request, rendered."""

    def __init__(self, version: str, template: Template, rendered: Rendered) -> None:
        self.version, self.template, self.rendered = version, template, rendered

    def around(self, messages: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
        """Return the template's messages with the request's own in their place."""
        return (*self.rendered.before, *messages, *self.rendered.after)


def prepared(registry: Registry | None, reference: PromptReference, context: RequestContext) -> Prepared:
    """Return the template that a request names. Raises: InvalidArgument."""
    if registry is None:
        problem = f"is not supported: this gateway has no prompts ({variable('prompts')}); leave it out"
        raise InvalidArgument("prompt", problem)
    base = reference.id.partition("@")[0]
    version, template = registry.find(reference.id, reference.version, context.tenant, context.caller)
    return Prepared(f"{base}@{version}", template, template.render(reference.values))


async def weighed(used: Prepared, request: GenerationRequest, context: RequestContext) -> RequestContext:
    """Return the context with the template's version and what of it is over its budget.

    request: with the messages of ``Prepared.around``; the tokens are those of the context's model.
    Raises: PromptTooLong where a budget refuses.
    """
    notes, budgets = {**context.notes, "prompt": used.version}, used.template.budgets
    if budgets:
        first, last = len(used.rendered.before), len(request.messages or ()) - len(used.rendered.after)
        own = texts_of(replace(request, messages=(request.messages or ())[first:last], tools=None))
        tokenizer = context.model.rules.tokenizer

        def count() -> str:
            return over_budget(budgets, used.rendered.tokens(lambda texts: counted(tokenizer, texts), own))

        size = sum(map(len, own)) + sum(len(text) for _, text in used.rendered.parts)
        if warning := count() if size <= COUNTED_AT_ONCE else await asyncio.to_thread(count):
            notes["prompt_warnings"] = warning
    return replace(context, notes=notes)

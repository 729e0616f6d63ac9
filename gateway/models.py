"""The models of a gateway: which one a request names, what it can do, and the choice of a router among several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from clients.wire.connection import DEFAULT_MODEL
from contract import packed_delta
from contract.errors import InvalidArgument, ModelNotFound
from contract.generation import GenerationRequest
from gateway.admission.prompt_tokens import PromptTokens, load_tokenizer
from gateway.config.policy import ModelPrice, ModelRules
from gateway.config.rules import integer
from gateway.config.settings import Settings
from gateway.config.tenant import Tenant

HEADER = "x-trident-model"  # of responses: the model that serves the request
ESCALATE = "x-trident-escalate"  # of requests: how many sizes larger than the smallest model that fits
_MOST_ESCALATED = 9
_PLAIN = ModelRules.model_construct()


@dataclass(frozen=True)
class ServedModel:
    """The model that serves a request.

    name: in responses, with the adapter. adapter: LoRA adapter of the engine; "" for none.
    pool: that its requests are pinned to, or its name as a group of pools; "" for any public pool.
    prompt_tokens: counts its prompts; None for the gateway's own.
    """

    name: str = ""
    pool: str = ""
    adapter: str = ""
    rules: ModelRules = _PLAIN
    prompt_tokens: PromptTokens | None = field(default=None, repr=False, compare=False)

    @property
    def price(self) -> ModelPrice | None:
        """What the caller pays; None for nothing."""
        return self.rules.adapter_prices.get(self.adapter, self.rules.price)

    def adapted(self, adapter: str) -> ServedModel:
        """Return this model with one of its adapters."""
        return replace(self, name=f"{self.name}:{adapter}", adapter=adapter)

    def can(self, needs: frozenset[str]) -> bool:
        return self.rules.capabilities is None or needs <= {*self.rules.capabilities}

    def describe(self, currency: str) -> dict[str, Any]:
        """Return the entry of ``GET /v1/models``: OpenAI's fields, and what the configuration says of the model."""
        entry: dict[str, Any] = {"id": self.name, "object": "model", "created": 0, "owned_by": "trident"}
        rules, fields = self.rules, ("aliases", "router", "capabilities", "context_length")
        entry |= {name: value for name in fields if (value := getattr(rules, name))}
        if self.price is not None:
            entry["price"] = {**self.price.model_dump(exclude_none=True), "per_tokens": 1000, "currency": currency}
        if self.adapter:
            entry["parent"] = self.name.removesuffix(f":{self.adapter}")
        return entry


def needs_of(requests: Sequence[GenerationRequest]) -> frozenset[str]:
    """Return the capabilities that ``requests`` need."""
    needs = {"completions" if request.messages is None else "chat" for request in requests}
    needs |= {"tools" for request in requests if request.tools} | {"schema" for request in requests if request.guide}
    return frozenset(needs)


class Models:
    """The table of models, replaced when the configuration changes; requests keep the ``ServedModel`` they got.

    settings: name the only model without a table. ``triton_model`` is a further name of it, or of the table's first
        model, as is that of the packed ensemble beside the ensemble.
    reported: return the adapters that the replicas of a ``ServedModel.pool`` report, for models that name none.
    """

    def __init__(self, settings: Settings, reported: Callable[[str], tuple[str, ...]] = lambda pool: ()) -> None:
        self._settings, self._reported = settings, reported
        self._models: dict[str, ServedModel] = {}
        self.change({})

    def change(self, table: Mapping[str, ModelRules]) -> None:
        """Replace the table; an empty one is the default model alone."""
        old, self.configured = self._models, bool(table)
        self._models = {}
        default, settings = self._settings.model, self._settings
        for name, rules in (table or {default: _PLAIN.model_copy(update={"tokenizer": settings.tokenizer})}).items():
            # A name with a space is no pool's: it stands for several pools, or for none.
            pool = (rules.pools[0] if len(rules.pools) == 1 else f"model {name}") if table else ""
            kept = old[name] if name in old and old[name].rules.tokenizer == rules.tokenizer else None
            tokens = kept.prompt_tokens if kept else None
            tokens = tokens or PromptTokens(load_tokenizer(rules.tokenizer) if rules.tokenizer else None)
            self._models[name] = ServedModel(name, pool, "", rules, tokens)
        first = default if default in self._models else next(iter(self._models))
        self._names = {settings.triton_model: first}
        if settings.triton_model == DEFAULT_MODEL:
            self._names[packed_delta.MODEL] = first
        self._names |= {alias: name for name, model in self._models.items() for alias in model.rules.aliases}
        self._names |= {name: name for name in self._models}

    def close(self) -> None:
        for model in self._models.values():
            if model.prompt_tokens is not None:
                model.prompt_tokens.close()

    @property
    def pools(self) -> dict[str, tuple[str, ...]]:
        """The pools of each ``ServedModel.pool``; of a router those of its models."""
        pools = {name: model.rules.pools for name, model in self._models.items()}
        pools |= {
            name: tuple(pool for listed_name in model.rules.router for pool in pools[listed_name])
            for name, model in self._models.items()
            if model.rules.router
        }
        return {model.pool: pools[name] for name, model in self._models.items() if model.pool}

    def of(self, tenant: Tenant) -> list[ServedModel]:
        """Return the models that a tenant may use, adapters included."""
        every = list(self._models.values())
        every += [model.adapted(adapter) for model in every for adapter in self._adapters(model)]
        return [model for model in every if self._may_use(model, tenant)]

    def find(self, name: str, tenant: Tenant) -> ServedModel:
        """Return the model of a name. Raises ModelNotFound, also for one that the tenant may not use."""
        base, _, adapter = name.partition(":")
        model = self._models.get(self._names.get(base, ""))
        if model is not None and adapter and adapter in self._adapters(model):
            model = model.adapted(adapter)
        elif name != base:
            model = None
        if model is None or not self._may_use(model, tenant):
            there = ", ".join(candidate.name for candidate in self.of(tenant)) or "none for this key"
            raise ModelNotFound(f"the model {name!r:.100} does not exist; there is {there}")
        return model

    async def serving(
        self,
        name: str,
        requests: Sequence[GenerationRequest],
        tenant: Tenant,
        headers: Mapping[str, str],
        ready: Callable[[ServedModel], bool],
        default_length: bool = False,
    ) -> ServedModel:
        """Return the model that serves ``requests`` under ``name``: the model itself, or the choice of a router.

        A router takes the smallest of its models that the tenant may use, that has the capabilities and the context,
        and that is ready; ``x-trident-escalate: N`` skips the N smallest of those that fit.
        default_length: ``max_tokens`` is a default, which is lowered where no model has room for all of it.
        Raises: ModelNotFound; InvalidArgument if no model fits, or for the header.
        """
        model, needs = self.find(name, tenant), needs_of(requests)
        escalated = integer(ESCALATE, headers[ESCALATE], _MOST_ESCALATED) if ESCALATE in headers else 0
        if not model.rules.router:
            self._check(model, [model], needs, tenant)
            return model
        listed = [self._models[listed_name] for listed_name in model.rules.router]
        listed = [candidate for candidate in listed if self._may_use(candidate, tenant)]
        able = self._check(model, listed, needs, tenant)
        fitting = [candidate for candidate in able if await _fits(candidate, requests, tenant)]
        if not fitting and default_length:
            shorter = [replace(request, max_tokens=1) for request in requests]
            fitting = [candidate for candidate in able if await _fits(candidate, shorter, tenant)][-1:]
        if not fitting:
            most = max(candidate.rules.context_length or 0 for candidate in able)
            problem = f"must have room for the prompt and max_tokens, got {name} with at most {most} tokens"
            raise InvalidArgument("model", problem)
        larger = fitting[min(escalated, len(fitting) - 1) :]
        return next((candidate for candidate in larger if ready(candidate)), larger[0])

    def _check(
        self, named: ServedModel, candidates: list[ServedModel], needs: frozenset[str], tenant: Tenant
    ) -> list[ServedModel]:
        able = [model for model in candidates if model.can(needs)]
        if not able:
            others = [model.name for model in self.of(tenant) if not model.rules.router and model.can(needs)]
            allowed = ", ".join(others) or "no model of this gateway"
            raise InvalidArgument("model", f"must be one with {', '.join(sorted(needs))}: {allowed}; got {named.name}")
        return able

    def _adapters(self, model: ServedModel) -> tuple[str, ...]:
        pooled = not self.configured or model.rules.pools  # neither a router nor an upstream
        return model.rules.adapters or (self._reported(model.pool) if pooled else ())

    def _may_use(self, model: ServedModel, tenant: Tenant) -> bool:
        if not tenant.models:
            return True
        base = model.name.partition(":")[0]
        names = {model.name, *(name for name, known in self._names.items() if known == base)}
        return not names.isdisjoint(tenant.models)


async def _fits(model: ServedModel, requests: Sequence[GenerationRequest], tenant: Tenant) -> bool:
    """Return whether prompt and output of each request fit in the model's context, as far as is known."""
    most = model.rules.context_length
    if most is None or model.prompt_tokens is None:
        return True
    need = await model.prompt_tokens.need(requests, tenant.name)
    return all(count.likely + request.max_tokens <= most for count, request in zip(need.counts, requests, strict=True))

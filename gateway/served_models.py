"""The models that a configuration serves, and the checks of the files that they need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from contract.errors import InvalidArgument
from gateway.admission.prompt_tokens import load_tokenizer
from gateway.config.policy import Capability, ModelRules, Policy
from gateway.config.pools import Pools
from gateway.config.settings import Settings, variable
from gateway.prompts.chat_tokens import context_limit

ENCODES: tuple[Capability, ...] = ("embeddings", "rerank")  # of an encoder, where the file does not say


def table(settings: Settings, policy: Policy, pools: Pools) -> dict[str, ModelRules]:
    """Return the table of models: of the file, else of the environment.

    A model of the file that names no tokenizer has the one that the environment names for its pools.
    """
    named = {pool: Path(path) for pool, path in settings.models.items()}
    if settings.tokenizer and len(pools.sources) == 1:
        named = {pool: settings.tokenizer for pool in pools.sources}
    found = {}
    for name, rules in (policy.models or {pool: ModelRules(pools=(pool,)) for pool in settings.models}).items():
        update: dict[str, Any] = {}
        if rules.capabilities is None and rules.pools and pools.encoders.issuperset(rules.pools):
            update["capabilities"] = ENCODES
        tokenizers = {named.get(pool) for pool in rules.pools}
        if rules.tokenizer is None and len(tokenizers) == 1:
            update["tokenizer"] = tokenizers.pop()
        found[name] = rules.model_copy(update=update)
    return found


def encoder(pool: str) -> ModelRules:
    """Return the rules of an encoder that no model of the file names; its name is its pool's."""
    return ModelRules(pools=(pool,), capabilities=ENCODES)


def check(settings: Settings, policy: Policy, pools: Pools) -> None:
    """Load the models' tokenizers, and check that samples have a folder. Raises InvalidArgument."""
    if policy.samples is not None and policy.samples.keeps and settings.samples is None:
        raise InvalidArgument("samples", f"keeps text and needs {variable('samples')}, the folder for it")
    for name, rules in table(settings, policy, pools).items():
        if rules.tokenizer is not None:
            try:
                load_tokenizer(rules.tokenizer)
            except InvalidArgument as exc:
                raise InvalidArgument(f"models.{name}.tokenizer", exc.problem) from exc
        if rules.context is not None and context_limit(rules) is None:
            problem = "must have a tokenizer with a chat template, and context_length or a manifest.json beside it"
            raise InvalidArgument(f"models.{name}.context", problem)

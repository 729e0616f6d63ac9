"""Declare what ``generate`` and the clients' constructors take, once for all of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from clients.wire.connection import TLS
from clients.wire.retries import RetryBudget, RetryPolicy
from contract.generation import Guide


class GenerateArguments(TypedDict, total=False):
    """The keyword arguments of ``generate`` and ``complete``. What is left out takes the default in brackets.

    messages: a chat in place of the prompt, oldest message first; the server applies the model's template.
    tools: functions that the model may call, as OpenAI's ``tools``, or their JSON; only with ``messages`` [none].
    chat_template_kwargs: variables of the model's chat template, such as ``{"enable_thinking": False}`` [none].
    input_ids: token ids in place of the prompt; no special tokens are added.
    adapter: name of one of the engine's LoRA adapters [the model alone].
    truncate_prompt_tokens: keep the prompt's last so many tokens, -1 for as many as fit [refuse a long prompt].
    continue_ids: ids of the output that were generated already; what follows them is returned [none].
    max_tokens: new tokens at most; 0 with ``echo`` for the prompt alone [128].
    stop: strings that end the text and are not part of it [none].
    stop_token_ids: the same as token ids [none].
    bad_words: strings that are not generated; refused by engines that cannot promise it [none].
    stream: whether tokens come as they are generated, or all in one response [True].
    echo: whether the text begins with the prompt [False].
    skip_special_tokens: whether special tokens are left out of the text [True].
    timeout_s: seconds for the whole request, queueing and retries included [600].
    request_id: at most 256 printable ASCII characters, the argument of ``stop`` [a random one].
    json_schema: a JSON schema, or its text, that the output must match [none].
    guide: another form of it, such as ``Guide("regex", "[0-9]+")``, in place of json_schema [none].
    temperature: 0 takes the likeliest token [1].
    top_k: tokens to choose from, 0 for all [0].
    top_p: the likeliest tokens whose probabilities sum to it, in (0, 1] [1].
    min_p: drop tokens below this fraction of the likeliest one's probability, in [0, 1) [0].
    repetition_penalty, presence_penalty, frequency_penalty: the usual definitions [1, 0, 0].
    seed: equal seeds and arguments give equal text on one machine [none].
    min_tokens: no end before so many new tokens [0].
    ignore_eos: continue to ``max_tokens`` past the model's end tokens [False].
    log_probs: return each token's log probability [False].
    top_log_probs: return those of so many likeliest tokens, 0 to 20 [0].
    prompt_log_probs: with ``echo`` and ``log_probs``, return both for the prompt's tokens too; the first has 0 [False].
    """

    messages: Iterable[Mapping[str, Any]] | None
    tools: str | Iterable[Mapping[str, Any]] | None
    chat_template_kwargs: str | Mapping[str, Any] | None
    input_ids: Iterable[int] | None
    truncate_prompt_tokens: int | None
    adapter: str
    continue_ids: Iterable[int]
    max_tokens: int
    stop: str | Iterable[str]
    stop_token_ids: Iterable[int]
    bad_words: Iterable[str]
    stream: bool
    echo: bool
    skip_special_tokens: bool
    timeout_s: float | None
    request_id: str
    json_schema: str | Mapping[str, Any] | bool | None
    guide: Guide | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    min_tokens: int
    ignore_eos: bool
    log_probs: bool
    top_log_probs: int
    prompt_log_probs: bool


class ClientOptions(TypedDict, total=False):
    """The keyword arguments of every client.

    model: the model to use ["ensemble"; for streams "ensemble_packed", which says the same, where the server has it].
    tls: True for TLS with the system's certificates, or ``TLS(...)`` [no TLS].
    api_key: sent as ``authorization: Bearer ...`` [none].
    metadata: added to every call, keys in lower case [none].
    retry: how requests that have produced no token are retried [``RetryPolicy()``].
    budget: how many retries all requests together may make [``RetryBudget()``; balanced: with a reserve of 100].
    rng: source of the random waits between retries.
    """

    model: str
    tls: TLS | bool | None
    api_key: str
    metadata: Mapping[str, str] | Iterable[tuple[str, str]]
    retry: RetryPolicy | None
    budget: RetryBudget | None
    rng: random.Random | None

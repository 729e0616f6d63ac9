"""Fan out to retrieval, tools and models, each with a timeout, under one deadline, one token budget and one trace.

A branch that is late or fails is left out; what it has written by then is kept. The answer says which branches it had.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import openai

from examples.rag.citations import Checked, check, extract
from examples.rag.index import Index, Passage
from examples.rag.tools import Tables

TOKEN_CHARACTERS = 3  # at least, of a source: docs have many names and signs
PROMPT_TOKENS = 120  # of a prompt without its sources
OUTPUT_TOKENS = 64  # of an answer at most
GROUNDED = 0.6  # of a model's answer at least
FINISHING_S = 0.2  # kept of the deadline to put the answer together


@dataclass
class Branch:
    """What became of one branch. outcome: done, late, or failed with the error's name."""

    name: str
    outcome: str = "done"
    seconds: float = 0.0
    tokens: int = 0


@dataclass
class Answer:
    """sources: in the order of the citations. model: "" where the sources answer by themselves."""

    question: str
    checked: Checked
    model: str
    sources: list[Passage]
    branches: list[Branch]
    trace_id: str
    seconds: float

    @property
    def partial(self) -> bool:
        """Whether a branch is missing."""
        return any(branch.outcome != "done" for branch in self.branches)


@dataclass
class Orchestrator:
    """models: asked at once; the answer that the sources support best is taken.

    delays_s: seconds by which a branch of that name is late, to see what happens then.
    """

    client: openai.AsyncOpenAI
    index: Index
    tables: Tables
    models: Sequence[str]
    delays_s: Mapping[str, float]

    async def answer(self, question: str, seconds: float = 30.0, tokens: int = 1200) -> Answer:
        """Return an answer within ``seconds``, from prompts and outputs of at most ``tokens`` in all."""
        began_s, trace_id = time.monotonic(), secrets.token_hex(16)
        until_s = began_s + seconds - FINISHING_S
        branches: dict[str, Branch] = {}

        async def run(name: str, work: Callable[[openai.AsyncOpenAI], Awaitable[list[Passage]]], share: float) -> Any:
            """Return what a branch found in at most its share of the time that is left; [] if it is late or fails."""
            branch, start_s = branches.setdefault(name, Branch(name)), time.monotonic()
            timeout_s = max(0.001, (until_s - start_s) * share)
            headers = {"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"}
            headers["x-trident-timeout-s"] = f"{timeout_s:.3f}"  # the gateway frees the engine then, too
            client = self.client.with_options(default_headers=headers, timeout=timeout_s, max_retries=0)

            async def delayed() -> list[Passage]:
                await asyncio.sleep(self.delays_s.get(name, 0.0))
                return await work(client)

            found: list[Passage] = []
            try:
                found = await asyncio.wait_for(delayed(), timeout_s)
            except (asyncio.TimeoutError, openai.APITimeoutError):
                branch.outcome = "late"
            except openai.APIError as exc:
                branch.outcome = "late" if getattr(exc, "status_code", 0) == 504 else f"failed: {type(exc).__name__}"
            branch.seconds = time.monotonic() - start_s
            return found

        retrieved, facts = await asyncio.gather(
            run("retrieval", lambda client: self.index.search(client, question, 4), 0.4),
            run("tools", lambda client: self.tables.look_up(question), 0.2),
        )
        each = tokens // len(self.models)  # of each model's prompt and output
        sources = list(dict.fromkeys([*facts[:2], *retrieved]))
        texts = [f"{source.heading}: {source.text}" for source in sources]
        while texts and sum(map(len, texts)) // TOKEN_CHARACTERS > each // 2:
            texts.pop()
        most = min(OUTPUT_TOKENS, max(16, each - PROMPT_TOKENS - sum(map(len, texts)) // TOKEN_CHARACTERS))
        drafts: dict[str, str] = dict.fromkeys(self.models, "")
        variables = {"question": question[:2000], "sources": texts}

        async def draft(model: str, client: openai.AsyncOpenAI) -> list[Passage]:
            prompt: Any = {"id": "answer", "version": "1", "variables": variables}
            fields: dict[str, Any] = {"prompt": prompt, "max_output_tokens": most, "store": False}
            async with await client.responses.create(model=model, **fields, stream=True) as stream:
                async for event in stream:
                    if event.type == "response.output_text.delta":
                        drafts[model] += event.delta
                    elif event.type in ("response.completed", "response.incomplete"):
                        branches[f"model {model}"].tokens = event.response.usage.total_tokens
                    elif event.type == "response.failed":
                        raise openai.APIError("the response failed", stream.response.request, body=None)
            return []

        await asyncio.gather(*(run(f"model {model}", partial(draft, model), 1.0) for model in self.models))
        checked = {model: check(text, texts) for model, text in drafts.items() if text.strip()}
        best = max(checked, key=lambda model: (bool(checked[model].cited), checked[model].grounded), default="")
        result = checked.get(best)
        if not result or not result.cited or result.grounded < GROUNDED or (facts and 1 not in result.cited):
            best, result = "", check(extract(question, texts), texts)
        return Answer(question, result, best, sources, [*branches.values()], trace_id, time.monotonic() - began_s)

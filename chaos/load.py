"""Open load: requests at random moments over both protocols, whatever becomes of those before; how each one ended."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp
import grpc.aio
from tokenizers import Tokenizer

from clients import AsyncClient
from clients.wire import infer_request
from clients.wire.channel import AsyncChannel
from clients.wire.connection import Connection
from clients.wire.infer_response import ResponseDecoder
from clients.wire.protobuf import WireError
from contract import errors
from contract.generation import FinishReason, GenerationRequest, SamplingParams

CUT = "cut"  # the connection broke, or there was none
LATE = "no end"  # nothing ended the stream in time
LEFT = "left"  # its caller left
TENANTS = ("plain", "metered", "capped")
# Of error events, which have no status of their own.
_CODES = {"rate_limit_exceeded": 429, "unavailable": 503, "deadline_exceeded": 504, "engine_failed": 500}
LENGTHS = (4, 12, 32, 64, 160)
LONG, LEAVING = 32, 0.4  # this part of the callers that ask for so many tokens leave, a quarter of them at once
AT_ONCE_S = 0.05
REPEATED, REPEATED_S = 0.5, 0.5  # this part of what `metered` asks over HTTP is asked again, within so many seconds
# What an HTTP request asks beside its text, which stays as it is; a third asks nothing.
SHAPES = ("", "", "stop", "stop", "logprobs", "whole")
STOPS = ["number of the moon", "of the numbers"]  # never come, and the demo's texts often begin them
BURSTS_PER_S, BURST = 0.25, 12  # so many requests at once, and half of their callers leave at once: many still wait


@dataclass(frozen=True)
class Prompt:
    """tenant: the only one that sends it."""

    tenant: str
    text: str
    max_tokens: int


PROMPTS = tuple(
    Prompt(tenant, f"def {tenant}_{length}(values):\n    # of {tenant} number {number}\n", length)
    for number, tenant in enumerate(TENANTS)
    for length in LENGTHS
)


def moments(seed: int, duration_s: float, rate: float) -> list[tuple[float, bool]]:
    """Return when each request is sent, in seconds, and whether it is one of a burst."""
    found = []
    for kind, per_s, count in (("one", rate, 1), ("burst", BURSTS_PER_S, BURST)):
        source, at_s = random.Random(f"{seed} {kind}"), 0.0
        while (at_s := at_s + source.expovariate(per_s)) < duration_s:
            found += [(at_s, kind == "burst")] * count
    return sorted(found)


class Left(Exception):
    """The caller has read enough."""


@dataclass
class Outcome:
    """How a request ended. Times are seconds of the monotonic clock.

    ends: messages that end the stream, one by right. late_text: text behind the first of them, and any line behind
    the stream's last one.
    error: name of the error's class, CUT, LATE, LEFT, or "". reason: why its tokens ended, "" if they did not.
    tokens: prompt and output tokens of the usage, of a caller that left those of the gateway's log; None without.
    logged, logged_s: those of the gateway's log, and its seconds from the arrival; None without a line, or for a
    reused response.
    leaves: characters after which the caller leaves, 0: AT_ONCE_S after it asked.
    received: tokens that came for certain. first_s: when the first message with any came, 0: none.
    key: the Idempotency-Key, which is the id of the request that it repeats, or its own; "" without.
    shape: of SHAPES. scores: log probabilities of tokens that came.
    """

    prompt: Prompt
    protocol: str
    gateway: str
    sent_s: float
    ended_s: float = 0.0
    text: str = ""
    ends: int = 0
    late_text: str = ""
    error: str = ""
    message: str = ""
    tokens: tuple[int, int] | None = None
    reason: str = ""
    id: str = ""
    leaves: int | None = None
    received: int = 0
    first_s: float = 0.0
    key: str = ""
    logged: tuple[int, int] | None = None
    logged_s: float = 0.0
    shape: str = ""
    scores: int = 0

    @property
    def repeats(self) -> bool:
        """Whether the same response was asked for before."""
        return self.key not in ("", self.id)

    @property
    def ok(self) -> bool:
        return not self.error

    def add(self, text: str, tokens: int) -> None:
        """Take over a message. Raises Left."""
        if self.ends:
            self.late_text += text
        self.text += text
        self.received += tokens
        if self.received and not self.first_s:
            self.first_s = time.monotonic()
        if self.leaves and len(self.text) >= self.leaves:
            raise Left

    def fail(self, error: str, message: str) -> None:
        self.error, self.message = self.error or error, self.message or message[:300]

    def __str__(self) -> str:
        how = f"{self.error}: {self.message}" if self.error else f"{len(self.text)} characters, {self.ends} ends"
        what = f"{self.id}, {self.prompt.tenant} {self.prompt.max_tokens} tokens {self.shape}".rstrip()
        return f"{what}, {self.protocol} at {self.gateway}: {how}"


@dataclass
class Load:
    """http, grpc: HOST:PORT of each gateway by name. keys: API key of each tenant. outcomes: in the order sent.

    patience_s: in which every stream must end. name: what its requests' ids begin with.
    stored: (seconds, what is wrong) of stored responses that a tenant could not read, or another one could.
    """

    http: Mapping[str, str]
    grpc: Mapping[str, str]
    keys: Mapping[str, str]
    patience_s: float = 40.0
    name: str = "chaos"
    outcomes: list[Outcome] = field(default_factory=list)
    stored: list[tuple[float, str]] = field(default_factory=list)

    async def run(self, seed: int, duration_s: float, rate: float) -> None:
        """Send requests for ``duration_s`` and wait for the end of all."""
        source, leaving, repeating = (random.Random(f"{seed}{what}") for what in ("", " leaving", " repeating"))
        shaping = random.Random(f"{seed} shaping")
        tasks, gateways, begun_s = [], sorted(self.http), time.monotonic()
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            for number, (at_s, is_of_burst) in enumerate(moments(seed, duration_s, rate), len(self.outcomes)):
                await asyncio.sleep(begun_s + at_s - time.monotonic())
                prompt, protocol = source.choice(PROMPTS), source.choice(("http", "grpc"))
                gateway, name = source.choice(gateways), f"{self.name}-{number}"
                outcome = Outcome(prompt, protocol, gateway, 0.0, id=name)
                if is_of_burst:
                    outcome.leaves = leaving.choice((0, None))
                elif prompt.max_tokens >= LONG and leaving.random() < LEAVING:
                    outcome.leaves = leaving.choice((0, 1, 1, 1)) * leaving.randint(1, prompt.max_tokens // 2)
                if protocol == "http":
                    shape = shaping.choice(SHAPES)
                    outcome.shape = shape if shape != "whole" or outcome.leaves is None else ""
                if protocol == "http" and prompt.tenant == "metered" and outcome.leaves is None:
                    if repeating.random() < REPEATED:
                        outcome.key = name
                        again = dataclasses.replace(outcome, id=f"{name}-again", gateway=repeating.choice(gateways))
                        after_s = repeating.uniform(0, REPEATED_S)
                        tasks.append(asyncio.create_task(self._send(again, session, after_s)))
                tasks.append(asyncio.create_task(self._send(outcome, session)))
                if number % 8 == 0:
                    tasks.append(asyncio.create_task(self._store(outcome.gateway, session)))
            await asyncio.gather(*tasks)

    async def _send(self, outcome: Outcome, session: aiohttp.ClientSession, after_s: float = 0.0) -> None:
        await asyncio.sleep(after_s)
        outcome.sent_s = time.monotonic()
        self.outcomes.append(outcome)
        ask = self._over_http(outcome, session) if outcome.protocol == "http" else self._over_grpc(outcome)
        patience_s = AT_ONCE_S if outcome.leaves == 0 else self.patience_s
        try:
            await asyncio.wait_for(ask, patience_s)
        except Left:
            outcome.fail(LEFT, f"after {len(outcome.text)} characters")
        except asyncio.TimeoutError:
            if outcome.leaves == 0:
                outcome.fail(LEFT, "at once")
            outcome.fail(LATE, f"{outcome.ends} ends after {self.patience_s:.0f} s, {len(outcome.text)} characters")
        except (aiohttp.ClientError, OSError) as exc:
            outcome.fail(CUT, repr(exc))
        except (ValueError, KeyError, TypeError, WireError) as exc:
            outcome.fail("Malformed", repr(exc))
        outcome.ended_s = time.monotonic()

    async def _store(self, gateway: str, session: aiohttp.ClientSession) -> None:
        """Store a response at a gateway; its tenant can read it there, another one cannot."""
        url, body = f"http://{self.http[gateway]}/v1/responses", {"model": "demo", "input": "x", "max_output_tokens": 4}
        own, other = ({"authorization": f"Bearer {self.keys[tenant]}"} for tenant in TENANTS[:2])
        problem, patience = "", aiohttp.ClientTimeout(self.patience_s)
        with contextlib.suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):  # the outcomes tell of those
            async with session.post(url, json=body, headers=own, timeout=patience) as answer:
                if answer.status != 200:
                    problem = f"storing got {answer.status}" if answer.status not in (429, 503, 504) else ""
                else:
                    stored = await answer.json()
                    name = stored["id"]
                    for headers, statuses in ((own, (200, 503)), (other, (404, 503))):
                        async with session.get(f"{url}/{name}", headers=headers, timeout=patience) as found:
                            if found.status not in statuses:
                                problem = f"reading got {found.status}: must be {statuses[0]}"
                            elif found.status == 200 and (await found.json()).get("output") != stored["output"]:
                                problem = "reading got another output than storing"
        if problem:
            self.stored.append((time.monotonic(), f"{problem}, at {gateway}"))

    async def _over_http(self, outcome: Outcome, session: aiohttp.ClientSession) -> None:
        prompt = outcome.prompt
        body = {"model": "demo", "prompt": prompt.text, "max_tokens": prompt.max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, **_shaped(outcome.shape)}
        url, key = f"http://{self.http[outcome.gateway]}/v1/completions", self.keys[prompt.tenant]
        headers = {"authorization": f"Bearer {key}", "x-request-id": outcome.id}
        headers |= {"idempotency-key": outcome.key} if outcome.key else {}
        async with session.post(url, json=body, headers=headers) as answer:
            if answer.status != 200:
                error = json.loads(await answer.read())["error"]
                outcome.ends = 1
                outcome.fail(_of_status(answer.status), error["message"])
                return
            if outcome.shape == "whole":
                self._event(outcome, json.loads(await answer.read()))
                return
            done = False
            async for line in answer.content:
                if done:
                    outcome.late_text += line.decode(errors="replace").strip()
                done = done or line.startswith(b"data: [DONE]")
                if line.startswith(b"data: {") and not done:
                    self._event(outcome, json.loads(line[6:]))
            if not done and outcome.ends:
                outcome.fail(CUT, "no [DONE]")
            if not outcome.ends:
                outcome.fail(CUT, "the stream closed without an end")

    def _event(self, outcome: Outcome, event: dict) -> None:
        if "error" in event:
            outcome.fail(_of_status(event["error"].get("code")), event["error"]["message"])
            outcome.ends += 1
        for choice in event.get("choices", ()):
            outcome.scores += len((choice.get("logprobs") or {}).get("token_logprobs", ()))
            outcome.add(choice["text"], bool(choice["text"]))
            outcome.ends += choice["finish_reason"] is not None
            outcome.reason = choice["finish_reason"] or outcome.reason
        if event.get("usage"):
            outcome.ends += outcome.tokens is not None
            outcome.tokens = event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"]

    async def _over_grpc(self, outcome: Outcome) -> None:
        prompt = outcome.prompt
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        request = GenerationRequest(prompt.text, max_tokens=prompt.max_tokens, sampling=sampling, request_id=outcome.id)
        connection = Connection(self.grpc[outcome.gateway], api_key=self.keys[prompt.tenant])
        channel, decode = AsyncChannel(connection), ResponseDecoder().decode
        try:
            payload = infer_request.generation(request, "ensemble")
            async for data in channel.generate(payload, self.patience_s + 5, connection.call_metadata()):
                delta, _, message = decode(data)
                if message:
                    outcome.ends += 1
                    outcome.fail(_of_text(message), message)
                elif delta is not None:
                    outcome.add(delta.text, len(delta.token_ids))
                    if delta.finish_reason is not None:
                        outcome.ends, outcome.reason = outcome.ends + 1, delta.finish_reason.value
                    if delta.finish_reason is FinishReason.ERROR:
                        outcome.fail(_of_text(delta.error), delta.error)
                    if delta.usage is not None:
                        outcome.tokens = delta.usage.input_tokens, delta.usage.output_tokens
            if not outcome.ends:
                outcome.fail(CUT, "the stream closed without an end")
        except grpc.aio.AioRpcError as exc:
            status, details = exc.code().name, exc.details() or ""
            # What gRPC itself says of a connection that broke; an error of the gateway names its request or a limit.
            words = ("Socket closed", "onnect", "reset", "GOAWAY", "RST_STREAM", "EOF")
            broken = "quote request" not in details and any(word in details for word in words)
            own = errors.BY_GRPC_STATUS.get(status)
            outcome.ends += not broken
            outcome.fail(CUT if broken else own.__name__ if own else status, f"{status} {details}")
        finally:
            await channel.close()


def _shaped(shape: str) -> dict[str, object]:
    """Return the fields of a request's body that its shape makes."""
    if shape == "whole":
        return {"stream": False}
    more: dict[str, object] = {"stop": STOPS} if shape == "stop" else {}
    more |= {"logprobs": 1} if shape == "logprobs" else {}
    return {"stream": True, "stream_options": {"include_usage": True}, **more}


def _of_text(message: str) -> str:
    return type(errors.from_text(message) or errors.EngineFailed()).__name__


def _of_status(status: int | str | None) -> str:
    """Return the name of the error class with an HTTP status, or with the code of an event."""
    status = _CODES.get(str(status), status)
    kinds = list(errors.BY_NAME.items())[1:]  # without the base of all
    return next((name for name, cls in kinds if cls.http_status == status), f"HTTP {status}")


async def undisturbed(url: str, tokenizer: Path) -> tuple[dict[str, str], dict[str, int]]:
    """Return the text that follows each prompt and the prompt's tokens, asked directly at a replica. tokenizer: file
    that its ids are decoded by here: what the replica makes of them is what is tested."""
    decoder = Tokenizer.from_file(str(tokenizer))
    async with AsyncClient(url) as client:
        ask = partial(client.generate, temperature=0.0, ignore_eos=True)
        found = await asyncio.gather(*(ask(one.text, max_tokens=one.max_tokens).complete() for one in PROMPTS))
    pairs = [(prompt.text, one) for prompt, one in zip(PROMPTS, found, strict=True)]
    texts = {text: decoder.decode(one.token_ids) for text, one in pairs}
    return texts, {text: one.usage.input_tokens for text, one in pairs if one.usage}

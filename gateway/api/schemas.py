"""The OpenAI wire: what a body may hold, and the GenerationRequest it means.

Every field is either obeyed or refused by name; none is quietly ignored. Those that ask for nothing (an empty
``logit_bias``, ``n=1``, ``response_format`` text) are allowed. Beside OpenAI's own, the usual extensions of open
servers are understood: top_k, min_p, repetition_penalty, min_tokens, ignore_eos, stop_token_ids,
skip_special_tokens.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    WithJsonSchema,
)

from contract.errors import InvalidArgument
from contract.generation import GenerationRequest, SamplingParams
from gateway.config.settings import Settings

MAX_STOPS = 100  # the tokenizer's own bound
MAX_ENTRIES = 10_000  # of a list or a table that has no bound of its own
LONGEST_NAME = 100  # of a field, as far as a complaint repeats it
_Number = StrictFloat  # which takes integers too
# 3.0 is an integer to JSON Schema.
_WHOLE = BeforeValidator(lambda given: int(given) if isinstance(given, float) and given.is_integer() else given)
_Integer = Annotated[StrictInt, _WHOLE]
_TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31), _WHOLE]
_TEXT = {"type": "string", "minLength": 1}
_PROMPT = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]}
_Stop = Annotated[StrictStr, Field(min_length=1)]


def _few(value: Any) -> Any:
    """Ends the reading before every entry was looked at, and complained about. Not published: a machine that tests the
    schema would send hundreds of megabytes to see whether it holds."""
    if isinstance(value, dict | list) and len(value) > MAX_ENTRIES:
        raise ValueError(f"allowed are at most {MAX_ENTRIES} entries")
    return value


_Few = BeforeValidator(_few)
# A list of a million wrong items is refused at its first: naming them all took seconds.
_FIRST = Field(fail_fast=True)


def _published(nothing: Any) -> WithJsonSchema:
    """What the published schema says of a field that is understood and must ask for nothing."""
    return WithJsonSchema({"enum": [None, nothing], "default": None})


def _asks_for_nothing(value: Any) -> Any:
    if value is not None and value != []:
        raise ValueError("is not supported; leave it out")
    return value


_Nothing = Annotated[Any, BeforeValidator(_asks_for_nothing), _published([])]
_STRICT = ConfigDict(extra="forbid", hide_input_in_errors=True)


class StreamOptions(BaseModel):
    model_config = _STRICT
    include_usage: StrictBool = False
    include_obfuscation: Literal[False] = False  # random padding of chunks: not made here


class TextPart(BaseModel):
    model_config = _STRICT
    type: Literal["text"]
    text: StrictStr


class Message(BaseModel):
    """One turn of a chat. developer is OpenAI's newer word for system.

    The last five are what an answer of OpenAI's clients has besides, so that it can be sent back as it came.
    """

    model_config = _STRICT
    role: Literal["system", "developer", "user", "assistant"]
    content: StrictStr | Annotated[list[TextPart], _FIRST, _Few]
    refusal: _Nothing = None
    audio: _Nothing = None
    function_call: _Nothing = None
    annotations: _Nothing = None
    tool_calls: _Nothing = None

    def plain(self) -> dict[str, str]:
        role = "system" if self.role == "developer" else self.role
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": role, "content": text}


class _Sampling(BaseModel):
    """What both endpoints have in common."""

    model_config = _STRICT
    model: StrictStr
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[StrictInt, Field(ge=1), _WHOLE] | None = None
    temperature: Annotated[_Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[_Number, Field(gt=0, le=1)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**64), _WHOLE] | None = None
    presence_penalty: Annotated[_Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[_Number, Field(ge=-2, le=2)] | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1, lt=2**31), _WHOLE] | None = None
    user: StrictStr | None = None  # who the caller's own user is; nothing is kept of it
    metadata: Annotated[dict[str, StrictStr], _Few] | None = None
    logit_bias: Annotated[Annotated[dict[str, _Number], _Few] | None, _published({})] = None
    top_k: Annotated[StrictInt, Field(ge=-1, lt=2**31), _WHOLE] | None = None
    min_p: Annotated[_Number, Field(ge=0, lt=1)] | None = None
    repetition_penalty: Annotated[_Number, Field(gt=0, le=100)] | None = None
    min_tokens: Annotated[StrictInt, Field(ge=0, lt=2**31), _WHOLE] | None = None
    ignore_eos: StrictBool | None = None
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    skip_special_tokens: StrictBool | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        """Raises InvalidArgument for what is well-formed and cannot be done here."""
        if self.logit_bias:
            raise InvalidArgument("logit_bias", "is not supported; leave it out")
        if self.stream_options is not None and not self.stream:
            raise InvalidArgument("stream_options", "is allowed only with stream=true")

    def requests(
        self, prompt: dict[str, Any], max_tokens: int, timeout_s: float, log_probs: int | None, **more: Any
    ) -> list[GenerationRequest]:
        """One request for each choice. A seed is counted up from choice to choice, so that they differ."""
        sampling = {
            name: value
            for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "ignore_eos")
            + ("repetition_penalty", "min_tokens")
            if (value := getattr(self, name)) is not None
        }
        if self.top_k is not None:
            sampling["top_k"] = max(0, self.top_k)  # -1 is the other servers' word for "all"
        if log_probs is not None:
            sampling |= {"log_probs": True, "top_log_probs": log_probs}
        seeds = [None if self.seed is None else (self.seed + choice) % 2**64 for choice in range(self.choices)]
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        try:
            return [
                GenerationRequest(
                    **prompt,
                    max_tokens=max_tokens,
                    sampling=SamplingParams(**sampling, seed=seed),
                    stop=stops,
                    stop_token_ids=tuple(self.stop_token_ids or ()),
                    stream=bool(self.stream),
                    skip_special_tokens=self.skip_special_tokens is not False,
                    timeout_s=timeout_s,
                    **more,
                ).validate()
                for seed in seeds
            ]
        except InvalidArgument as exc:
            if exc.field != "text_input":
                raise
            raise InvalidArgument("prompt", exc.problem) from exc


class ResponseFormat(BaseModel):
    """The format of the output. No engine can be held to a schema, so requests for one are refused by name."""

    model_config = _STRICT
    type: Annotated[Literal["text", "json_object", "json_schema"], WithJsonSchema({"const": "text"})]
    json_schema: Annotated[Any, WithJsonSchema({"enum": [None]})] = None


class ChatRequest(_Sampling):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True), _Few]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1, lt=2**31), _WHOLE] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20), _WHOLE] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Any] | None, _published([])] = None
    tool_choice: Annotated[Any, WithJsonSchema({"enum": [None, "none", "auto"]})] = None
    parallel_tool_calls: StrictBool | None = None  # without tools it asks for nothing
    functions: _Nothing = None
    function_call: Literal["none", "auto"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    service_tier: Literal["auto", "default"] | None = None  # there is one
    store: Annotated[StrictBool | None, _published(False)] = None
    safety_identifier: StrictStr | None = None  # the newer name of user

    def generations(self, settings: Settings, timeout_s: float) -> list[GenerationRequest]:
        """One request for each choice. Raises InvalidArgument."""
        self.check()
        if self.tools:
            raise InvalidArgument("tools", "are not supported: this engine's output cannot be held to a call's form")
        if self.store:
            raise InvalidArgument("store", "is not supported: no answer is kept to be listed")
        if self.tool_choice not in (None, "none", "auto"):
            raise InvalidArgument("tool_choice", "is allowed only as none or auto: tools are not supported")
        if self.response_format is not None and self.response_format.type != "text":
            problem = f"must be text, got {self.response_format.type}: no engine can hold its output to a schema"
            raise InvalidArgument("response_format", problem)
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidArgument("top_logprobs", "is allowed only with logprobs=true")
        limits = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            raise InvalidArgument("max_tokens", "differs from max_completion_tokens, its newer name; send one of them")
        return self.requests(
            {"messages": tuple(message.plain() for message in self.messages)},
            next(iter(limits), settings.default_max_tokens),
            timeout_s,
            (self.top_logprobs or 0) if self.logprobs else None,
        )


class CompletionRequest(_Sampling):
    """The body of POST /v1/completions."""

    prompt: Annotated[
        StrictStr
        | Annotated[list[StrictStr], _FIRST]
        | Annotated[list[_Integer], _FIRST]
        | Annotated[list[Annotated[list[_Integer], _FIRST]], _FIRST, _Few],
        WithJsonSchema(_PROMPT),
    ]
    logprobs: Annotated[StrictInt, Field(ge=0, le=20), _WHOLE] | None = None
    echo: StrictBool | None = None
    best_of: _Integer | None = None
    suffix: Annotated[StrictStr | None, _published("")] = None

    def generations(self, settings: Settings, timeout_s: float) -> list[GenerationRequest]:
        """One request for each choice of each prompt, prompt by prompt. Raises InvalidArgument."""
        self.check()
        if self.best_of not in (None, self.choices):
            raise InvalidArgument("best_of", "is allowed only equal to n: choices are not ranked here")
        if self.suffix:
            raise InvalidArgument("suffix", "is not supported; leave it out")
        if self.echo and self.logprobs is not None:
            raise InvalidArgument("logprobs", "is not supported together with echo: the prompt has none here")
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if not prompts or not all(isinstance(prompt, str) for prompt in prompts):
            raise InvalidArgument("prompt", "allowed is a text or a list of texts; token ids are not taken here")
        if len(prompts) * self.choices > settings.max_choices:  # before so many requests are made
            raise InvalidArgument("prompt", f"times n makes more than {settings.max_choices} choices, the most allowed")
        return [
            one
            for prompt in prompts
            for one in self.requests(
                {"text_input": prompt}, self.max_tokens or 16, timeout_s, self.logprobs, echo=bool(self.echo)
            )
        ]


Body = TypeVar("Body", ChatRequest, CompletionRequest)


def fields_of(data: bytes) -> dict[str, Any]:
    """The JSON object in ``data``. Raises InvalidArgument."""
    try:
        table = orjson.loads(data)
    except orjson.JSONDecodeError as exc:
        raise InvalidArgument("", f"the body is not JSON: {exc}") from exc
    if not isinstance(table, dict):
        raise InvalidArgument("", "the body is not a JSON object")
    return table


def parse(kind: type[Body], data: bytes, settings: Settings) -> Body:
    """The body in ``data``. Raises InvalidArgument that names the first field that is wrong."""
    table = fields_of(data)
    for name in table:
        if name not in kind.model_fields:
            raise InvalidArgument(_shown(name), "is not supported; leave it out")
    try:
        body = kind.model_validate(table)
    except ValidationError as exc:
        raise _named(exc) from exc
    if body.choices > settings.max_choices:
        raise InvalidArgument("n", f"got {body.choices}; allowed is 1 to {settings.max_choices}")
    return body


def _named(failed: ValidationError) -> InvalidArgument:
    """The complaint about the first field that is wrong, in our words where pydantic's do not help."""
    errors = failed.errors(include_url=False, include_context=False, include_input=False)
    # Of a field that may be several things, what is said about the one that was nearest: the deepest place.
    errors = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    nearest = max(errors, key=lambda error: len(_place(error)))
    place = _place(nearest)
    said = list(dict.fromkeys(error["msg"] for error in errors if _place(error) == place))
    name = _shown(".".join(map(str, place)))
    if nearest["type"] == "extra_forbidden":
        return InvalidArgument(name, "is not supported; leave it out")
    if nearest["type"] == "missing":
        return InvalidArgument(name, "is missing")
    said = [one.removeprefix("Value error, ") for one in said]
    return InvalidArgument(name, " or ".join(one[:1].lower() + one[1:] for one in said))


def _shown(name: str) -> str:
    """A caller's own name for a field: not longer, and not stranger, than a complaint should be."""
    shown = name if name and name.isprintable() else repr(name)
    return shown if len(shown) <= LONGEST_NAME else f"{shown[:LONGEST_NAME]}…"


def _place(error: Any) -> tuple[int | str, ...]:
    """Where in the body, without the names of a union's members, which no caller knows."""
    parts = (part for part in error["loc"] if isinstance(part, int) or part.isidentifier())
    return tuple(part for part in parts if part not in ("str", "int", "float", "TextPart"))

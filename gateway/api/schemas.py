"""Parse OpenAI request bodies and convert them to GenerationRequests.

Every field is either applied or rejected by name; none is ignored. A field that is not supported is accepted with the
value that changes nothing (an empty ``logit_bias``, ``n=1``).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import orjson
import pydantic
from pydantic import BeforeValidator, Field, StrictBool, StrictFloat, StrictInt, StrictStr, WithJsonSchema

from contract.chat import check_tool_turns
from contract.errors import InvalidArgument
from contract.generation import GenerationRequest, Guide, SamplingParams
from gateway.api.guides import PLACE_IN_TAG, GuidedBody, schema_error
from gateway.api.prompting import PromptReference
from gateway.api.strict_model import WHOLE, LevelLimit, StrictModel
from gateway.config.settings import Settings
from gateway.prompts.template import Rendered
from gateway.tools import chat_format, guide
from gateway.tools.chat_format import OPEN, TAGGED, ChatFormat
from gateway.tools.cutter import CutterRules

MAX_STOPS = 100  # the tokenizer model's limit
MAX_TOOLS = 128
MAX_ENTRIES = 10_000  # of a list or an object without a limit of its own
_UNION_MEMBERS = ("str", "int", "float", "TextPart", "NamedTool", "NamedFunction", "Document")  # in pydantic's errors
_OBJECT = re.compile(r"(a valid )?dictionary( or instance of \w+)?")  # in pydantic's errors: an object
MAX_NAME_SHOWN = 100  # characters of a field's name that an error message repeats
_Number = StrictFloat  # accepts integers too
_Integer = Annotated[StrictInt, WHOLE]
TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31), WHOLE]
_Positive = Annotated[StrictInt, Field(ge=1, lt=2**31), WHOLE]
_TEXT = {"type": "string", "minLength": 1}
_ID = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_TEXTS, _IDS = ({"type": "array", "items": kind, "minItems": 1} for kind in (_TEXT, _ID))
_PROMPT = {"anyOf": [_TEXT, _IDS, _TEXTS, {"type": "array", "items": _IDS, "minItems": 1}]}
_Stop = Annotated[StrictStr, Field(min_length=1)]


def _check_entries(value: Any) -> Any:
    """Reject too many entries before each one is validated. Not published: tools would send megabytes to exceed it."""
    if isinstance(value, dict | list) and len(value) > MAX_ENTRIES:
        raise ValueError(f"must have at most {MAX_ENTRIES} entries, got {len(value)}")
    return value


EntryLimit = BeforeValidator(_check_entries)
# Validation stops at the first wrong item: listing a million wrong items took seconds.
_FIRST = Field(fail_fast=True)


def _only(neutral: Any) -> WithJsonSchema:
    """Return the published schema of a field that is accepted only as null or its neutral value."""
    return WithJsonSchema({"enum": [None, neutral], "default": None})


def _check_unset(value: Any) -> Any:
    if value is not None and value != []:
        raise ValueError("is not supported; leave it out")
    return value


_Unsupported = Annotated[Any, BeforeValidator(_check_unset), _only([])]


class FunctionName(StrictModel):
    name: Annotated[StrictStr, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(FunctionName):
    """strict: accepted; arguments are held to ``parameters`` in any case."""

    description: StrictStr | None = None
    parameters: Annotated[dict[str, Any], LevelLimit] | None = None
    strict: StrictBool | None = None


class NamedTool(StrictModel):
    """A tool by its name alone, as in ``tool_choice``."""

    type: Literal["function"]
    function: FunctionName


class Tool(NamedTool):
    function: Function


class CalledFunction(StrictModel):
    name: StrictStr
    arguments: StrictStr


class ToolCall(StrictModel):
    """A call that the assistant made earlier. index: as streamed deltas have it; not used."""

    id: Annotated[StrictStr, Field(min_length=1)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[StrictInt, WHOLE] | None = None

    def plain(self, path: str) -> dict[str, Any]:
        """Return the call without its index. path: names it in an error."""
        if not is_whole(self.function.arguments):
            raise InvalidArgument(f"{path}.function.arguments", "must be a JSON object")
        return self.model_dump(exclude={"index"})


def is_whole(arguments: str) -> bool:
    """Return whether the arguments of a call are a JSON object; those of one that was cut are not."""
    try:
        return isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        return False


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


def plain_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the tools as chat templates get them. Raises: InvalidArgument for two of one name."""
    names = [tool.function.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidArgument(f"tools.{index}.function.name", f"must differ from the others, got {name} twice")
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]


class StreamOptions(StrictModel):
    include_usage: StrictBool = False
    include_obfuscation: Literal[False] = False  # random padding of chunks: not supported


class TextPart(StrictModel):
    type: Literal["text"]
    text: StrictStr


class Message(StrictModel):
    """One message of a chat; the last four fields are accepted so that a response's message can be sent back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | Annotated[list[TextPart], _FIRST, EntryLimit] | None = None
    tool_calls: Annotated[list[ToolCall], _FIRST, EntryLimit] | None = None
    tool_call_id: StrictStr | None = None
    name: StrictStr | None = None  # of the function or the participant; templates decide whether the model sees it
    reasoning_content: StrictStr | None = None  # of an earlier response; templates decide as of the name
    refusal: _Unsupported = None
    audio: _Unsupported = None
    function_call: _Unsupported = None
    annotations: _Unsupported = None

    def plain(self, path: str) -> dict[str, Any]:
        """Return the message as the ensemble's ``messages`` have it. path: names it in an error."""
        for name, role in (("tool_calls", "assistant"), ("reasoning_content", "assistant"), ("tool_call_id", "tool")):
            if self.role != role and getattr(self, name):
                raise InvalidArgument(f"{path}.{name}", f"must be left out of a message of role {self.role}")
        if self.role == "tool" and not self.tool_call_id:
            raise InvalidArgument(f"{path}.tool_call_id", "is missing")
        if self.content is None and not self.tool_calls and not self.reasoning_content:
            raise InvalidArgument(f"{path}.content", "is missing")
        role = "system" if self.role == "developer" else self.role
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        found: dict[str, Any] = {"role": role, "content": text}
        if self.tool_calls:
            found["tool_calls"] = [call.plain(f"{path}.tool_calls.{n}") for n, call in enumerate(self.tool_calls)]
        return found | {name: value for name in _TURN_FIELDS if (value := getattr(self, name))}


_THINKING = ("enable_thinking", "thinking")  # the variables by which templates switch reasoning
_TURN_FIELDS = ("tool_call_id", "name", "reasoning_content")
_SAMPLING = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
_SAMPLING += ["min_tokens", "ignore_eos"]


class _Sampling(GuidedBody):
    """The fields that both endpoints share."""

    model: StrictStr
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[StrictInt, Field(ge=1), WHOLE] | None = None
    temperature: Annotated[_Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[_Number, Field(gt=0, le=1)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**64), WHOLE] | None = None
    presence_penalty: Annotated[_Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[_Number, Field(ge=-2, le=2)] | None = None
    max_tokens: _Positive | None = None
    user: StrictStr | None = None  # stays on one side of a release; not stored
    metadata: Annotated[dict[str, StrictStr], EntryLimit] | None = None
    logit_bias: Annotated[Annotated[dict[str, _Number], EntryLimit] | None, _only({})] = None
    top_k: Annotated[StrictInt, Field(ge=-1, lt=2**31), WHOLE] | None = None
    min_p: Annotated[_Number, Field(ge=0, lt=1)] | None = None
    repetition_penalty: Annotated[_Number, Field(gt=0, le=100)] | None = None
    min_tokens: Annotated[StrictInt, Field(ge=0, lt=2**31), WHOLE] | None = None
    ignore_eos: StrictBool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    bad_words: Annotated[list[_Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    skip_special_tokens: StrictBool | None = None
    truncate_prompt_tokens: Annotated[StrictInt, Field(ge=-1, lt=2**31), WHOLE] | None = None
    continue_ids: Annotated[list[TokenId] | None, _FIRST] = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def has_default_length(self) -> bool:
        """Whether the body leaves ``max_tokens`` out."""
        return self.max_tokens is None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def held(
        self, requests: list[GenerationRequest], form: ChatFormat, settings: Settings
    ) -> tuple[list[GenerationRequest], CutterRules | None]:
        """Return the requests, held to the model's form of tool calls, and what is cut out of their outputs."""
        return requests, None

    def check(self) -> None:
        """Raise InvalidArgument for a well-formed field that is not supported."""
        if self.logit_bias:
            raise InvalidArgument("logit_bias", "must be empty or left out: no engine here can bias single token ids")
        if self.stream_options is not None and not self.stream:
            raise InvalidArgument("stream_options", "must be left out without stream=true")

    def requests(
        self, prompt: dict[str, Any], max_tokens: int, timeout_s: float, log_probs: int | None, **more: Any
    ) -> list[GenerationRequest]:
        """Return one request for each choice. A seed increases by 1 from choice to choice, so that they differ.

        log_probs: alternatives per token; None for no log probabilities. prompt, more: fields of GenerationRequest.
        Raises: InvalidArgument.
        """
        sampling = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.top_k is not None:
            sampling["top_k"] = max(0, self.top_k)  # other servers use -1 for "all"
        if log_probs is not None:
            sampling |= {"log_probs": True, "top_log_probs": log_probs, "prompt_log_probs": more.get("echo", False)}
        if self.continue_ids and self.choices > 1:
            raise InvalidArgument("continue_ids", "must be left out with several prompts or n above 1")
        guide = self.guide()
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
                    bad_words=tuple(self.bad_words or ()),
                    stream=bool(self.stream),
                    skip_special_tokens=self.skip_special_tokens is not False,
                    truncate_prompt_tokens=self.truncate_prompt_tokens,
                    continue_ids=tuple(self.continue_ids or ()),
                    timeout_s=timeout_s,
                    guide=guide,
                    **more,
                ).validate()
                for seed in seeds
            ]
        except InvalidArgument as exc:
            if exc.field not in ("text_input", "input_ids"):
                raise
            raise InvalidArgument("prompt", exc.problem) from exc


class ChatRequest(_Sampling):
    """The body of POST /v1/chat/completions. prompt: a template, whose messages stand around ``messages``."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True), EntryLimit] = []
    prompt: PromptReference | None = None
    _prepared: Rendered | None = None
    max_completion_tokens: _Positive | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20), WHOLE] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: StrictBool | None = None  # has no effect without tools
    chat_template_kwargs: Annotated[dict[str, Any], LevelLimit, EntryLimit] | None = None
    reasoning_effort: Literal["none", "medium"] | None = None  # none: no reasoning; medium: as the model is
    include_reasoning: StrictBool | None = None  # whether reasoning is part of the response; it is counted anyway
    verbosity: Literal["medium"] | None = None  # there is no other
    audio: _Unsupported = None
    prediction: _Unsupported = None
    web_search_options: _Unsupported = None
    functions: _Unsupported = None
    function_call: Literal["none", "auto"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    service_tier: Literal["auto", "default"] | None = None  # there is only one tier
    store: Annotated[StrictBool | None, _only(False)] = None
    safety_identifier: StrictStr | None = None  # the newer name of user
    prompt_cache_key: StrictStr | None = None  # a hint: the prefix cache finds equal prompts without it

    @property
    def has_default_length(self) -> bool:
        return self.max_tokens is None and self.max_completion_tokens is None

    def use(self, used: Rendered) -> None:
        """Take the messages of a template, and its parameters where the request has none."""
        self._prepared = used
        for name, value in used.template.parameters.model_dump(exclude_none=True).items():
            self.set_default(name, value)

    def set_default(self, name: str, value: Any) -> None:
        """Set a field that the request leaves out."""
        if getattr(self, name) is None and not (name == "max_tokens" and self.max_completion_tokens is not None):
            setattr(self, name, value)

    def generations(self, settings: Settings, timeout_s: float) -> list[GenerationRequest]:
        """Return one request for each choice. Raises: InvalidArgument."""
        self.check()
        if not self.messages and self._prepared is None:
            raise InvalidArgument("messages", "is missing")
        if self.store:
            raise InvalidArgument("store", "must be false, got true: responses are not stored")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidArgument("top_logprobs", "must be left out without logprobs=true")
        limits = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            raise InvalidArgument("max_tokens", "must equal max_completion_tokens, its newer name; send one of them")
        messages = tuple(message.plain(f"messages.{index}") for index, message in enumerate(self.messages))
        check_tool_turns(messages)
        prompt: dict[str, Any] = {"messages": self._prepared.around(messages) if self._prepared else messages}
        if self._template_variables:
            prompt["chat_template_kwargs"] = orjson.dumps(self._template_variables).decode()
        prompt |= self._tool_fields()
        max_tokens = next(iter(limits), settings.default_max_tokens)
        return self.requests(prompt, max_tokens, timeout_s, (self.top_logprobs or 0) if self.logprobs else None)

    def _tool_fields(self) -> dict[str, Any]:
        """Return the fields of a GenerationRequest that tell a model its tools."""
        choice = self.tool_choice or guide.AUTO
        if not self._tools:
            if choice not in (guide.AUTO, "none"):
                raise InvalidArgument("tool_choice", "must be none or auto without tools")
            return {}
        if isinstance(choice, NamedTool) and choice.function.name not in self._tool_names:
            raise InvalidArgument("tool_choice.function.name", f"must be one of the tools, got {choice.function.name}")
        return {
            "tools": orjson.dumps(plain_tools(self._tools)).decode(),
            "tool_choice": choice.model_dump() if isinstance(choice, NamedTool) else choice,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
        }

    @property
    def _template_variables(self) -> dict[str, Any]:
        """What the chat template is given beside the messages and tools."""
        variables = {"enable_thinking": False} if self.reasoning_effort == "none" else {}
        return variables | (self.chat_template_kwargs or {})

    def held(
        self, requests: list[GenerationRequest], form: ChatFormat, settings: Settings
    ) -> tuple[list[GenerationRequest], CutterRules | None]:
        if form.reasoning == OPEN and any(self._template_variables.get(name) is False for name in _THINKING):
            form = dataclasses.replace(form, reasoning=TAGGED)  # the prompt does not begin the section then
        held, guided = requests[0].guide, False
        if self._tools:
            if form.family is None:
                raise InvalidArgument("tools", "are not supported: this model's template has no form that is known")
            if self.continue_ids:  # a call may have begun in them
                raise InvalidArgument("continue_ids", "must be left out with tools")
            guided = settings.tool_guides
            if guided:
                choice, parallel = self.tool_choice or guide.AUTO, self.parallel_tool_calls is not False
                name = choice.function.name if isinstance(choice, NamedTool) else choice
                held = guide.tool_guide(plain_tools(self._tools), name, parallel, form, held)
            else:
                self._check_without_guide(held)
        elif held is not None:
            held = guide.answer_guide(held, form)
        rules = CutterRules(
            form,
            self._tool_names,
            parallel=self.parallel_tool_calls is not False,
            # A guide knows a special token from its spelling, and another token only by its text.
            guided=guided and not form.special,
            reasoning=form.reasoning != chat_format.NONE,
            drops_special=bool(self._tools) and form.special and self.skip_special_tokens is not False,
            begun=requests[0].continue_ids,
        )
        if held is not requests[0].guide or rules.drops_special:
            shown = requests[0].skip_special_tokens and not rules.drops_special
            requests = [dataclasses.replace(request, guide=held, skip_special_tokens=shown) for request in requests]
        return requests, rules if rules.names or rules.reasoning else None

    def tools_error(self, error: InvalidArgument, held: Guide) -> InvalidArgument:
        """Return an engine's error about the guide of a request with tools: the tool's field, or the answer's."""
        inside = PLACE_IN_TAG.search(error.problem)
        if inside is None:
            return InvalidArgument("tools", error.problem)
        name, problem = guide.tool_at(held, inside[1]), PLACE_IN_TAG.sub("", error.problem)
        if not name:
            return self.guide_error(error)
        index = next(nth for nth, tool in enumerate(self._tools) if tool.function.name == name)
        return schema_error(f"tools.{index}.function.parameters", problem)

    def _check_without_guide(self, answer: Guide | None) -> None:
        """Refuse what only a grammar can promise."""
        problem = "must be left out: the engines are not held to tools (TRIDENT_GATEWAY_TOOL_GUIDES)"
        if self.tool_choice not in (None, guide.AUTO):
            raise InvalidArgument("tool_choice", problem)
        if answer is not None:
            raise InvalidArgument("tools", f"{problem}, and so not with a format of the answer")
        for index, tool in enumerate(self._tools):
            if tool.function.strict:
                raise InvalidArgument(f"tools.{index}.function.strict", problem)

    @property
    def _tools(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def _tool_names(self) -> frozenset[str]:
        return frozenset(tool.function.name for tool in self._tools)


class CompletionRequest(_Sampling):
    """The body of POST /v1/completions."""

    prompt: Annotated[
        StrictStr
        | Annotated[list[StrictStr], _FIRST]
        | Annotated[list[_Integer], _FIRST]
        | Annotated[list[Annotated[list[_Integer], _FIRST]], _FIRST, EntryLimit],
        WithJsonSchema(_PROMPT),
    ]
    max_tokens: Annotated[StrictInt, Field(ge=0, lt=2**31), WHOLE] | None = None  # 0: with echo, the prompt alone
    logprobs: Annotated[StrictInt, Field(ge=0, le=20), WHOLE] | None = None
    echo: StrictBool | None = None
    best_of: _Integer | None = None
    suffix: Annotated[StrictStr | None, _only("")] = None

    def generations(self, settings: Settings, timeout_s: float) -> list[GenerationRequest]:
        """Return one request for each choice of each prompt, prompt by prompt. Raises: InvalidArgument."""
        self.check()
        if self.best_of not in (None, self.choices):
            raise InvalidArgument("best_of", f"must equal n, got {self.best_of}: choices are not ranked")
        if self.suffix:
            raise InvalidArgument("suffix", "is not supported; leave it out")
        prompts: list[Any] = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        if not prompts:
            raise InvalidArgument("prompt", "must have at least one prompt or token id, got an empty list")
        if isinstance(prompts[0], int):
            prompts = [prompts]
        choices = len(prompts) * self.choices
        if choices > settings.max_choices:
            problem = f"must make at most {settings.max_choices} choices together with n, got {choices}"
            raise InvalidArgument("prompt", problem)
        if self.continue_ids and choices > 1:
            raise InvalidArgument("continue_ids", "must be left out with several prompts or n above 1")
        return [
            request
            for prompt in prompts
            for request in self.requests(
                {"text_input": prompt} if isinstance(prompt, str) else {"input_ids": tuple(prompt)},
                16 if self.max_tokens is None else self.max_tokens,
                timeout_s,
                self.logprobs,
                echo=bool(self.echo),
            )
        ]


Body = TypeVar("Body", ChatRequest, CompletionRequest)


def fields_of(data: bytes) -> dict[str, Any]:
    """Return the JSON object in ``data``. Raises: InvalidArgument."""
    try:
        table = orjson.loads(data)
    except orjson.JSONDecodeError as exc:
        try:
            data.decode()
        except UnicodeDecodeError as undecoded:
            raise InvalidArgument("", f"the body must be JSON in UTF-8: {undecoded}") from exc
        raise InvalidArgument("", f"the body must be JSON: {exc}") from exc
    if not isinstance(table, dict):
        raise InvalidArgument("", "the body must be a JSON object")
    return table


def validated(kind: type[Any], data: bytes) -> Any:
    """Return ``data`` as a body of ``kind``. Raises: InvalidArgument that names the first wrong field."""
    return checked(kind, fields_of(data))


def checked(kind: type[Any], fields: dict[str, Any]) -> Any:
    """Return ``fields`` as a body of ``kind``. Raises: InvalidArgument that names the first wrong field."""
    known = kind.model_fields
    for name in fields:
        if name not in known:
            raise InvalidArgument(_shown(name), "is not supported; leave it out")
    try:
        return kind.model_validate(fields)
    except pydantic.ValidationError as exc:
        raise _error(exc) from exc


def parse(kind: type[Body], data: bytes, settings: Settings) -> Body:
    """Return the body in ``data``. Raises: InvalidArgument that names the first wrong field."""
    body: Body = validated(kind, data)
    if body.choices > settings.max_choices:
        raise InvalidArgument("n", f"must be 1 to {settings.max_choices}, got {body.choices}")
    return body


def _error(failed: pydantic.ValidationError) -> InvalidArgument:
    """Return the error of the first wrong field."""
    errors = failed.errors(include_url=False, include_context=False, include_input=False)
    # A union reports one error per member: the member that matched best failed at the deepest path.
    errors = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    nearest = max(errors, key=lambda error: len(_path(error)))
    path = _path(nearest)
    messages = [error["msg"] for error in errors if _path(error) == path]
    messages = list(dict.fromkeys(_OBJECT.sub("an object", message) for message in messages))
    name = _shown(".".join(map(str, path)))
    if nearest["type"] == "extra_forbidden":
        return InvalidArgument(name, "is not supported; leave it out")
    if nearest["type"] == "missing":
        return InvalidArgument(name, "is missing")
    messages = [message.removeprefix("Value error, ") for message in messages]
    return InvalidArgument(name, " or ".join(message[:1].lower() + message[1:] for message in messages))


def _shown(name: str) -> str:
    """Return a field name that a client sent: printable, at most MAX_NAME_SHOWN characters."""
    shown = name if name and name.isprintable() else repr(name)
    return shown if len(shown) <= MAX_NAME_SHOWN else f"{shown[:MAX_NAME_SHOWN]}…"


def _path(error: Any) -> tuple[int | str, ...]:
    """Return an error's path in the body, without pydantic's names of union members."""
    return tuple(
        part for part in error["loc"] if isinstance(part, int) or (part.isidentifier() and part not in _UNION_MEMBERS)
    )

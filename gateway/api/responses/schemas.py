"""The body of POST /v1/responses, and the chat that it asks for."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from contract.errors import InvalidArgument
from contract.generation import GenerationRequest
from gateway.api.prompting import PromptReference
from gateway.api.responses.items import Items, messages_of
from gateway.api.schemas import MAX_TOOLS, WHOLE, ChatRequest, EntryLimit, Function, FunctionName, checked, fields_of
from gateway.api.strict_model import LevelLimit, Metadata, StrictModel
from gateway.config.settings import Settings
from gateway.prompts.template import Rendered
from gateway.tools.chat_format import ChatFormat
from gateway.tools.cutter import CutterRules

# The names of a chat's fields in errors, and those of a response's.
_NAMES = (
    (r"messages\b.*", "input"),
    (r"max(_completion)?_tokens", "max_output_tokens"),
    (r"logprobs", "include"),
    (r"(tools\.\d+|tool_choice)\.function(.*)", r"\1\2"),
    (r"response_format(?:\.json_schema)?(.*)", r"text.format\1"),
)
_INSTEAD = {"conversation": "use previous_response_id"}
_NOT_RETURNED = {"model", "input", "stream", "stream_options", "include", "chat_template_kwargs"}


def _check_function(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") != "function":
        raise ValueError(f"must be of type function, got {value.get('type')!r:.50}: there are no hosted tools")
    return value


_Function = BeforeValidator(_check_function)


class FunctionTool(Function):
    """A function in the Responses' flat form."""

    type: Literal["function"]


class NamedFunction(FunctionName):
    type: Literal["function"]


class TextFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: StrictStr | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: StrictBool | None = None
    description: StrictStr | None = None


class TextOptions(StrictModel):
    format: TextFormat = TextFormat()
    verbosity: Literal["medium"] | None = "medium"  # there is no other


class Reasoning(StrictModel):
    """effort: none asks the template for no reasoning; medium leaves the model as it is."""

    effort: Literal["none", "medium"] | None = None
    summary: None = None


class StreamOptions(StrictModel):
    include_obfuscation: Literal[False] = False


class ResponsesRequest(StrictModel):
    """The body of POST /v1/responses. A field that is null is one that is left out."""

    model: StrictStr
    input: StrictStr | Items = []
    instructions: StrictStr | None = None
    prompt: PromptReference | None = None
    previous_response_id: Annotated[StrictStr, Field(min_length=1, max_length=256)] | None = None
    store: StrictBool = True
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    max_output_tokens: Annotated[StrictInt, Field(ge=1, lt=2**31), WHOLE] | None = None
    temperature: Annotated[StrictFloat, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[StrictFloat, Field(gt=0, le=1)] = 1.0
    metadata: Metadata = {}
    user: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    tools: Annotated[list[Annotated[FunctionTool, _Function]], Field(max_length=MAX_TOOLS, fail_fast=True)] = []
    tool_choice: Annotated[Literal["none", "auto", "required"] | NamedFunction, _Function] = "auto"
    parallel_tool_calls: StrictBool = True
    text: TextOptions = TextOptions()
    reasoning: Reasoning = Reasoning()
    truncation: Literal["disabled"] = "disabled"
    include: Annotated[list[Literal["message.output_text.logprobs"]], Field(fail_fast=True), EntryLimit] = []
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20), WHOLE] = 0
    service_tier: Literal["auto", "default"] = "default"
    chat_template_kwargs: Annotated[dict[str, Any], LevelLimit, EntryLimit] = {}
    background: Literal[False] = False

    def returned(self) -> dict[str, Any]:
        """Return the fields that a response repeats."""
        text = self.text.model_dump(by_alias=True, exclude_none=True)
        return self.model_dump(by_alias=True, exclude=_NOT_RETURNED) | {"text": text}

    def chat(self, items: list[dict[str, Any]], given: int) -> ResponsesChat:
        """Return the chat. items: of the conversation, the last ``given`` of this request. Raises: InvalidArgument."""
        messages = messages_of(items, given)
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        choice, variables = self.tool_choice, self.chat_template_kwargs
        if self.reasoning.effort == "none":
            variables = {"enable_thinking": False, **variables}
        form = self.text.format.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        named = isinstance(choice, NamedFunction) and {"type": "function", "function": {"name": choice.name}}
        fields: dict[str, Any] = {
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "tools": [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools],
            "tool_choice": named or choice,
            "response_format": {"type": self.text.format.type, "json_schema": form or None},
            "logprobs": bool(self.include),
            "top_logprobs": self.top_logprobs if self.include else None,
            "chat_template_kwargs": variables,
            "original": self,
            "inputs": items[len(items) - given :],
        }
        same = ("model", "stream", "temperature", "top_p", "parallel_tool_calls", "user", "safety_identifier", "prompt")
        if not messages and self.prompt is not None:  # the template has all of them
            del fields["messages"]
        chat: ResponsesChat = checked(ResponsesChat, fields | {name: getattr(self, name) for name in same})
        return chat


class ResponsesChat(ChatRequest):
    """The chat that a request makes. inputs: the items of the request."""

    original: ResponsesRequest
    inputs: list[dict[str, Any]]

    def use(self, used: Rendered) -> None:
        super().use(used)
        assert self.original.prompt is not None, "it named the template"
        self.original.prompt.id, _, self.original.prompt.version = used.version.partition("@")

    def set_default(self, name: str, value: Any) -> None:
        own = "max_output_tokens" if name == "max_tokens" else name
        if own not in self.original.model_fields_set:
            setattr(self, name, value)
            if own in ResponsesRequest.model_fields:
                setattr(self.original, own, value)

    def held(
        self, requests: list[GenerationRequest], form: ChatFormat, settings: Settings
    ) -> tuple[list[GenerationRequest], CutterRules | None]:
        requests, rules = super().held(requests, form, settings)
        if self.logprobs and rules is not None:
            raise InvalidArgument("include", "must be left out where tools or reasoning are separated from the text")
        return requests, rules


def parse(data: bytes) -> ResponsesRequest:
    """Return the body in ``data``. Raises: InvalidArgument that names the first wrong field."""
    fields = {name: value for name, value in fields_of(data).items() if value is not None}
    for name in fields.keys() & _INSTEAD.keys():
        raise InvalidArgument(name, f"is not supported; {_INSTEAD[name]}")
    body: ResponsesRequest = checked(ResponsesRequest, fields)
    if body.stream_options is not None and not body.stream:
        raise InvalidArgument("stream_options", "must be left out without stream=true")
    if body.top_logprobs and not body.include:
        raise InvalidArgument("top_logprobs", "must be left out without message.output_text.logprobs in include")
    if body.text.format.type == "json_schema" and body.text.format.schema_ is None:
        raise InvalidArgument("text.format.schema", "is missing")
    if body.input == [] and body.previous_response_id is None and body.prompt is None:
        raise InvalidArgument("input", "is missing")
    return body


def renamed(error: InvalidArgument) -> InvalidArgument:
    """Return an error about a chat's field with the field of a response."""
    for pattern, name in _NAMES:
        found = re.fullmatch(pattern, error.field)
        if found is not None:
            kept = type(error)(found.expand(name), error.problem)
            vars(kept).update(vars(error) | {"field": kept.field})
            return kept
    return error

"""The fields of request bodies that concern tools, as OpenAI's chat describes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, StrictBool, StrictInt, StrictStr

from contract.errors import InvalidArgument
from gateway.api.strict_model import WHOLE, LevelLimit, StrictModel

MAX_TOOLS = 128


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

"""Tools and earlier calls as a chat template gets them."""

from __future__ import annotations

import pytest

from contract.errors import InvalidArgument
from gateway.api.tool_schemas import CalledFunction, Function, Tool, ToolCall, plain_tools


def tool(name: str, **more: object) -> Tool:
    return Tool(type="function", function=Function(name=name, **more))


def test_what_the_caller_left_out_is_left_out() -> None:
    parameters = {"type": "object", "properties": {"x": {"default": None}}}
    assert plain_tools([tool("f"), tool("g", strict=True, description="d", parameters=parameters)]) == [
        {"type": "function", "function": {"name": "f"}},
        {"type": "function", "function": {"name": "g", "description": "d", "parameters": parameters}},
    ]


def test_names_differ() -> None:
    with pytest.raises(InvalidArgument, match=r"tools.1.function.name: must differ from the others, got f twice"):
        plain_tools([tool("f"), tool("f")])


@pytest.mark.parametrize("arguments", ["", "[1]", "{", "1"])
def test_arguments_of_a_call_are_an_object(arguments: str) -> None:
    call = ToolCall(id="a", function=CalledFunction(name="f", arguments=arguments))
    with pytest.raises(InvalidArgument, match=r"m.tool_calls.0.function.arguments: must be a JSON object"):
        call.plain("m.tool_calls.0")

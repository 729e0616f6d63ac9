"""The declarations that editors show are those that the code takes."""

from __future__ import annotations

import dataclasses

from clients.wire.arguments import ClientOptions, GenerateArguments
from contract.generation import GenerationRequest, SamplingParams


def test_the_arguments_of_generate_are_the_fields_of_a_request_and_of_its_sampling():
    fields = {field.name for kind in (GenerationRequest, SamplingParams) for field in dataclasses.fields(kind)}
    own = {"text_input", "sampling", "tool_choice", "parallel_tool_calls"}  # the last two are for upstreams
    assert set(GenerateArguments.__annotations__) == fields - own | {"json_schema"}


def test_every_argument_is_described():
    for declared in (GenerateArguments, ClientOptions):
        for name in declared.__annotations__:
            assert name in declared.__doc__, name

"""The relay runs in an environment of its own, so it may import nothing of ours."""

import ast
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[3] / "benchmarks" / "gateway" / "fastapi_relay.py"


def test_it_imports_what_its_environment_has_and_nothing_else():
    nodes = ast.walk(ast.parse(SOURCE.read_text()))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    nodes = ast.walk(ast.parse(SOURCE.read_text()))
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    packages = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert packages == {"fastapi", "grpc", "pydantic", "tritonclient", "uvicorn"}


def test_a_chat_becomes_the_ensembles_tensors():
    pytest.importorskip("fastapi")
    from benchmarks.gateway import fastapi_relay

    messages = [fastapi_relay.Message(role="user", content="hi")]
    request = fastapi_relay.infer_request(fastapi_relay.ChatRequest(model="demo", messages=messages, max_tokens=7))
    assert [tensor.name for tensor in request.inputs] == ["messages", "max_tokens", "stream"]
    assert request.raw_input_contents[1] == (7).to_bytes(4, "little")

"""The message printed when the server is ready: its endpoints and commands to try."""

from __future__ import annotations

import json

from contract import interpreter
from server.repository import ENSEMBLE
from server.settings import Settings


def ready_message(settings: Settings, model: str = ENSEMBLE) -> str:
    """Return endpoints and example commands, ready to copy. model: that clients call."""
    tls = " over TLS" if settings.tls_cert else ""
    call = "ModelStreamInfer" if model == ENSEMBLE else "ModelInfer"
    return f"""
Trident serves engine {settings.engine}.
  gRPC     {settings.grpc_url}   model {model}, {call}{tls}
  HTTP     {settings.http_url}
  metrics  {settings.metrics_url}
Try
{_generating(settings) if model == ENSEMBLE else _encoding(settings, model)}
Ctrl-C stops it.
"""


def _generating(settings: Settings) -> str:
    default = Settings(admin_key=settings.admin_key)
    url = "" if settings.grpc_url == default.grpc_url else f" --url {settings.grpc_url}"
    return f"""  {interpreter.command()} -m clients{url} "def fibonacci(n):"
  curl -N {settings.http_url}/v2/models/{ENSEMBLE}/generate_stream \\
    -d '{{"text_input": "def fibonacci(n):", "max_tokens": 32, "stream": true}}'"""


def _encoding(settings: Settings, model: str) -> str:
    names = ("text_input", "text_pair")  # an embedding model takes text_input alone, too
    inputs = [{"name": name, "datatype": "BYTES", "shape": [1, 1], "data": ["some text"]} for name in names]
    return f"""  curl {settings.http_url}/v2/models/{model}/infer \\
    -d '{json.dumps({"inputs": inputs})}'"""

"""The message printed when the server is ready: its endpoints and commands to try."""

from __future__ import annotations

from contract import interpreter
from server.repository import ENSEMBLE
from server.settings import Settings


def ready_message(settings: Settings) -> str:
    """Return endpoints and example commands, ready to copy."""
    default = Settings(admin_key=settings.admin_key)
    url = "" if settings.grpc_url == default.grpc_url else f" --url {settings.grpc_url}"
    return f"""
Trident serves engine {settings.engine}.
  gRPC     {settings.grpc_url}   model {ENSEMBLE}, ModelStreamInfer{" over TLS" if settings.tls_cert else ""}
  HTTP     {settings.http_url}
  metrics  {settings.metrics_url}
Try
  {interpreter.command()} -m clients{url} "def fibonacci(n):"
  curl -N {settings.http_url}/v2/models/{ENSEMBLE}/generate_stream \\
    -d '{{"text_input": "def fibonacci(n):", "max_tokens": 32, "stream": true}}'
Ctrl-C stops it.
"""

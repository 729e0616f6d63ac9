"""Write the text that the gateway prints when it listens: addresses, and commands to copy."""

from __future__ import annotations

from collections.abc import Sequence

from contract.interpreter import command
from gateway.config.settings import Settings, variable

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}


def reachable(host: str, port: int) -> str:
    """Return HOST:PORT at which a client on this machine reaches a listener on ``host``."""
    return address(_EVERYWHERE.get(host, host), port)


def address(host: str, port: int) -> str:
    """Return HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def text(
    settings: Settings, http: str, grpc: str, monitoring: str, *, keyless: bool, models: Sequence[str] = ()
) -> str:
    """Return the banner.

    http, grpc, monitoring: HOST:PORT of the listeners, each as a client reaches it. keyless: callers need no API key.
    models: of the configuration file, which win over those of the environment.
    """
    models = models or tuple(settings.models) or (settings.model,)
    model = settings.model if settings.model in models else models[0]
    python = command()
    scheme = "https" if settings.tls_cert else "http"
    curl = "curl" if settings.tls_cert is None else "curl --cacert ca.pem"
    if settings.tls_client_ca:
        curl += " --cert client.pem --key client.key"
    key = "" if keyless else ' -H "authorization: Bearer $KEY"'
    api_key = '"none"' if keyless else 'os.environ["KEY"]'
    config = settings.config or f"none ({variable('config')})"
    keys = "required" if not keyless else f"not required; `{python} -m gateway new-key` makes one"
    return f"""
Trident's gateway serves the model {" and the model ".join(models)}.
  OpenAI    {scheme}://{http}/v1
  gRPC      {grpc}   KServe, model {settings.triton_model}{", over TLS" if settings.tls_cert else ""}
  metrics   http://{monitoring}/metrics
  replicas  {settings.replicas}
  config    {config}
  API keys  {keys}
Try
  {curl} {scheme}://{http}/v1/models{key}
  {curl} -N {scheme}://{http}/v1/chat/completions{key} -H "content-type: application/json" \\
    -d '{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "Hello"}}]}}'
  {python} -c 'import openai{"" if keyless else ", os"}
client = openai.OpenAI(base_url="{scheme}://{http}/v1", api_key={api_key})
print(client.completions.create(model="{model}", prompt="def fibonacci(n):", max_tokens=32).choices[0].text)'
Ctrl-C stops it{"" if settings.config is None else "; SIGHUP reloads the configuration file"}.
"""

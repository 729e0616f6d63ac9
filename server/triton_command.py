"""Command line and environment of tritonserver."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from server import shared_memory
from server.installation import Installation
from server.repository import ENSEMBLE
from server.settings import PORT_FIELDS, ROOT, Settings

ADMIN_HEADER = "trident-admin-key"
# Any client may infer and read; only a client with the key may load, unload, map memory, or redirect traces and logs.
RESTRICTED = "model-repository,shared-memory,trace,logging"
FORWARDED_HEADERS = "(?i)(traceparent|tracestate|x-.*)"
# Four sender threads of the engine, the detokenizer's relay, and a reserve; most of the default 32 would be idle.
BACKEND_THREADS = 8
# For the answers of client_watch, which the engine has it keep (python_backends/cpu_engine/packed_sink.py).
CACHE_BYTES = 1 << 20
# The supervisor kills tritonserver earlier than this.
EXIT_TIMEOUT_S = 10


def arguments(
    settings: Settings,
    installation: Installation,
    backends: Path,
    shm_prefix: str,
    shm_bytes: int = shared_memory.MAX_BYTES,
    models: Sequence[str] = (ENSEMBLE,),
) -> list[str]:
    """Return argv of a tritonserver that serves ``models``.

    backends: folder for --backend-directory.
    shm_prefix: start of the names of its files in /dev/shm.
    shm_bytes: size of each stub's file there.
    """
    keepalive_ms = round(settings.keepalive_s * 1000)
    return [
        str(installation.tritonserver),
        f"--model-repository={settings.model_repository}",
        f"--backend-directory={backends}",
        f"--cache-directory={installation.caches}",
        # A server built without caches does not start with the option; it runs client_watch for each response.
        *([f"--cache-config=local,size={CACHE_BYTES}"] if (installation.caches / "local").is_dir() else []),
        # A drain unloads models and a reload unloads and loads them.
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in models),
        f"--model-config-name={settings.engine}",
        # The configs are complete; auto-completion would start every stub twice.
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
        *(f"--{protocol}-address={settings.host}" for protocol in ("grpc", "http", "metrics")),
        *(f"--{name.replace('_', '-')}={getattr(settings, name)}" for name in PORT_FIELDS),
        f"--grpc-restricted-protocol={RESTRICTED}:{ADMIN_HEADER}={settings.admin_key}",
        f"--http-restricted-api={RESTRICTED}:{ADMIN_HEADER}={settings.admin_key}",
        *(f"--{protocol}-header-forward-pattern={FORWARDED_HEADERS}" for protocol in ("grpc", "http")),
        # Detects a peer that vanished without closing its socket after time + timeout; without these after 2 h.
        f"--grpc-keepalive-time={keepalive_ms}",
        f"--grpc-keepalive-timeout={keepalive_ms // 2}",
        "--grpc-keepalive-permit-without-calls=1",
        "--grpc-http2-max-pings-without-data=0",
        # Clients may ping as often as the server does; the default of 5 min would close their connections.
        f"--grpc-http2-min-recv-ping-interval-without-data={keepalive_ms // 2}",
        f"--allow-gpu-metrics={str(Path('/dev/nvidiactl').exists()).lower()}",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
        f"--backend-config=python,thread-pool-size={BACKEND_THREADS}",
        f"--backend-config=python,shm-default-byte-size={shm_bytes}",
        *_optional_flags(settings),
    ]


def control_socket(shm_prefix: str) -> str:
    r"""Return the name of the engine's control socket, an abstract unix datagram socket at ``"\0" + name``."""
    return f"trident-{shm_prefix}-engine"


def environment(
    settings: Settings, installation: Installation, engine_folder: Path, shm_prefix: str, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of tritonserver, which the stubs inherit."""
    first = {
        "PATH": str(Path(sys.executable).parent),  # a stub runs its model with the first python3 there
        "PYTHONPATH": str(ROOT),  # for processes that the models start; the stubs ignore it (see process.py)
        "LD_LIBRARY_PATH": installation.libraries,
    }
    own = {
        "PYTHONUNBUFFERED": "1",
        "TRIDENT_ENGINE_DIR": engine_folder,
        "TRIDENT_CONTROL_SOCKET": control_socket(shm_prefix),
        "TRIDENT_HTTP_PORT": settings.http_port,
        "TRIDENT_DRAIN_FILE": settings.drain_file,
        "TRIDENT_STALL_S": settings.stall_s,
        "TRIDENT_STEP_LIMIT_S": settings.step_limit_s,
    }
    paths = {name: os.pathsep.join(filter(None, (path, environ.get(name)))) for name, path in first.items() if path}
    return {**environ, **paths, **{name: str(value) for name, value in own.items()}}


def _optional_flags(settings: Settings) -> list[str]:
    """Return the flags of log, TLS and traces."""
    level = settings.log_level
    flags = [f"--log-info={str(level == 'info').lower()}", f"--log-warning={str(level != 'error').lower()}"]
    if level == "verbose":
        flags = ["--log-verbose=1"]
    if settings.tls_cert is not None:
        flags += ["--grpc-use-ssl=true", f"--grpc-server-cert={settings.tls_cert}"]
        flags += [f"--grpc-server-key={settings.tls_key}"]
    if settings.otlp_endpoint:
        traces = ["mode=opentelemetry", "level=TIMESTAMPS", f"rate={settings.trace_every}"]
        traces += [f"opentelemetry,url={settings.otlp_endpoint}", "opentelemetry,resource=service.name=trident"]
        flags += [f"--trace-config={trace}" for trace in traces]
    return flags

"""Command line and environment of tritonserver."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from server import shared_memory
from server.installation import Installation
from server.repository import ENSEMBLE
from server.settings import ROOT, Settings

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
        f"--grpc-address={settings.host}",
        f"--http-address={settings.host}",
        f"--metrics-address={settings.host}",
        f"--grpc-port={settings.grpc_port}",
        f"--http-port={settings.http_port}",
        f"--metrics-port={settings.metrics_port}",
        f"--grpc-restricted-protocol={RESTRICTED}:{ADMIN_HEADER}={settings.admin_key}",
        f"--http-restricted-api={RESTRICTED}:{ADMIN_HEADER}={settings.admin_key}",
        f"--grpc-header-forward-pattern={FORWARDED_HEADERS}",
        f"--http-header-forward-pattern={FORWARDED_HEADERS}",
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
        *_log_flags(settings.log_level),
        *_tls_flags(settings),
        *_trace_flags(settings),
    ]


def control_socket(shm_prefix: str) -> str:
    r"""Return the name of the engine's control socket, an abstract unix datagram socket at ``"\0" + name``."""
    return f"trident-{shm_prefix}-engine"


def environment(
    settings: Settings, installation: Installation, engine_folder: Path, shm_prefix: str, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of tritonserver, which the stubs inherit."""
    variables = dict(environ)
    # A stub runs its model with the first python3 on PATH: this environment's.
    variables["PATH"] = _prepended(str(Path(sys.executable).parent), environ.get("PATH", ""))
    # For processes that the models start; the stubs themselves ignore it (see process.py).
    variables["PYTHONPATH"] = _prepended(str(ROOT), environ.get("PYTHONPATH", ""))
    variables["PYTHONUNBUFFERED"] = "1"
    if installation.libraries:
        variables["LD_LIBRARY_PATH"] = _prepended(installation.libraries, environ.get("LD_LIBRARY_PATH", ""))
    variables["TRIDENT_ENGINE_DIR"] = str(engine_folder)
    variables["TRIDENT_CONTROL_SOCKET"] = control_socket(shm_prefix)
    variables["TRIDENT_HTTP_PORT"] = str(settings.http_port)
    variables["TRIDENT_DRAIN_FILE"] = str(settings.drain_file)
    variables["TRIDENT_STALL_S"] = str(settings.stall_s)
    variables["TRIDENT_STEP_LIMIT_S"] = str(settings.step_limit_s)
    return variables


def _prepended(first: str, rest: str) -> str:
    return os.pathsep.join((first, rest)) if rest else first


def _log_flags(level: str) -> list[str]:
    if level == "verbose":
        return ["--log-verbose=1"]
    return [f"--log-info={str(level == 'info').lower()}", f"--log-warning={str(level != 'error').lower()}"]


def _tls_flags(settings: Settings) -> list[str]:
    if settings.tls_cert is None:
        return []
    return ["--grpc-use-ssl=true", f"--grpc-server-cert={settings.tls_cert}", f"--grpc-server-key={settings.tls_key}"]


def _trace_flags(settings: Settings) -> list[str]:
    if not settings.otlp_endpoint:
        return []
    return [
        "--trace-config=mode=opentelemetry",
        "--trace-config=level=TIMESTAMPS",
        f"--trace-config=rate={settings.trace_every}",
        f"--trace-config=opentelemetry,url={settings.otlp_endpoint}",
        "--trace-config=opentelemetry,resource=service.name=trident",
    ]

"""What can be set from outside: TRIDENT_* variables, read once into a frozen dataclass.

| variable | default | meaning |
|---|---|---|
| TRIDENT_ENGINE | demo | engines/<name>/ is served, with configs/<name>.pbtxt where a model has one |
| TRIDENT_HOST | 127.0.0.1 | IPv4 address the three ports listen on |
| TRIDENT_GRPC_PORT, TRIDENT_HTTP_PORT, TRIDENT_METRICS_PORT | 8001, 8000, 8002 | |
| TRIDENT_MODEL_REPOSITORY | model_repository | what Triton loads |
| TRIDENT_ENGINES_DIR | engines | where built engines lie |
| TRIDENT_TRITONSERVER | /opt/tritonserver, else the wheel | folder with bin/tritonserver, as in NVIDIA's images |
| TRIDENT_STATE_DIR | .triton | backend links, logs and status files |
| TRIDENT_START_TIMEOUT_S | 120 | longest time from launch to the first token |
| TRIDENT_DRAIN_S | 20 | longest time streams may go on after a stop is asked for; what is left ends with an error |
| TRIDENT_CANARY_INTERVAL_S | 10 | pause between two canary requests while serving |
| TRIDENT_CANARY_TIMEOUT_S | 10 | a canary without an end by then has failed |
| TRIDENT_STALL_S | 7 | engine, stubs and tritonserver: no progress and no CPU use for so long is a hang |
| TRIDENT_STEP_LIMIT_S | 120 | the same while CPU is used: longest engine step or call of a Python model |
| TRIDENT_LOG_LEVEL | info | tritonserver's log: error, warning, info or verbose |
| TRIDENT_KEEPALIVE_S | 10 | silence after which a gRPC peer is pinged, so that a vanished one is noticed |
| TRIDENT_OTLP_ENDPOINT | | OTLP/HTTP traces go here, e.g. http://127.0.0.1:4318/v1/traces |
| TRIDENT_TRACE_EVERY | 1000 | one request of so many is traced |
| TRIDENT_TLS_CERT, TRIDENT_TLS_KEY | | PEM files; set both to serve gRPC over TLS |
| TRIDENT_TLS_CA | the certificate | PEM file the canary trusts |
| TRIDENT_TLS_NAME | localhost | the name the certificate is for, as the canary expects it |
| TRIDENT_ADMIN_KEY | random | unlocks Triton's management APIs, header trident-admin-key |
"""

from __future__ import annotations

import ipaddress
import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from contract.errors import InvalidArgument
from contract.watchdog import LIMIT_S, STALL_S

ROOT = Path(__file__).resolve().parents[1]
LOG_LEVELS = ("error", "warning", "info", "verbose")


@dataclass(frozen=True)
class Settings:
    """A valid configuration. Construction raises InvalidArgument that names the variable and what is allowed."""

    engine: str = "demo"
    host: str = "127.0.0.1"
    grpc_port: int = 8001
    http_port: int = 8000
    metrics_port: int = 8002
    model_repository: Path = ROOT / "model_repository"
    engines_dir: Path = ROOT / "engines"
    tritonserver: Path | None = None
    state_dir: Path = ROOT / ".triton"
    start_timeout_s: float = 120.0
    drain_s: float = 20.0
    canary_interval_s: float = 10.0
    canary_timeout_s: float = 10.0
    stall_s: float = STALL_S
    step_limit_s: float = LIMIT_S
    log_level: str = "info"
    keepalive_s: float = 10.0
    otlp_endpoint: str = ""
    trace_every: int = 1000
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    tls_name: str = "localhost"
    admin_key: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)

    def __post_init__(self) -> None:
        _matches("engine", self.engine, r"[A-Za-z0-9][A-Za-z0-9._-]*", "letters, digits, '.', '_' and '-'")
        _ipv4("host", self.host)
        for name in PORT_FIELDS:
            _between(name, getattr(self, name), 1, 65535)
        for name in ("start_timeout_s", "canary_interval_s", "canary_timeout_s", "keepalive_s"):
            _between(name, getattr(self, name), 0.1, 86_400)
        for name in ("stall_s", "step_limit_s"):
            _between(name, getattr(self, name), 3, 86_400)  # heartbeats come once a second
        _between("drain_s", self.drain_s, 0, 86_400)
        _between("trace_every", self.trace_every, 1, 2**31 - 1)
        if self.log_level not in LOG_LEVELS:
            raise InvalidArgument(variable("log_level"), f"got {self.log_level!r}; allowed is {', '.join(LOG_LEVELS)}")
        _matches("otlp_endpoint", self.otlp_endpoint, r"|https?://[^\s,]+", "an http(s) URL without a comma")
        _matches("admin_key", self.admin_key, r"[A-Za-z0-9._-]+", "letters, digits, '.', '_' and '-'")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidArgument(variable("tls_key"), "set TRIDENT_TLS_CERT and TRIDENT_TLS_KEY together or neither")
        for name in ("tls_cert", "tls_key", "tls_ca"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise InvalidArgument(variable(name), f"there is no file {path}")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], **overrides: object) -> Settings:
        """Settings from TRIDENT_* of ``environ``; an override that is not None wins over its variable."""
        values = {}
        for name, read in READERS.items():
            text = environ.get(variable(name), "")
            if text != "":
                try:
                    values[name] = read(text)
                except ValueError as error:
                    raise InvalidArgument(variable(name), f"got {text!r}; allowed is {KINDS[read]}") from error
        return cls(**values | {name: value for name, value in overrides.items() if value is not None})

    @property
    def reachable_host(self) -> str:
        """Where this machine's own clients find the server; a wildcard address is no destination."""
        return "127.0.0.1" if self.host == "0.0.0.0" else self.host

    @property
    def grpc_url(self) -> str:
        return f"{self.reachable_host}:{self.grpc_port}"

    @property
    def http_url(self) -> str:
        return f"http://{self.reachable_host}:{self.http_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self.reachable_host}:{self.metrics_port}/metrics"

    @property
    def drain_file(self) -> Path:
        """While it exists, the tokenizers of this server refuse requests."""
        return self.state_dir / f"draining-{self.grpc_port}"

    @property
    def ports(self) -> dict[str, int]:
        """Variable name → port, in the order they are spoken of."""
        return {variable(name): getattr(self, name) for name in PORT_FIELDS}


def variable(name: str) -> str:
    """``grpc_port`` → ``TRIDENT_GRPC_PORT``."""
    return f"TRIDENT_{name.upper()}"


def _path(text: str) -> Path:
    return Path(text).expanduser().absolute()


PORT_FIELDS = ("grpc_port", "http_port", "metrics_port")
KINDS = {int: "an integer", float: "a number of seconds", str: "text", _path: "a path"}
READERS = {
    declared.name: {"int": int, "float": float, "str": str}.get(str(declared.type), _path)
    for declared in fields(Settings)
}


def _between(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidArgument(variable(name), f"got {value!r}; allowed is {low:g} to {high:g}")


def _matches(name: str, value: str, pattern: str, allowed: str) -> None:
    if not re.fullmatch(pattern, value):
        raise InvalidArgument(variable(name), f"got {value!r}; allowed is {allowed}")


def _ipv4(name: str, value: str) -> None:
    try:
        ipaddress.IPv4Address(value)
    except ValueError as error:
        raise InvalidArgument(variable(name), f"got {value!r}; allowed is an IPv4 address such as 127.0.0.1") from error

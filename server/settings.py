"""What can be set from outside: TRIDENT_* variables, read once; docs/environment.md lists them."""

from __future__ import annotations

import ipaddress
import secrets
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from clients.replica_set import discovery
from contract import pem
from contract.environment import AbsolutePath, Allowed, EnvironmentSettings, environment_config
from contract.errors import InvalidArgument
from contract.watchdog import LIMIT_S, STALL_S

ROOT = Path(__file__).resolve().parents[1]
PORT_FIELDS = ("grpc_port", "http_port", "metrics_port")
DAY_S = 86_400
GATEWAYS = "HOST:PORT,HOST:PORT or dns:///NAME:PORT"


def _ipv4(host: str) -> str:
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        raise ValueError(f"must be an IPv4 address such as 127.0.0.1, got {host!r}") from None
    return host


def _gateways(where: str) -> str:
    if where:
        try:
            discovery.source(where)
        except InvalidArgument as error:
            raise ValueError(f"must be {GATEWAYS}, got {where!r}") from error
    return where


Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(ge=0.1, le=DAY_S, allow_inf_nan=False)]
HangSeconds = Annotated[float, Field(ge=3, le=DAY_S, allow_inf_nan=False)]  # heartbeats come once a second
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$"), Allowed("letters, digits, '.', '_' and '-'")]
PemFile = Annotated[AbsolutePath | None, Allowed("a PEM file")]


class Settings(EnvironmentSettings):
    """Settings of one supervisor and its tritonserver."""

    model_config = environment_config("TRIDENT_")

    engine: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$"),
        Allowed("a folder name of letters, digits, '.', '_' and '-' that starts with a letter or digit"),
    ] = Field(
        "demo",
        description="engine to serve: a folder under TRIDENT_ENGINES_DIR; `python -m server` takes several, "
        "joined by commas, and serves each on ports of its own",
    )
    host: Annotated[str, AfterValidator(_ipv4), Allowed("an IPv4 address such as 127.0.0.1")] = Field(
        "127.0.0.1", description="address that the three ports listen on"
    )
    grpc_port: Port = Field(8001, description="port of Triton's gRPC endpoint")
    http_port: Port = Field(8000, description="port of Triton's HTTP endpoint")
    metrics_port: Port = Field(8002, description="port of Triton's metrics")
    model_repository: AbsolutePath = Field(ROOT / "model_repository", description="folder of models that Triton loads")
    engines_dir: AbsolutePath = Field(ROOT / "engines", description="folder of built engines")
    tritonserver: AbsolutePath | None = Field(
        None, description="folder with bin/tritonserver; unset: /opt/tritonserver if it exists, else the wheel"
    )
    state_dir: AbsolutePath = Field(ROOT / ".triton", description="folder of backend links, logs and status files")
    start_timeout_s: Seconds = Field(120.0, description="longest time in seconds from launch to the first token")
    drain_s: Annotated[float, Field(ge=0, le=DAY_S, allow_inf_nan=False)] = Field(
        20.0, description="seconds that streams may go on after a stop; those left then end with an error"
    )
    canary_interval_s: Seconds = Field(10.0, description="seconds between two liveness probes while serving")
    canary_timeout_s: Seconds = Field(
        10.0, description="seconds after which a liveness probe without an end has failed"
    )
    stall_s: HangSeconds = Field(
        STALL_S, description="seconds without progress and without CPU use after which a process counts as hung"
    )
    step_limit_s: HangSeconds = Field(
        LIMIT_S,
        description="seconds without progress, CPU used or not, after which a process counts as hung: "
        "the longest engine step or call of a Python model",
    )
    log_level: Literal["error", "warning", "info", "verbose"] = Field("info", description="level of tritonserver's log")
    keepalive_s: Seconds = Field(10.0, description="seconds of silence after which a gRPC peer is pinged")
    otlp_endpoint: Annotated[
        str, Field(pattern=r"^$|^https?://[^\s,]+$"), Allowed("an http(s) URL without a comma")
    ] = Field("", description="OTLP/HTTP traces go here, e.g. http://127.0.0.1:4318/v1/traces; unset: no traces")
    trace_every: Annotated[int, Field(ge=1, le=2**31 - 1)] = Field(
        1000, description="one request in this many is traced"
    )
    tls_cert: PemFile = Field(None, description="certificate; set it and TRIDENT_TLS_KEY to serve gRPC over TLS")
    tls_key: PemFile = Field(None, description="private key of TRIDENT_TLS_CERT")
    tls_ca: PemFile = Field(None, description="certificates that the liveness probe trusts; unset: TRIDENT_TLS_CERT")
    tls_name: str = Field("localhost", description="name in the certificate, which the liveness probe expects")
    admin_key: Word = Field(
        default_factory=lambda: secrets.token_hex(16),
        repr=False,
        description="unlocks Triton's management APIs: header trident-admin-key over HTTP, metadata "
        "triton-grpc-protocol-trident-admin-key over gRPC; unset: a random one",
    )

    register_: Annotated[str, AfterValidator(_gateways), Allowed(GATEWAYS)] = Field(
        "",
        description="gateways' HTTP endpoints, which are told every second that this server serves (docs/fleet.md): "
        "`HOST:PORT,HOST:PORT` or `dns:///NAME:PORT`; unset: none",
    )
    register_token_file: Annotated[AbsolutePath | None, Allowed("a file with a token")] = Field(
        None, description="file with the gateways' token, as TRIDENT_GATEWAY_ADMIN_TOKEN_FILE names it"
    )
    register_pool: str = Field(
        "", description="pool of the gateways that this server joins; `{engine}` stands for the engine's name"
    )
    register_ca: PemFile = Field(None, description="authority of the gateways' certificates; set: TLS to the gateways")
    advertise: Annotated[str, Field(pattern=r"^[A-Za-z0-9.-]*$"), Allowed("a host name or an IPv4 address")] = Field(
        "",
        description="host that the gateways reach this server at; unset: TRIDENT_HOST or, if that is 0.0.0.0, the "
        "address with which this machine reaches the gateway",
    )

    @model_validator(mode="after")
    def _check_files(self) -> Settings:
        path = self.register_token_file
        if self.register_ and (path is None or not path.is_file()):
            problem = f"must be a file with the gateways' token where TRIDENT_REGISTER is set, got {path or 'nothing'}"
            raise InvalidArgument(self.variable("register_token_file"), problem)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidArgument("TRIDENT_TLS_KEY", "must be set together with TRIDENT_TLS_CERT, or neither")
        for name in ("tls_cert", "tls_key", "tls_ca", "register_ca"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise InvalidArgument(self.variable(name), f"must be a PEM file, got {path}: no such file")
        pem.check_pair(self.variable("tls_cert"), self.tls_cert, self.tls_key)
        pem.check_authority(self.variable("tls_ca"), self.tls_ca)
        pem.check_authority(self.variable("register_ca"), self.register_ca)
        return self

    def make_state_dir(self) -> None:
        """Make the folder for files of running servers. Raises InvalidArgument: it cannot be made or written."""
        try:
            self.state_dir.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=self.state_dir).close()
        except OSError as exc:
            problem = f"must be a folder that can be made and written, got {self.state_dir}: {exc.strerror}"
            raise InvalidArgument(self.variable("state_dir"), problem) from exc

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
        return {self.variable(name): getattr(self, name) for name in PORT_FIELDS}

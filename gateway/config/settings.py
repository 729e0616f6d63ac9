"""What can be set from outside: TRIDENT_GATEWAY_* variables, read once; docs/environment.md lists them."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from clients.replica_set import discovery, picks
from clients.wire.connection import TLS
from contract import pem
from contract.environment import AbsolutePath, Allowed, EnvironmentSettings, environment_config
from contract.errors import InvalidArgument
from gateway.config.policy import ReasoningFormat, ToolFormat, secret
from gateway.config.rules import RedisUrl

PREFIX = "TRIDENT_GATEWAY_"
API_KEYS = f"{PREFIX}API_KEYS"  # read with the file's keys, by ``tenants``
API_KEYS_FILE = f"{API_KEYS}_FILE"
MAX_BODIES_BYTES = 256 * 1024 * 1024
MONITORING_OFFSET = 2  # of the default monitoring port from the HTTP port
SCORED = "scored"
REGISTERED = "registered"
DAY_S = 86_400
SECRETS = ("redis", "semantic_api_key", "batch_webhook_secret")  # which a file may hold, named by …_FILE
_POLICIES = (SCORED, *picks.BY_NAME)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"must be a file, got {path}: there is no file")
    return path


def _folder(path: Path | None) -> Path | None:
    if path is not None and not path.is_dir():
        raise ValueError(f"must be a folder, got {path}: there is none")
    return path


def _pairs(value: Any) -> Any:
    """Parse ``a=1,b=2`` as ``{"a": "1", "b": "2"}``."""
    if not isinstance(value, str):
        return value
    pairs = [part.strip().partition("=") for part in value.split(",") if part.strip()]
    if not all(key and sep and text for key, sep, text in pairs):
        raise ValueError(f"must be NAME=VALUE,NAME=VALUE, got {value!r}")
    return {key: text for key, _, text in pairs}


def _listed(value: Any) -> Any:
    """Parse ``a,b`` as ``("a", "b")``."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _url(text: str) -> str:
    if text and not re.fullmatch(r"https?://[^\s/]\S*", text):
        raise ValueError(f"must be http://… or https://…, got {text!r}")
    return text


def _pattern(text: str) -> str:
    try:
        re.compile(text, re.IGNORECASE)
    except (re.error, OverflowError, RecursionError) as exc:
        raise ValueError(f"must be a regular expression, got {text!r:.200}: {exc}") from None
    return text


Port = Annotated[int, Field(ge=0, le=65_535)]
OptionalPort = Annotated[int | None, Field(ge=0, le=65_535)]
Retries = Annotated[int, Field(ge=0, le=10)]
Days = Annotated[int, Field(ge=1, le=36_500)]
BodyBytes = Annotated[int, Field(ge=1024, le=2**31 - 1)]
Bytes = Annotated[int, Field(ge=1, le=2**40)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
BatchCount = Annotated[int, Field(ge=1, le=1_000_000)]
BatchBytes = Annotated[int, Field(ge=1024, le=2**40)]
Seconds = Annotated[float, Field(ge=0.001, le=DAY_S, allow_inf_nan=False)]
SecondsOrZero = Annotated[float, Field(ge=0, le=DAY_S, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1), Allowed("text, not empty")]
Similarity = Annotated[float, Field(ge=0.5, le=1, allow_inf_nan=False)]
Pattern = Annotated[str, AfterValidator(_pattern)]
Folder = Annotated[AbsolutePath | None, AfterValidator(_folder)]
Url = Annotated[str, AfterValidator(_url), Allowed("http://… or https://…")]
File = Annotated[AbsolutePath, AfterValidator(_existing)]
SecretFile = Annotated[File | None, Allowed("a file with nothing else")]
PemFile = Annotated[File | None, Allowed("a PEM file")]
Pairs = Annotated[Mapping[str, str], BeforeValidator(_pairs)]
Urls = Annotated[Mapping[str, Url], BeforeValidator(_pairs)]
Weights = Annotated[Mapping[str, Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]], BeforeValidator(_pairs)]


class Settings(EnvironmentSettings):
    """Settings of one gateway. Raises InvalidArgument whose field is the environment variable."""

    model_config = environment_config(PREFIX)

    host: str = Field("127.0.0.1", description="address that the OpenAI and KServe endpoints listen on")
    http_port: Port = Field(9000, description="port of the OpenAI endpoint; 0: a free one")
    grpc_port: Port = Field(9001, description="port of the KServe gRPC endpoint; 0: a free one")
    picker_port: OptionalPort = Field(
        None, description="port of the endpoint picker for Envoy (docs/endpoint-picker.md); unset: none; 0: a free one"
    )
    picker_http_port: Port = Field(
        8000, description="port at which the replicas serve Triton's HTTP requests, which the endpoint picker names"
    )
    picker_openai_port: Port = Field(
        9000,
        description="port at which a gateway beside each replica serves OpenAI's requests, for the endpoint picker",
    )
    picker_endpoints: Annotated[Pairs, Allowed("HOST:PORT=IP:PORT,HOST:PORT=IP:PORT")] = Field(
        default_factory=dict, description="endpoints for HTTP requests of replicas that have them elsewhere"
    )
    monitoring_host: Text = Field(
        "127.0.0.1", description="address of the gateway's own /metrics and /health: plain HTTP, no API key"
    )
    monitoring_port: OptionalPort = Field(
        None, description="port of /metrics and /health; unset: HTTP_PORT + 2; 0: a free one"
    )
    model: Text = Field("demo", description="public name of the model; the name of the ensemble works too")
    models: Annotated[Pairs, Allowed("POOL=FILE,POOL=FILE")] = Field(
        default_factory=dict,
        description="several models, each named as its pool, with its tokenizer.json; [models] of the file wins",
    )
    triton_model: Text = Field("ensemble", description="name of the model at every replica")
    replicas: str = Field(
        "127.0.0.1:8001",
        description="replicas: `HOST:PORT,HOST:PORT`, `dns:///NAME:PORT`, `file:///PATH`, or `registered`: none but "
        "those that register (docs/fleet.md), which join any list; several pools: `stable=HOST:PORT,HOST:PORT;canary=dns:///NAME:PORT`",
    )
    pool_weights: Annotated[Weights, Allowed("NAME=NUMBER,NAME=NUMBER, numbers from 0 to 1e9")] = Field(
        default_factory=dict,
        description="shares of the pools, such as `stable=95,canary=5`; unset: equal shares; 0: pinned tenants only; "
        "section [pools] of the file wins",
    )
    encoders: Annotated[tuple[str, ...], BeforeValidator(_listed), Allowed("NAME,NAME")] = Field(
        (),
        description="pools whose replicas serve encoders, for embeddings and scores; section [pools] of the file too",
    )
    metrics_port: Port = Field(
        8002, description="the replicas' metrics are scraped from http://HOST:PORT/metrics; 0: not at all"
    )
    metrics_urls: Annotated[Urls, Allowed("HOST:PORT=URL,HOST:PORT=URL, each http://… or https://…")] = Field(
        default_factory=dict, description="metrics URLs of replicas that have them elsewhere"
    )
    metrics_interval_s: Seconds = Field(1.0, description="seconds between two metrics scrapes of a replica")
    routing: Annotated[str, Field(pattern=f"^({'|'.join(_POLICIES)})$"), Allowed(f"one of {', '.join(_POLICIES)}")] = (
        Field(SCORED, description="routing policy")
    )
    slow_start_s: SecondsOrZero = Field(30.0, description="age in seconds from which a replica gets its full share")
    probe_interval_s: Seconds = Field(10.0, description="seconds between two health probes of a replica")
    probe_timeout_s: Seconds = Field(2.0, description="timeout of a health probe in seconds")
    deep_probes: bool = Field(True, description="whether a health probe also generates one token")
    deep_prompt: Text = Field("The", description="prompt of deep probes")
    deep_sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$"), Allowed("64 lower-case hexadecimal digits")] = (
        Field("", description="digest of the token that deep probes must get; unset: any token")
    )
    breaker_failures: Count = Field(5, description="consecutive failures that open a circuit breaker")
    breaker_open_s: Seconds = Field(10.0, description="seconds that a breaker stays open at first")
    redis: Annotated[RedisUrl, Allowed("a URL")] = Field(
        "",
        repr=False,
        description="Redis or Valkey (`redis://…`, `rediss://…`, `unix:///PATH`) where the gateways share caps, "
        "idempotent streams, cached responses and what their breakers found; unset: each process has its own",
    )
    redis_file: SecretFile = Field(None, description="file with REDIS, read at start")
    config: File | None = Field(None, description="TOML file with tenants and rules (docs/gateway-configuration.md)")
    workers: Annotated[int, Field(ge=1, le=256)] = Field(
        1, description="processes that serve; they share ports, limits and queues (docs/operations.md)"
    )
    max_in_flight: Count = Field(1000, description="requests in flight, waiting ones included")
    max_body_bytes: BodyBytes = Field(4 * 1024 * 1024, description="bytes of an HTTP body or a gRPC message")
    max_bodies_bytes: Annotated[int | None, Field(ge=2048, le=2**48)] = Field(
        None,
        description="bytes of all request bodies in flight, at least 2 × MAX_BODY_BYTES; one tenant gets half; "
        "unset: 256 MiB",
    )
    max_choices: Count = Field(16, description="choices of one request: `n` times its prompts")
    default_max_tokens: Count = Field(
        256,
        description="max_tokens of a chat that sends none; with TOKENIZER at most what its prompt leaves",
    )
    tokenizer: File | None = Field(
        None,
        description="the model's tokenizer.json, which counts prompts and names tokens in `logprobs`; "
        "unset: TRIDENT_TOKENIZER, else prompts are estimated",
    )
    tool_format: ToolFormat = Field(
        "auto",
        description="how the model writes tool calls; auto: by the chat template beside TOKENIZER, hermes without one; "
        "none: tools are refused",
    )
    reasoning_format: ReasoningFormat = Field(
        "auto",
        description="where reasoning sections are: between `<think>` and `</think>` (tagged), from the beginning to "
        "`</think>` (open), nowhere (none); auto: by the chat template beside TOKENIZER",
    )
    tool_guides: bool = Field(
        True,
        description="whether a grammar holds tool calls to the tools' schemas; false for engines without guided "
        "decoding: then `tool_choice` required or named and `strict` are refused",
    )
    semantic_url: Url = Field(
        "",
        description="OpenAI-style embeddings API up to and with /v1; unset: SEMANTIC_MODEL is of this gateway",
    )
    semantic_model: str = Field(
        "",
        description="model of the semantic cache: an encoder of this gateway, or one at SEMANTIC_URL; unset: no cache",
    )
    semantic_api_key: str = Field("", repr=False, description="API key for SEMANTIC_URL, sent as a bearer token")
    semantic_api_key_file: SecretFile = Field(None, description="file with SEMANTIC_API_KEY; it may be replaced")
    semantic_timeout_s: Seconds = Field(0.25, description="timeout of an embeddings request; a slower one is a miss")
    semantic_threshold: Similarity = Field(0.95, description="lowest cosine similarity of a hit (docs/decisions/0011)")
    semantic_ttl_s: Seconds = Field(3600.0, description="longest age of a hit in seconds")
    semantic_max_entries: Annotated[int, Field(ge=1, le=100_000)] = Field(2000, description="responses per tenant")
    semantic_max_bytes: Bytes = Field(16 * 1024 * 1024, description="bytes of responses per tenant")
    semantic_exclude: Pattern = Field(
        "", description="regular expression; prompts that match are not cached and not sent to SEMANTIC_URL"
    )
    request_timeout_s: Seconds = Field(600.0, description="longest time in seconds from arrival to the last token")
    idle_timeout_s: Seconds = Field(
        60.0, description="longest silence of an engine in seconds; queueing at a replica that makes progress is none"
    )
    first_token_timeout_s: Seconds = Field(
        20.0, description="seconds without progress after which a request without a token is retried elsewhere"
    )
    hang_retries: Retries = Field(
        1, description="retries of a request whose replica makes no progress, so that a bad prompt hangs few engines"
    )
    continuations: Retries = Field(
        2, description="replicas that a generation may lose and go on at another one; 0 ends it with an error"
    )
    stall_timeout_s: Seconds = Field(30.0, description="seconds after which a client that reads nothing is cut off")
    heartbeat_s: Seconds = Field(15.0, description="seconds of silence after which a stream sends `: keep-alive`")
    header_timeout_s: Seconds = Field(10.0, description="longest time in seconds for a client to send its headers")
    body_timeout_s: Seconds = Field(30.0, description="longest time in seconds for a client to send its body")
    drain_s: SecondsOrZero = Field(
        30.0, description="seconds that streams may go on after SIGTERM or Ctrl-C; a second signal ends them"
    )
    batch_db: AbsolutePath | None = Field(
        None, description="SQLite file of /v1/files and /v1/batches, created if missing; unset: no batch API"
    )
    batch_max_running: BatchCount = Field(
        64, description="batch lines in flight at most; the pace (gateway/batch/pace.py) is usually lower"
    )
    batch_max_lines: BatchCount = Field(50_000, description="lines of one batch")
    batch_max_file_bytes: BatchBytes = Field(100 * 1024 * 1024, description="bytes of one file")
    batch_max_bytes: BatchBytes = Field(2 * 1024**3, description="bytes of all files of a tenant")
    batch_max_batches: BatchCount = Field(16, description="unfinished batches of a tenant")
    batch_webhook_origins: str = Field(
        "", description="`https://HOST,https://HOST:PORT`: the only origins that webhooks may call"
    )
    batch_webhook_secret: str = Field("", repr=False, description="`whsec_…`, which signs webhook calls")
    batch_webhook_secret_file: SecretFile = Field(
        None, description="file with BATCH_WEBHOOK_SECRET; it may be replaced"
    )
    response_db: AbsolutePath | None = Field(
        None, description="SQLite file of stored /v1/responses, created if missing; unset: in memory"
    )
    response_keep_s: Annotated[float, Field(ge=1, le=3650 * DAY_S, allow_inf_nan=False)] = Field(
        30.0 * DAY_S, description="seconds that a response is stored after it, or one that continues it, was made"
    )
    response_max: BatchCount = Field(
        10_000, description="stored responses of a tenant; those used longest ago go first"
    )
    response_max_bytes: BatchBytes = Field(64 * 1024 * 1024, description="bytes of all stored responses of a tenant")
    prompts: Folder = Field(
        None, description="folder of prompt templates (docs/prompts.md); unset: requests may name none"
    )
    samples: AbsolutePath | None = Field(
        None,
        description="folder of the prompts and answers that `[samples]` of CONFIG keeps (docs/samples.md); unset: none",
    )
    samples_keys: File | None = Field(
        None, description="file with the keys that encrypt them, the newest first; unset: they are not encrypted"
    )
    usage_db: AbsolutePath | None = Field(
        None,
        description="SQLite file of what requests used and of day and month budgets, created if missing "
        "(docs/usage.md); unset: no /v1/usage",
    )
    usage_keep_days: Days = Field(90, description="days that the record of a request is kept")
    usage_sums_keep_days: Days = Field(800, description="days that sums of records are kept, by a quarter of an hour")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest level that is logged")
    log_format: Literal["auto", "json", "text"] = Field(
        "auto", description="auto: text if standard error is a terminal, else json"
    )
    otlp_endpoint: Url = Field(
        "", description="OTLP/HTTP traces go here, such as http://127.0.0.1:4318/v1/traces; unset: no traces"
    )
    admin_token_file: Annotated[File | None, Allowed("a file with a token")] = Field(
        None,
        description="file with the token of `/admin/` (docs/fleet.md): for operators, and replicas that register; "
        "unset: no such endpoints",
    )
    key_store: Annotated[Literal["", "redis"] | AbsolutePath, Allowed("a path, or redis")] = Field(
        "",
        description="keys that are made by `python -m gateway key` and at /admin/keys (docs/identity.md): a SQLite "
        "file, or `redis` for that of REDIS, which gateways share; unset: none but those of CONFIG and API_KEYS",
    )
    audit_log: AbsolutePath | None = Field(
        None, description="file to which what operators and tenant admins do is appended; unset: the log alone has it"
    )
    tls_cert: PemFile = Field(None, description="certificate; set it and TLS_KEY to serve over TLS (docs/tls.md)")
    tls_key: PemFile = Field(None, description="private key of TLS_CERT")
    tls_client_ca: PemFile = Field(None, description="authority whose certificates clients must present")
    replica_ca: PemFile = Field(None, description="authority of the replicas' certificates; set: TLS to the replicas")
    replica_cert: PemFile = Field(None, description="client certificate for the replicas")
    replica_key: PemFile = Field(None, description="private key of REPLICA_CERT")
    replica_name: str = Field("", description="name in the replicas' certificates; unset: their address")

    @model_validator(mode="after")
    def _check_together(self) -> Settings:
        for cert, key in (("tls_cert", "tls_key"), ("replica_cert", "replica_key")):
            if (getattr(self, cert) is None) != (getattr(self, key) is None):
                raise InvalidArgument(variable(key), f"must be set together with {variable(cert)}, or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise InvalidArgument(variable("tls_client_ca"), f"is allowed only with {variable('tls_cert')}")
        if self.replica_ca is None and (self.replica_cert is not None or self.replica_name):
            raise InvalidArgument(variable("replica_ca"), "is missing; without it replicas are not reached over TLS")
        if self.semantic_url and not self.semantic_model:
            raise InvalidArgument(variable("semantic_model"), f"must be set with {variable('semantic_url')}, got ''")
        least_bytes = 2 * self.max_body_bytes
        if self.max_bodies_bytes is not None and self.max_bodies_bytes < least_bytes:
            problem = f"must be at least twice {variable('max_body_bytes')}: {least_bytes}, got {self.max_bodies_bytes}"
            raise InvalidArgument(variable("max_bodies_bytes"), problem)
        if self.key_store and (self.key_store == "redis") != bool(self.redis):
            problem = f"must be redis where {variable('redis')} is set, which gateways share, and else a path"
            raise InvalidArgument(variable("key_store"), f"{problem}, got {str(self.key_store)!r}")
        self.admin_token  # noqa: B018 - is read to be checked
        for where in self.pools.values():
            try:
                replica_source(where)
            except InvalidArgument as exc:
                raise InvalidArgument(variable("replicas"), exc.problem) from exc
        pem.check_pair(variable("tls_cert"), self.tls_cert, self.tls_key)
        pem.check_pair(variable("replica_cert"), self.replica_cert, self.replica_key)
        pem.check_authority(variable("tls_client_ca"), self.tls_client_ca)
        pem.check_authority(variable("replica_ca"), self.replica_ca)
        names = ", ".join(name or "''" for name in self.pools)
        for setting in ("pool_weights", "models", "encoders"):
            for pool in getattr(self, setting):
                if pool not in self.pools:
                    raise InvalidArgument(variable(setting), f"must name pools of {names}, got {pool!r}")
        if sum(self.weights.values()) <= 0 and len(self.encoders) < len(self.pools):
            raise InvalidArgument(variable("pool_weights"), "must have one weight above 0, got none")
        return self

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], **overrides: Any) -> Settings:
        """Read the settings from ``environ``; see EnvironmentSettings.

        TRIDENT_TOKENIZER, which a server sets for the gateway it starts, is the default of
        TRIDENT_GATEWAY_TOKENIZER if it names a file.
        """
        for name in map(variable, SECRETS):
            if path := environ.get(f"{name}_FILE"):
                if environ.get(name):
                    raise InvalidArgument(f"{name}_FILE", f"is allowed only without {name}")
                environ = {**environ, name: secret(f"{name}_FILE", path)}
        served = environ.get("TRIDENT_TOKENIZER", "")
        if served and os.path.isfile(os.path.expanduser(served)):
            environ = {**environ, variable("tokenizer"): environ.get(variable("tokenizer"), "") or served}
        return super().from_environment(environ, **overrides)

    @property
    def pools(self) -> dict[str, str]:
        """Where the replicas of each pool are, by its name; "" is the name of a single pool without one."""
        if "=" not in self.replicas:
            return {"": self.replicas}
        pools = {}
        for part in filter(None, (part.strip() for part in self.replicas.split(";"))):
            name, sep, where = part.partition("=")
            if not sep or not name.strip() or not where.strip() or name.strip() in pools:
                problem = f"must be NAME=HOST:PORT,HOST:PORT with a different name for each pool, got {part!r}"
                raise InvalidArgument(variable("replicas"), problem)
            pools[name.strip()] = where.strip()
        return pools

    def secret(self, name: str) -> str:
        """Return a setting of SECRETS, as its file has it now if it has one. Raises InvalidArgument."""
        path = getattr(self, f"{name}_file")
        return secret(variable(f"{name}_file"), path) if path is not None else getattr(self, name)

    @property
    def admin_token(self) -> bytes:
        """The token of /admin/; empty where there are no such endpoints. Raises InvalidArgument."""
        if self.admin_token_file is None:
            return b""
        token = secret(variable("admin_token_file"), self.admin_token_file).encode()
        if not re.fullmatch(rb"[!-~]{16,4096}", token):
            problem = "must hold one token of 16 to 4096 printable ASCII characters without blanks"
            raise InvalidArgument(variable("admin_token_file"), problem)
        return token

    @property
    def weights(self) -> dict[str, float]:
        """The share of each pool, by its name; in any unit."""
        equal = not self.pool_weights
        return {pool: self.pool_weights.get(pool, float(equal and pool not in self.encoders)) for pool in self.pools}

    @property
    def shortest_timeout_s(self) -> float:
        """The shortest timeout of a stream."""
        return min(self.heartbeat_s, self.stall_timeout_s, self.idle_timeout_s, self.first_token_timeout_s)

    @property
    def own_metrics_port(self) -> int:
        """The port of the monitoring listener; 0 for a free one."""
        if self.monitoring_port is not None:
            return self.monitoring_port
        beside = self.http_port + MONITORING_OFFSET
        return beside if self.http_port and beside <= 65535 else 0

    @property
    def own_max_bodies_bytes(self) -> int:
        """Bytes of all request bodies in flight."""
        if self.max_bodies_bytes is not None:
            return self.max_bodies_bytes
        return max(MAX_BODIES_BYTES, 2 * self.max_body_bytes)

    @property
    def replica_tls(self) -> TLS | None:
        """TLS to the replicas; None for plain text."""
        if self.replica_ca is None:
            return None
        return TLS(self.replica_ca, self.replica_cert, self.replica_key, self.replica_name)

    def metrics_url(self, replica: str) -> str:
        """Return the metrics URL of the replica at ``HOST:PORT``; "" if it is not scraped."""
        if replica in self.metrics_urls:
            return self.metrics_urls[replica]
        return f"http://{replica.rpartition(':')[0]}:{self.metrics_port}/metrics" if self.metrics_port else ""


class NoReplicas:
    """The source of a pool whose replicas all register themselves."""

    async def replicas(self) -> tuple[str, ...]:
        return ()


def replica_source(where: str) -> discovery.Discovery:
    """Return the source of a pool's replicas. Raises InvalidArgument."""
    return NoReplicas() if where.strip() == REGISTERED else discovery.source(where)


# What Kubernetes puts into every container of a namespace with a service called trident-gateway, or trident-gateway-…
_SERVICE_LINK = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://\S+")


def unknown(environ: Mapping[str, str]) -> list[str]:
    """Return a warning for each unknown TRIDENT_GATEWAY_* variable, with the nearest known name.

    Variables that Kubernetes sets are no mistakes and left out.
    """
    known = [*map(variable, Settings.model_fields), API_KEYS, API_KEYS_FILE]
    found = []
    for name, value in sorted(environ.items()):
        if not name.startswith(PREFIX) or name in known:
            continue
        if _SERVICE_LINK.fullmatch(name.removeprefix(PREFIX)) or _SERVICE_URL.fullmatch(value):
            continue
        near = difflib.get_close_matches(name.upper(), known, 1, 0.8)
        found.append(f"{name}: is not known and has no effect" + (f"; did you mean {near[0]}?" if near else ""))
    return found


def variable(name: str) -> str:
    """Return the variable of a setting: ``TRIDENT_GATEWAY_HTTP_PORT`` of ``http_port``."""
    return PREFIX + name.upper()

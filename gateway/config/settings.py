"""What can be set from outside: TRIDENT_GATEWAY_* variables, read once into a frozen dataclass.

| variable TRIDENT_GATEWAY_… | default | meaning |
|---|---|---|
| HOST | 127.0.0.1 | address both doors listen on |
| HTTP_PORT, GRPC_PORT | 9000, 9001 | the OpenAI door and the KServe door; 0 takes a free port |
| MONITORING_HOST | 127.0.0.1 | address of the gateway's own /metrics and /health: plain HTTP, no key |
| MONITORING_PORT | HTTP_PORT + 2 | its port: 9002 unless HTTP_PORT says otherwise; 0 takes a free one |
| MODEL | demo | the name callers use in `model`; the ensemble's own name is understood too |
| TRITON_MODEL | ensemble | the model behind it on every replica |
| REPLICAS | 127.0.0.1:8001 | where they are, see below |
| POOL_WEIGHTS | | `stable=95,canary=5`: equal if left out, 0: only pinned tenants; [pools] of the file wins |
| METRICS_PORT | 8002 | the replicas', not ours: http://<a replica's host>:<this>/metrics is read; 0: none |
| METRICS_URLS | | `HOST:PORT=URL,…` for replicas whose page is elsewhere |
| METRICS_INTERVAL_S | 1 | how often the pages are read |
| ROUTING | scored | how a replica is picked: scored, or a name of clients/replica_set/picks.py |
| SLOW_START_S | 30 | a replica that comes (back) gets its full share after so long |
| PROBE_INTERVAL_S, PROBE_TIMEOUT_S | 10, 2 | health probes of a replica: out after 3 failures, back after 2 successes |
| DEEP_PROBES | true | a probe also generates one token |
| DEEP_PROMPT, DEEP_SHA256 | The | its prompt, and its token's digest (sha256); empty: any token |
| BREAKER_FAILURES, BREAKER_OPEN_S | 5, 10 | failures in a row that open a breaker, and for how long at first |
| CONFIG | | TOML file of tenants with their keys (tenants.py) and of the rules (policy.py) |
| API_KEYS | | `ORG/TEAM/KEY=<the API key>,…` beside those of the file; without any key everybody is one tenant |
| MAX_IN_FLIGHT | 1000 | requests at once, those that wait included; the next is refused |
| MAX_BODY_BYTES | 4194304 | of an HTTP request and of a gRPC message |
| MAX_BODIES_BYTES | 256 MiB | of all requests under way together, half of it of one tenant; at least 2 bodies |
| MAX_CHOICES | 16 | `n` times the prompts of one request |
| DEFAULT_MAX_TOKENS | 256 | where a chat asks for no limit |
| GUIDED_DECODING | false | the engine can hold its output to a JSON schema |
| TOKENIZER | | the model's tokenizer.json: counts prompts (else estimated), names `logprobs` (else `token_id:N`) |
| SEMANTIC_URL | | OpenAI-style embeddings API, up to and with /v1, for the semantic cache; empty: no such cache |
| SEMANTIC_MODEL | | the embedding model's name there |
| SEMANTIC_API_KEY | | sent there as a bearer token; empty: none |
| SEMANTIC_TIMEOUT_S | 0.25 | longest time of one embeddings request; a slower one is a cache miss |
| SEMANTIC_THRESHOLD | 0.95 | lowest cosine of a hit (docs/decisions/0014) |
| SEMANTIC_TTL_S | 3600 | longest age of a hit |
| SEMANTIC_MAX_ENTRIES | 2000 | responses of one tenant |
| SEMANTIC_MAX_BYTES | 16777216 | bytes of one tenant |
| SEMANTIC_EXCLUDE | | regular expression; a prompt in which it is found is not cached and not sent to SEMANTIC_URL |
| REQUEST_TIMEOUT_S | 600 | longest time from arrival to the last token |
| IDLE_TIMEOUT_S | 60 | longest silence of an engine; waiting in the queue of a replica that works for others is none |
| FIRST_TOKEN_TIMEOUT_S | 20 | a request without a token at a replica that made nothing for so long is tried elsewhere |
| HANG_RETRIES | 1 | how often at most, so that a prompt that hangs engines hangs few; 0: never |
| STALL_TIMEOUT_S | 30 | a reader that takes nothing for so long is cut off |
| HEARTBEAT_S | 15 | a silent stream says `: keep-alive` so often |
| HEADER_TIMEOUT_S, BODY_TIMEOUT_S | 10, 30 | a caller that has not sent its headers, its body by then is cut off |
| DRAIN_S | 30 | how long streams may go on after SIGTERM or Ctrl-C; the same signal again ends them at once |
| BATCH_DB | | SQLite file of /v1/files and /v1/batches, made where there is none; empty: no batches |
| BATCH_MAX_RUNNING | 64 | lines of batches at once, at best; the pace is usually lower (gateway/batch/aimd.py) |
| BATCH_MAX_LINES | 50000 | lines of one batch |
| BATCH_MAX_FILE_BYTES, BATCH_MAX_BYTES | 104857600, 2147483648 | of one file, and of all that a tenant keeps |
| BATCH_MAX_BATCHES | 16 | of one tenant that are not over |
| BATCH_WEBHOOK_ORIGINS | | `https://HOST,https://HOST:PORT`: the only ones that are told of a batch's end |
| BATCH_WEBHOOK_SECRET | | `whsec_…`, what such calls are signed with |
| LOG_LEVEL | info | debug, info, warning or error |
| LOG_FORMAT | auto | json, text, or auto: text where standard error is a terminal, else json |
| OTLP_ENDPOINT | | spans go there, such as http://127.0.0.1:4318/v1/traces |
| TLS_CERT, TLS_KEY | | PEM files; set both to serve both doors over TLS (docs/tls.md) |
| TLS_CLIENT_CA | | PEM file; both doors then take only callers with a certificate of this authority |
| REPLICA_CA | | PEM file; replicas are then reached over TLS and have to be of this authority |
| REPLICA_CERT, REPLICA_KEY | | PEM files: who the gateway is, for replicas that ask |
| REPLICA_NAME | | the name in the replicas' certificates, where it is not their address |

REPLICAS is one pool, `HOST:PORT,HOST:PORT`, `dns:///NAME:PORT` or `file:///PATH`, or several with names:
`stable=HOST:PORT,HOST:PORT;canary=dns:///NAME:PORT`.
"""

from __future__ import annotations

import difflib
import math
import re
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType

from clients.replica_set import discovery, picks
from clients.wire.connection import TLS
from contract.errors import InvalidArgument

PREFIX = "TRIDENT_GATEWAY_"
LOG_LEVELS = ("debug", "info", "warning", "error")
MAX_BODIES_BYTES = 256 * 1024 * 1024
LOG_FORMATS = ("auto", "json", "text")
MONITORING_OFFSET = 2  # MONITORING_PORT is so far above HTTP_PORT where it is not set
SCORED = "scored"


def _nothing() -> Mapping:
    return MappingProxyType({})


@dataclass(frozen=True)
class Settings:
    """A valid configuration. Construction raises InvalidArgument that names the variable and what is allowed."""

    host: str = "127.0.0.1"
    http_port: int = 9000
    grpc_port: int = 9001
    monitoring_host: str = "127.0.0.1"
    monitoring_port: int | None = None
    model: str = "demo"
    triton_model: str = "ensemble"
    replicas: str = "127.0.0.1:8001"
    pool_weights: Mapping[str, str] = field(default_factory=_nothing)
    metrics_port: int = 8002
    metrics_urls: Mapping[str, str] = field(default_factory=_nothing)
    metrics_interval_s: float = 1.0
    routing: str = SCORED
    slow_start_s: float = 30.0
    probe_interval_s: float = 10.0
    probe_timeout_s: float = 2.0
    deep_probes: bool = True
    deep_prompt: str = "The"
    deep_sha256: str = ""
    breaker_failures: int = 5
    breaker_open_s: float = 10.0
    config: Path | None = None
    max_in_flight: int = 1000
    max_body_bytes: int = 4 * 1024 * 1024
    max_bodies_bytes: int | None = None
    max_choices: int = 16
    default_max_tokens: int = 256
    guided_decoding: bool = False
    tokenizer: Path | None = None
    semantic_url: str = ""
    semantic_model: str = ""
    semantic_api_key: str = field(default="", repr=False)
    semantic_timeout_s: float = 0.25
    semantic_threshold: float = 0.95
    semantic_ttl_s: float = 3600.0
    semantic_max_entries: int = 2000
    semantic_max_bytes: int = 16 * 1024 * 1024
    semantic_exclude: str = ""
    request_timeout_s: float = 600.0
    idle_timeout_s: float = 60.0
    first_token_timeout_s: float = 20.0
    hang_retries: int = 1
    stall_timeout_s: float = 30.0
    heartbeat_s: float = 15.0
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    drain_s: float = 30.0
    batch_db: Path | None = None
    batch_max_running: int = 64
    batch_max_lines: int = 50_000
    batch_max_file_bytes: int = 100 * 1024 * 1024
    batch_max_bytes: int = 2 * 1024**3
    batch_max_batches: int = 16
    batch_webhook_origins: str = ""
    batch_webhook_secret: str = ""
    log_level: str = "info"
    log_format: str = "auto"
    otlp_endpoint: str = ""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    replica_ca: Path | None = None
    replica_cert: Path | None = None
    replica_key: Path | None = None
    replica_name: str = ""

    def __post_init__(self) -> None:
        for name in ("http_port", "grpc_port", "metrics_port"):
            _between(name, getattr(self, name), 0, 65535)
        if self.monitoring_port is not None:
            _between("monitoring_port", self.monitoring_port, 0, 65535)
        for name in ("breaker_failures", "max_in_flight", "max_choices", "default_max_tokens"):
            _between(name, getattr(self, name), 1, 2**31 - 1)
        _between("hang_retries", self.hang_retries, 0, 10)
        _between("max_body_bytes", self.max_body_bytes, 1024, 2**31 - 1)
        if self.max_bodies_bytes is not None:
            _between("max_bodies_bytes", self.max_bodies_bytes, 2 * self.max_body_bytes, 2**48)
        _between("semantic_threshold", self.semantic_threshold, 0.5, 1.0)
        _between("semantic_max_entries", self.semantic_max_entries, 1, 100_000)
        _between("semantic_max_bytes", self.semantic_max_bytes, 1, 2**40)
        for name in ("batch_max_running", "batch_max_lines", "batch_max_batches"):
            _between(name, getattr(self, name), 1, 1_000_000)
        for name in ("batch_max_file_bytes", "batch_max_bytes"):
            _between(name, getattr(self, name), 1024, 2**40)
        for declared in fields(self):
            if declared.name.endswith("_s"):
                low = 0.0 if declared.name in ("slow_start_s", "drain_s") else 0.001
                _between(declared.name, getattr(self, declared.name), low, 86_400.0)
        _among("routing", self.routing, (SCORED, *picks.BY_NAME))
        _among("log_level", self.log_level, LOG_LEVELS)
        _among("log_format", self.log_format, LOG_FORMATS)
        for name in ("model", "triton_model", "deep_prompt", "monitoring_host"):
            if not getattr(self, name):
                raise InvalidArgument(variable(name), "is empty; at least one character is needed")
        for cert, key in (("tls_cert", "tls_key"), ("replica_cert", "replica_key")):
            if (getattr(self, cert) is None) != (getattr(self, key) is None):
                raise InvalidArgument(variable(key), f"set {variable(cert)} and {variable(key)} together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise InvalidArgument(variable("tls_client_ca"), f"is allowed only with {variable('tls_cert')}")
        if self.replica_ca is None and (self.replica_cert is not None or self.replica_name):
            raise InvalidArgument(variable("replica_ca"), "is missing; without it replicas are not reached over TLS")
        for declared in fields(self):
            path = getattr(self, declared.name)
            if isinstance(path, Path) and declared.name != "batch_db" and not path.is_file():  # which is made
                raise InvalidArgument(variable(declared.name), f"there is no file {path}")
        if self.semantic_url and not self.semantic_model:
            raise InvalidArgument(
                variable("semantic_model"), f"must be set with {variable('semantic_url')}, got nothing"
            )
        for name, urls in (
            ("otlp_endpoint", (self.otlp_endpoint,)),
            ("semantic_url", (self.semantic_url,)),
            ("metrics_urls", self.metrics_urls.values()),
        ):
            for url in filter(None, urls):
                if not re.fullmatch(r"https?://[^\s/]\S*", url):
                    raise InvalidArgument(variable(name), f"got {url!r}; allowed is http://… or https://…")
        if self.deep_sha256 and not re.fullmatch("[0-9a-f]{64}", self.deep_sha256):
            raise InvalidArgument(variable("deep_sha256"), "allowed are 64 hexadecimal digits, in lower case")
        for where in self.pools.values():
            try:
                discovery.source(where)
            except InvalidArgument as exc:
                raise InvalidArgument(variable("replicas"), exc.problem) from exc
        self._check_pem()
        for pool in self.pool_weights:
            if pool not in self.pools:
                allowed = ", ".join(name or "''" for name in self.pools)
                raise InvalidArgument(variable("pool_weights"), f"there is no pool {pool!r}; there are {allowed}")
        if sum(self.weights.values()) <= 0:
            raise InvalidArgument(variable("pool_weights"), "all weights are 0; one at least must be more")

    def _check_pem(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for name, cert, key in (
            ("tls_cert", self.tls_cert, self.tls_key),
            ("replica_cert", self.replica_cert, self.replica_key),
        ):
            try:
                if cert is not None:
                    context.load_cert_chain(cert, key, password="")  # or the terminal would be asked for one
            except (OSError, ValueError) as exc:
                problem = f"{cert} and {key} are no certificate with its key, in PEM and without a password"
                raise InvalidArgument(variable(name), problem) from exc
        for name, authority in (("tls_client_ca", self.tls_client_ca), ("replica_ca", self.replica_ca)):
            try:
                if authority is not None:
                    context.load_verify_locations(authority)
            except (OSError, ValueError) as exc:
                raise InvalidArgument(variable(name), f"{authority} is no certificate in PEM") from exc

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], **overrides: object) -> Settings:
        """Settings from TRIDENT_GATEWAY_* of ``environ``; an override that is not None wins over its variable.

        TRIDENT_TOKENIZER, which a server sets for the gateway it starts, stands in for TRIDENT_GATEWAY_TOKENIZER where
        there is such a file.
        """
        values: dict[str, object] = {}
        served = environ.get("TRIDENT_TOKENIZER", "")
        if served and _path(served).is_file():
            values["tokenizer"] = _path(served)
        for name, read in _READERS.items():
            text = environ.get(variable(name), "")
            if text != "":
                try:
                    values[name] = read(text)
                except ValueError as exc:
                    raise InvalidArgument(variable(name), f"got {text!r}; allowed is {_KINDS[read]}") from exc
        return cls(**values | {name: value for name, value in overrides.items() if value is not None})

    @property
    def pools(self) -> dict[str, str]:
        """Where the replicas of each pool are, by its name; a single pool without a name has the empty one."""
        if "=" not in self.replicas:
            return {"": self.replicas}
        pools = {}
        for part in filter(None, (part.strip() for part in self.replicas.split(";"))):
            name, sep, where = part.partition("=")
            if not sep or not name.strip() or not where.strip() or name.strip() in pools:
                problem = f"got {part!r}; allowed is NAME=HOST:PORT,HOST:PORT with a name of its own for each pool"
                raise InvalidArgument(variable("replicas"), problem)
            pools[name.strip()] = where.strip()
        return pools

    @property
    def weights(self) -> dict[str, float]:
        """The share of each pool, by its name; they need not add up to anything."""
        weights = {}
        for pool in self.pools:
            text = self.pool_weights.get(pool, "1" if not self.pool_weights else "0")
            try:
                weights[pool] = float(text)
            except ValueError as exc:
                raise InvalidArgument(variable("pool_weights"), f"{pool}={text!r} is not a number") from exc
            _between("pool_weights", weights[pool], 0.0, 1e9)
        return weights

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
        """Bytes that the bodies of all requests under way may take together."""
        if self.max_bodies_bytes is not None:
            return self.max_bodies_bytes
        return max(MAX_BODIES_BYTES, 2 * self.max_body_bytes)

    @property
    def replica_tls(self) -> TLS | None:
        """How replicas are reached; None for plain text, which belongs on a network of one's own."""
        if self.replica_ca is None:
            return None
        return TLS(self.replica_ca, self.replica_cert, self.replica_key, self.replica_name)

    def metrics_url(self, replica: str) -> str:
        """The metrics page of the replica at ``HOST:PORT``; empty if none is read."""
        if replica in self.metrics_urls:
            return self.metrics_urls[replica]
        return f"http://{replica.rpartition(':')[0]}:{self.metrics_port}/metrics" if self.metrics_port else ""


# What Kubernetes puts into every container of a namespace with a service called trident-gateway, or trident-gateway-…
_SERVICE_LINK = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://\S+")


def unknown(environ: Mapping[str, str], also: Iterable[str] = ()) -> list[str]:
    """Returns a sentence for each TRIDENT_GATEWAY_* variable that is none of ours, with the nearest that is.

    They are no error, since Kubernetes sets such names by itself; those are left out. also: further names that count.
    """
    known = [*map(variable, _READERS), *also]
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
    """``http_port`` → ``TRIDENT_GATEWAY_HTTP_PORT``."""
    return PREFIX + name.upper()


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise ValueError(text)
    return text.lower() in ("true", "1")


def _path(text: str) -> Path:
    return Path(text).expanduser().absolute()


def _table(text: str) -> Mapping[str, str]:
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    if not all(key and sep and value for key, sep, value in pairs):
        raise ValueError(text)
    return MappingProxyType({key: value for key, _, value in pairs})


_KINDS: dict[Callable, str] = {
    int: "an integer",
    float: "a number of seconds",
    str: "text",
    _flag: "true or false",
    _path: "a path",
    _table: "NAME=VALUE,NAME=VALUE",
}
_BY_TYPE = {
    "int": int,
    "int | None": int,
    "float": float,
    "str": str,
    "bool": _flag,
    "Path | None": _path,
    "Mapping[str, str]": _table,
}
_READERS = {declared.name: _BY_TYPE[str(declared.type)] for declared in fields(Settings)}


def _between(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidArgument(variable(name), f"got {value!r}; allowed is {low:g} to {high:g}")


def _among(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidArgument(variable(name), f"got {value!r}; allowed is {', '.join(allowed)}")

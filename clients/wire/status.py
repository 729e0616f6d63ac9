"""The unary calls about a server: whether it is live and ready, and which models it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clients.wire import failures, protobuf
from contract import encoder

_SERVICE = "/inference.GRPCInferenceService"
# The models of our repository, for servers that restrict access to their index.
_NEEDED = ("ensemble", "tokenizer", "engine", "detokenizer")  # of a server that has no encoder
KNOWN_MODELS = (encoder.MODEL, *_NEEDED, "ensemble_packed", "detokenizer_packed", "client_watch")


@dataclass(frozen=True)
class UnaryCall:
    """One unary call: full method name and serialized request."""

    method: str
    payload: bytes = b""


@dataclass(frozen=True)
class Health:
    """live: the process responds. ready: as the server reports. model_ready: ``model`` is loaded."""

    url: str
    model: str
    live: bool
    ready: bool
    model_ready: bool

    @property
    def ok(self) -> bool:
        return self.live and self.ready and self.model_ready


@dataclass(frozen=True)
class Model:
    """One version of a model. state: READY, LOADING, UNLOADING, UNAVAILABLE or empty; reason: why not ready."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


def from_readiness(ready: Mapping[str, bool]) -> list[Model]:
    """Return the models that are ready, and those that the server needs and that are not, of all KNOWN_MODELS."""
    needed = () if ready[encoder.MODEL] else _NEEDED
    shown = [name for name in ready if ready[name] or name in needed]
    return [Model(name, state="READY" if ready[name] else "UNAVAILABLE") for name in shown]


REPOSITORY_INDEX = UnaryCall(f"{_SERVICE}/RepositoryIndex")


def model_ready(model: str) -> UnaryCall:
    return UnaryCall(f"{_SERVICE}/ModelReady", protobuf.text(1, model))


def health_calls(model: str) -> list[UnaryCall]:
    return [UnaryCall(f"{_SERVICE}/ServerLive"), UnaryCall(f"{_SERVICE}/ServerReady"), model_ready(model)]


def read_flag(response: bytes) -> bool:
    """The one bool of ServerLive, ServerReady and ModelReady."""
    try:
        return dict(protobuf.fields(response)).get(1) == 1
    except protobuf.WireError as exc:
        raise failures.unreadable(exc) from exc


def read_health(url: str, model: str, responses: list[bytes]) -> Health:
    return Health(url, model, *(read_flag(response) for response in responses))


def read_models(response: bytes) -> list[Model]:
    """RepositoryIndexResponse{1: Model{1: name, 2: version, 3: state, 4: reason}}."""
    models = []
    try:
        for number, value in protobuf.fields(response):
            if number == 1:
                parts = {key: data.decode() for key, data in protobuf.fields(value)}
                models.append(Model(*(parts.get(key, "") for key in (1, 2, 3, 4))))
    except (protobuf.WireError, AttributeError, TypeError, UnicodeDecodeError) as exc:
        raise failures.unreadable(exc) from exc
    return models

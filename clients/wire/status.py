"""Questions about a server that are not generations: is it alive, ready, and what models has it."""

from __future__ import annotations

from dataclasses import dataclass

from clients.wire import failures, protobuf

_SERVICE = "/inference.GRPCInferenceService"
# What our repository holds, for servers that do not let us read their index.
KNOWN_MODELS = ("ensemble", "tokenizer", "engine", "detokenizer")


@dataclass(frozen=True)
class Question:
    """One unary call: full method name and serialized request."""

    method: str
    payload: bytes = b""


@dataclass(frozen=True)
class Health:
    """live: the process answers. ready: the server says so. model_ready: the model we talk to is loaded."""

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


MODELS_QUESTION = Question(f"{_SERVICE}/RepositoryIndex")


def model_ready(model: str) -> Question:
    return Question(f"{_SERVICE}/ModelReady", protobuf.text(1, model))


def health_questions(model: str) -> list[Question]:
    return [Question(f"{_SERVICE}/ServerLive"), Question(f"{_SERVICE}/ServerReady"), model_ready(model)]


def read_flag(answer: bytes) -> bool:
    """The one bool of ServerLive, ServerReady and ModelReady."""
    try:
        return dict(protobuf.fields(answer)).get(1) == 1
    except protobuf.WireError as exc:
        raise failures.unreadable(exc) from exc


def read_health(url: str, model: str, answers: list[bytes]) -> Health:
    return Health(url, model, *(read_flag(answer) for answer in answers))


def read_models(answer: bytes) -> list[Model]:
    """RepositoryIndexResponse{1: Model{1: name, 2: version, 3: state, 4: reason}}."""
    models = []
    try:
        for number, value in protobuf.fields(answer):
            if number == 1:
                parts = {key: data.decode() for key, data in protobuf.fields(value)}
                models.append(Model(*(parts.get(key, "") for key in (1, 2, 3, 4))))
    except (protobuf.WireError, AttributeError, TypeError, UnicodeDecodeError) as exc:
        raise failures.unreadable(exc) from exc
    return models

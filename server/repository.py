"""The steps of the ensemble, read from the model repository as Triton reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from contract.errors import NotFound

ENSEMBLE = "ensemble"


@dataclass(frozen=True)
class Model:
    """One step of the ensemble.

    stubs: processes that the Python backend runs for it; 0 for other backends.
    streams: it or an earlier step is decoupled, so requests in flight cannot continue without its stub.
    """

    name: str
    stubs: int
    streams: bool


@dataclass(frozen=True)
class Pipeline:
    """The steps of the ensemble in the order of its config."""

    models: tuple[Model, ...]

    def __getitem__(self, name: str) -> Model:
        return next(model for model in self.models if model.name == name)

    @property
    def last(self) -> Model:
        return self.models[-1]


def read_pipeline(repository: Path, config_name: str) -> Pipeline:
    """Read the ensemble of ``repository``.

    config_name: selects ``configs/<name>.pbtxt`` of a model that has it.

    Raises:
        NotFound: a model is missing or its config cannot be read.
    """
    steps = _read_config(repository, ENSEMBLE, config_name).ensemble_scheduling.step
    if not steps:
        raise NotFound(f"{repository / ENSEMBLE}/config.pbtxt: must be an ensemble, got no ensemble_scheduling")
    models: list[Model] = []
    streams = False
    for step in steps:
        config = _read_config(repository, step.model_name, config_name)
        streams = streams or config.model_transaction_policy.decoupled
        stubs = sum(group.count or 1 for group in config.instance_group) or 1
        models.append(Model(step.model_name, stubs if config.backend == "python" else 0, streams))
    return Pipeline(tuple(models))


def _read_config(repository: Path, model: str, config_name: str) -> ModelConfig:
    chosen = repository / model / "configs" / f"{config_name}.pbtxt"
    path = chosen if chosen.is_file() else repository / model / "config.pbtxt"
    try:
        return text_format.Parse(path.read_text(), ModelConfig())
    except OSError as error:
        raise NotFound(f"model {model!r} is not in {repository}: cannot read {path} ({error.strerror})") from error
    except text_format.ParseError as error:
        raise NotFound(f"model {model!r} cannot be read: {path}:{error}") from error

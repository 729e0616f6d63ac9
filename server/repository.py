"""What is served, the ensemble with its steps or the encoder, read from the model repository as Triton reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from contract import encoder
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
    """The model that clients call, and the steps of the ensemble in the order of its config.

    name: the ensemble's; an encoder has no ensemble and is its own only step.
    """

    models: tuple[Model, ...]
    name: str = ENSEMBLE

    def __getitem__(self, name: str) -> Model:
        return next(model for model in self.models if model.name == name)

    @property
    def last(self) -> Model:
        return self.models[-1]


def served_model(kind: str) -> str:
    """Return Triton's name of the model that serves an engine of this kind."""
    return encoder.MODEL if kind in encoder.KINDS else ENSEMBLE


def read_pipeline(repository: Path, config_name: str, name: str = ENSEMBLE) -> Pipeline:
    """Read the model ``name`` of ``repository``, with its steps.

    config_name: selects ``configs/<name>.pbtxt`` of a model that has it.
    Raises NotFound: a model is missing or its config cannot be read.
    """
    steps = [step.model_name for step in _read_config(repository, name, config_name).ensemble_scheduling.step]
    if not steps and name == ENSEMBLE:
        raise NotFound(f"{repository / ENSEMBLE}/config.pbtxt: must be an ensemble, got no ensemble_scheduling")
    models: list[Model] = []
    streams = False
    for step in steps or [name]:
        config = _read_config(repository, step, config_name)
        streams = streams or config.model_transaction_policy.decoupled
        stubs = sum(group.count or 1 for group in config.instance_group) or 1
        models.append(Model(step, stubs if config.backend == "python" else 0, streams))
    return Pipeline(tuple(models), name)


def _read_config(repository: Path, model: str, config_name: str) -> ModelConfig:
    chosen = repository / model / "configs" / f"{config_name}.pbtxt"
    path = chosen if chosen.is_file() else repository / model / "config.pbtxt"
    try:
        return text_format.Parse(path.read_text(), ModelConfig())
    except OSError as error:
        raise NotFound(f"model {model!r} is not in {repository}: cannot read {path} ({error.strerror})") from error
    except text_format.ParseError as error:
        raise NotFound(f"model {model!r} cannot be read: {path}:{error}") from error

"""What is served, the ensemble with its steps or the encoder, read from the model repository as Triton reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from contract import encoder, packed_delta
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
    """The models that clients call, and the steps of the ensembles in the order of their configs.

    names: an encoder has no ensemble and is its own only step.
    last: the last step of each.
    """

    models: tuple[Model, ...]
    names: tuple[str, ...] = (ENSEMBLE,)
    last: tuple[str, ...] = ("detokenizer",)

    def __getitem__(self, name: str) -> Model:
        return next(model for model in self.models if model.name == name)

    @property
    def name(self) -> str:
        """The first of ``names``, for every client."""
        return self.names[0]


def served_model(kind: str) -> str:
    """Return Triton's name of the model that serves an engine of this kind."""
    return encoder.MODEL if kind in encoder.KINDS else ENSEMBLE


def read_pipeline(repository: Path, config_name: str, name: str = ENSEMBLE) -> Pipeline:
    """Read the model ``name`` of ``repository``, with its steps, and with the ensemble the packed one if there is one.

    config_name: selects ``configs/<name>.pbtxt`` of a model that has it. An ensemble has it around an engine that sends
        bare ids; the packed one serves such an engine where it has that variant too.
    Raises NotFound: a model is missing or its config cannot be read.
    """
    names = [name]
    if name == ENSEMBLE and (repository / packed_delta.MODEL).is_dir():
        variants = [_variant(repository, model, config_name).is_file() for model in (ENSEMBLE, packed_delta.MODEL)]
        names += [packed_delta.MODEL] if variants != [True, False] else []
    models: dict[str, Model] = {}
    last: list[str] = []
    for served in names:
        steps = [step.model_name for step in _read_config(repository, served, config_name).ensemble_scheduling.step]
        if not steps and served == ENSEMBLE:
            raise NotFound(f"{repository / ENSEMBLE}/config.pbtxt: must be an ensemble, got no ensemble_scheduling")
        streams = False
        for step in steps or [served]:
            config = _read_config(repository, step, config_name)
            streams = streams or config.model_transaction_policy.decoupled
            stubs = sum(group.count or 1 for group in config.instance_group) or 1
            models[step] = Model(step, stubs if config.backend == "python" else 0, streams)
        last.append(step)
    return Pipeline(tuple(models.values()), tuple(names), tuple(last))


def _variant(repository: Path, model: str, config_name: str) -> Path:
    return repository / model / "configs" / f"{config_name}.pbtxt"


def _read_config(repository: Path, model: str, config_name: str) -> ModelConfig:
    chosen = _variant(repository, model, config_name)
    path = chosen if chosen.is_file() else repository / model / "config.pbtxt"
    try:
        return text_format.Parse(path.read_text(), ModelConfig())
    except OSError as error:
        raise NotFound(f"model {model!r} is not in {repository}: cannot read {path} ({error.strerror})") from error
    except text_format.ParseError as error:
        raise NotFound(f"model {model!r} cannot be read: {path}:{error}") from error

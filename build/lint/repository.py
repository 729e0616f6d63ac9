"""A model repository as text on disk: every model's configuration, parsed, and what kept it from parsing."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelInstanceGroup

from contract import packed_delta

ERROR, WARNING = "error", "warning"


@dataclass(frozen=True)
class Fault:
    """One thing wrong. model: whose configuration; rule: a short name; message: one sentence."""

    model: str
    rule: str
    severity: str
    message: str


@dataclass(frozen=True)
class Model:
    """One model of the repository; ``path`` is the configuration that was read."""

    name: str
    path: Path
    config: ModelConfig

    def error(self, rule: str, message: str) -> Fault:
        return Fault(self.name, rule, ERROR, message)

    def warning(self, rule: str, message: str) -> Fault:
        return Fault(self.name, rule, WARNING, message)

    @property
    def is_ensemble(self) -> bool:
        return self.config.platform == "ensemble" or self.config.HasField("ensemble_scheduling")

    @property
    def is_engine(self) -> bool:
        """Whether it takes token ids and returns token ids."""
        inputs, outputs = ({tensor.name for tensor in side} for side in (self.config.input, self.config.output))
        return {"input_ids", "request_output_len"} <= inputs and "output_ids" in outputs

    @property
    def decoupled(self) -> bool:
        return self.config.model_transaction_policy.decoupled

    @property
    def batches(self) -> bool:
        return self.config.HasField("dynamic_batching")

    @property
    def instances(self) -> int | None:
        """Instances in all, None where Triton decides by the machine (no group, or groups on GPUs)."""
        groups = self.config.instance_group
        on_gpus = (ModelInstanceGroup.KIND_AUTO, ModelInstanceGroup.KIND_GPU)
        if not groups or any(group.kind in on_gpus for group in groups):
            return None
        return sum(max(1, group.count) for group in groups)


@dataclass(frozen=True)
class Repository:
    """All models that parse, by name, with the faults of reading them."""

    models: dict[str, Model]
    faults: tuple[Fault, ...]


def type_name(data_type: int) -> str:
    """``TYPE_INT32``; the number itself for one that names no type, which the text format lets through."""
    return DataType.Name(data_type) if data_type in DataType.values() else f"data_type {data_type}"


def config_names(folder: Path) -> list[str]:
    """ "" for the default configurations, and the name of every variant some model has."""
    return ["", *sorted({path.stem for path in folder.glob("*/configs/*.pbtxt")})]


def read(folder: Path, config_name: str = "") -> Repository:
    """The repository as ``--model-config-name=config_name`` makes Triton see it: without the packed ensemble where the
    ensemble alone has that variant. Raises FileNotFoundError if there is none."""
    models: dict[str, Model] = {}
    faults: list[Fault] = []
    for below in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "_"))):
        variant = below / "configs" / f"{config_name}.pbtxt"
        path = variant if config_name and variant.is_file() else below / "config.pbtxt"
        try:
            config = text_format.Parse(path.read_text(encoding="utf-8", errors="replace"), ModelConfig())
        except FileNotFoundError:
            faults.append(Fault(below.name, "file", ERROR, "it has no config.pbtxt, so Triton would guess one"))
        except OSError as exc:
            faults.append(Fault(below.name, "file", ERROR, f"{path.name} must be a readable file: {exc.strerror}"))
        except text_format.ParseError as exc:
            faults.append(Fault(below.name, "parse", ERROR, f"{path.name} does not parse as a ModelConfig: {exc}"))
        else:
            models[below.name] = Model(below.name, path, config)
            faults += _file_faults(models[below.name], below)
    varied = {name for name, model in models.items() if model.path.name != "config.pbtxt"}
    if "ensemble" in varied and packed_delta.MODEL not in varied:
        models.pop(packed_delta.MODEL, None)
    return Repository(models, tuple(faults))


def _file_faults(model: Model, folder: Path) -> Iterator[Fault]:
    if model.config.name not in ("", model.name):
        named = f"the configuration is called {model.config.name!r}, its folder {model.name!r}"
        yield model.error("name", f"{named}: Triton refuses to load it")
    if not any(path.is_dir() and path.name.isdigit() for path in folder.iterdir()):
        yield model.error("version", "there is no version folder (1/), which an ensemble needs too, empty")

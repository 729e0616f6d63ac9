"""A model repository as text on disk: every model's configuration, parsed, and what kept it from parsing.

A template's left-over ``${…}`` is a fault of its own; it is filled with a neutral value so that the rest of the file
can still be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelInstanceGroup

ERROR, WARNING, NOTE = "error", "warning", "note"
PLACEHOLDER = re.compile(r"\$\{(\w+)\}")
BARE_PLACEHOLDER = re.compile(r"(\w+)(\s*:\s*\[?\s*)\$\{(\w+)\}")  # one in quotes is a string like another
NEUTRAL = {
    "decoupled": "true",
    "optional": "true",
    "kind": "KIND_CPU",
    "count": "1",
    "max_batch_size": "8",
    "preferred_batch_size": "8",
}


@dataclass(frozen=True)
class Fault:
    """One thing wrong. model: whose configuration; rule: a short name; message: one sentence."""

    model: str
    rule: str
    severity: str
    message: str


@dataclass(frozen=True)
class Model:
    """One model of the repository. path: the configuration that was read. config: None where it did not parse."""

    name: str
    folder: Path
    path: Path
    text: str
    config: ModelConfig | None

    @property
    def is_ensemble(self) -> bool:
        return self.config is not None and (
            self.config.platform == "ensemble" or self.config.HasField("ensemble_scheduling")
        )

    @property
    def decoupled(self) -> bool:
        return self.config is not None and self.config.model_transaction_policy.decoupled

    @property
    def placeholders(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(PLACEHOLDER.findall(self.text)))

    @property
    def instances(self) -> int | None:
        """Instances in all, None where Triton decides by the machine (no group, or groups on GPUs)."""
        groups = self.config.instance_group if self.config is not None else []
        if not groups or any(
            group.kind in (ModelInstanceGroup.KIND_AUTO, ModelInstanceGroup.KIND_GPU) for group in groups
        ):
            return None
        return sum(max(1, group.count) for group in groups)

    @property
    def sources(self) -> str:
        """The text of the model's own Python files."""
        return "\n".join(
            path.read_text(encoding="utf-8", errors="replace") for path in sorted(self.folder.glob("*/*.py"))
        )


@dataclass(frozen=True)
class Repository:
    """All models by name, with the faults of reading them. config_name: the variant that was preferred."""

    folder: Path
    config_name: str
    models: dict[str, Model]
    faults: tuple[Fault, ...]

    @property
    def parsed(self) -> list[Model]:
        return [model for model in self.models.values() if model.config is not None]


def type_name(data_type: int) -> str:
    """``TYPE_INT32``; the number itself for one that names no type, which the text format lets through."""
    known = data_type in DataType.values()
    return DataType.Name(data_type) if known else f"data_type {data_type}"


def config_names(folder: Path) -> list[str]:
    """ "" for the default configurations, and the name of every variant some model has."""
    return ["", *sorted({path.stem for path in folder.glob("*/configs/*.pbtxt")})]


def read(folder: Path, config_name: str = "") -> Repository:
    """The repository as ``--model-config-name=config_name`` makes Triton see it. FileNotFoundError if there is none."""
    models: dict[str, Model] = {}
    faults: list[Fault] = []
    for model_folder in sorted(
        path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "_"))
    ):
        name, variant = model_folder.name, model_folder / "configs" / f"{config_name}.pbtxt"
        path = variant if config_name and variant.is_file() else model_folder / "config.pbtxt"
        if not path.is_file():
            faults.append(Fault(name, "file", ERROR, f"{name} has no config.pbtxt, so Triton would guess one"))
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        config, problem = _parse(text)
        models[name] = Model(name, model_folder, path, text, config)
        faults += _file_faults(models[name], problem)
    return Repository(folder, config_name, models, tuple(faults))


def _parse(text: str) -> tuple[ModelConfig | None, str]:
    """The configuration with placeholders filled, and the error of parsing the file as it is."""
    try:
        return text_format.Parse(text, model_config_pb2.ModelConfig()), ""
    except text_format.ParseError as exc:
        problem = str(exc)
    try:
        return text_format.Parse(_filled(text), model_config_pb2.ModelConfig()), problem
    except text_format.ParseError as exc:
        return None, str(exc)


def _filled(text: str) -> str:
    def neutral(match: re.Match) -> str:
        field, name = match[1], match[3]
        datatype = "TYPE_FP32" if "logits" in name else "TYPE_FP16"
        return f"{field}{match[2]}{datatype if field == 'data_type' else NEUTRAL.get(field, '0')}"

    return BARE_PLACEHOLDER.sub(neutral, text)


def _file_faults(model: Model, problem: str) -> Iterator[Fault]:
    if model.placeholders:
        left = ", ".join(f"${{{name}}}" for name in model.placeholders)
        yield Fault(model.name, "placeholder", ERROR, f"{model.path.name} still holds {left}")
    if problem:
        yield Fault(model.name, "parse", ERROR, f"{model.path.name} does not parse as a ModelConfig: {problem}")
    if model.config is not None and model.config.name not in ("", model.name):
        message = (
            f"the configuration is called {model.config.name!r}, its folder {model.name!r}: Triton refuses to load it"
        )
        yield Fault(model.name, "name", ERROR, message)
    if not any(path.is_dir() and path.name.isdigit() for path in model.folder.iterdir()):
        yield Fault(model.name, "version", ERROR, "there is no version folder (1/), which an ensemble needs too, empty")

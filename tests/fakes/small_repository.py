"""A model repository of four small models, correct as written, and what the lint finds in it."""

from pathlib import Path

from build.lint import __main__, repository
from contract import tensors

TOKENIZER = """\
name: "tokenizer" backend: "python" max_batch_size: 8
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true }
]
output [
  { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] },
  { name: "input_lengths" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "request_output_len" data_type: TYPE_INT32 dims: [ 1 ] }
]
dynamic_batching { default_queue_policy { max_queue_size: 64 } }
instance_group [ { kind: KIND_CPU count: 2 } ]
"""


DETOKENIZER = """\
name: "detokenizer" backend: "python" max_batch_size: 1
input [
  { name: "output_ids" data_type: TYPE_INT32 dims: [ -1, -1 ] },
  { name: "stream_state" data_type: TYPE_INT64 dims: [ -1 ] }
]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""


ENSEMBLE = """\
name: "ensemble" platform: "ensemble" max_batch_size: 1
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
  { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
ensemble_scheduling { step [
  { model_name: "tokenizer" model_version: -1
    input_map { key: "text_input" value: "text_input" }
    input_map { key: "max_tokens" value: "max_tokens" }
    output_map { key: "input_ids" value: "_input_ids" }
    output_map { key: "input_lengths" value: "_input_lengths" }
    output_map { key: "request_output_len" value: "_request_output_len" } },
  { model_name: "engine" model_version: -1
    input_map { key: "input_ids" value: "_input_ids" }
    input_map { key: "input_lengths" value: "_input_lengths" }
    input_map { key: "request_output_len" value: "_request_output_len" }
    input_map { key: "streaming" value: "stream" }
    output_map { key: "output_ids" value: "_output_ids" }
    output_map { key: "stream_state" value: "_stream_state" } },
  { model_name: "detokenizer" model_version: -1
    input_map { key: "output_ids" value: "_output_ids" }
    input_map { key: "stream_state" value: "_stream_state" }
    output_map { key: "text_output" value: "text_output" } }
] }
"""


PROGRAM = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"


def engine_text() -> str:
    """A Python engine with exactly the contract's tensors."""
    rows = {}
    for side, expected in (("input", tensors.ENGINE_INPUTS), ("output", tensors.ENGINE_OUTPUTS)):
        rows[side] = ",\n".join(
            f'{{ name: "{t.name}" data_type: TYPE_{t.datatype.replace("BYTES", "STRING")} '
            f"dims: {list(t.dims)}{' optional: true' if side == 'input' and t.optional else ''} }}"
            for t in expected
        )
    head = 'name: "engine" backend: "python" max_batch_size: 1\nmodel_transaction_policy { decoupled: true }\n'
    tail = "instance_group [ { kind: KIND_CPU count: 1 } ]\n"
    return f"{head}input [\n{rows['input']}\n]\noutput [\n{rows['output']}\n]\n{tail}"


def texts() -> dict[str, str]:
    return {"tokenizer": TOKENIZER, "engine": engine_text(), "detokenizer": DETOKENIZER, "ensemble": ENSEMBLE}


def put(folder: Path, configs: dict[str, str]) -> Path:
    for name, text in configs.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(text)
        if 'backend: "python"' in text:
            (folder / name / "1" / "model.py").write_text(PROGRAM)
    return folder


def faults(folder: Path, name: str = "") -> list[tuple[str, str, str, str]]:
    return [(f.severity, f.model, f.rule, f.message) for f in __main__.lint(repository.read(folder, name))]

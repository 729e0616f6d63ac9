"""The sample model repository of TensorRT-LLM 1.x, written anew from its published tensors and wiring.

``write(folder)`` leaves the templates as they are shipped, with ``${…}`` in them; ``write(folder, VALUES)`` fills them
the way the sample's documentation does, which leaves what it does not mention.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

CONTRACT = Path(__file__).resolve().parents[2] / "build" / "trtllm" / "triton_contract_1.x.json"
VALUES = {
    "triton_backend": "tensorrtllm",
    "triton_max_batch_size": "64",
    "decoupled_mode": "true",
    "max_queue_delay_microseconds": "0",
    "max_queue_size": "0",  # what fill_template.py puts where nothing is said
    "batching_strategy": "inflight_fused_batching",
    "engine_dir": "/engines/llama",
    "tokenizer_dir": "/models/llama",
    "logits_datatype": "TYPE_FP32",
    "encoder_input_features_data_type": "TYPE_FP16",
    "prompt_embedding_table_data_type": "TYPE_FP16",
    "preprocessing_instance_count": "5",
    "postprocessing_instance_count": "5",
    "exclude_input_in_output": "true",
}
# ensemble tensor -> step tensor, where names change; every other ensemble input feeds the engine under its own name
TO_PREPROCESSING = {
    "text_input": "QUERY",
    "decoder_text_input": "DECODER_QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
    "prompt_table_extra_id": "PROMPT_TABLE_EXTRA_ID",
}
BETWEEN = {  # preprocessing output -> (inner tensor, engine input)
    "INPUT_ID": ("_INPUT_ID", "input_ids"),
    "REQUEST_INPUT_LEN": ("_REQUEST_INPUT_LEN", "input_lengths"),
    "DECODER_INPUT_ID": ("_DECODER_INPUT_ID", "decoder_input_ids"),
    "REQUEST_DECODER_INPUT_LEN": ("_REQUEST_DECODER_INPUT_LEN", "decoder_input_lengths"),
    "REQUEST_OUTPUT_LEN": ("_REQUEST_OUTPUT_LEN", "request_output_len"),
    "STOP_WORDS_IDS": ("_STOP_WORDS_IDS", "stop_words_list"),
    "BAD_WORDS_IDS": ("_BAD_WORDS_IDS", "bad_words_list"),
    "EMBEDDING_BIAS": ("_EMBEDDING_BIAS", "embedding_bias"),
    "OUT_END_ID": ("_PREPROCESSOR_END_ID", "end_id"),
    "OUT_PAD_ID": ("_PREPROCESSOR_PAD_ID", "pad_id"),
    "OUT_PROMPT_TABLE_EXTRA_IDS": ("_OUT_PROMPT_TABLE_EXTRA_IDS", "prompt_table_extra_ids"),
}
RENAMED = {
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    "stream": "streaming",
}
ENGINE_TO_POST = {
    "output_ids": ("_TOKENS_BATCH", "TOKENS_BATCH"),
    "sequence_length": ("_SEQUENCE_LENGTH", "SEQUENCE_LENGTH"),
}
PREPROCESSING_SOURCE = """\
class TritonPythonModel:
    def execute(self, requests):
        raise NotImplementedError
"""
POSTPROCESSING_SOURCE = """\
class TritonPythonModel:
    def execute(self, requests):
        return [self.tokenizer.batch_decode(tokens_of(request)) for request in requests]
"""


def write(folder: Path, values: dict[str, str] | None = None) -> Path:
    """The repository under ``folder``; templates where ``values`` says nothing."""
    contract = json.loads(CONTRACT.read_text(encoding="utf-8"))
    texts = {
        "preprocessing": _python_model(contract, "preprocessing", "5"),
        "tensorrt_llm": _engine(contract),
        "postprocessing": _python_model(contract, "postprocessing", "5"),
        "ensemble": _ensemble(contract),
    }
    for name, text in texts.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(_filled(text, values or {}))
    (folder / "preprocessing" / "1" / "model.py").write_text(PREPROCESSING_SOURCE)
    (folder / "postprocessing" / "1" / "model.py").write_text(POSTPROCESSING_SOURCE)
    return folder


def _filled(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda match: values.get(match[1], match[0]), text)


def _tensor(tensor: dict) -> str:
    dims = ", ".join(map(str, tensor["dims"]))
    text = f'name: "{tensor["name"]}" data_type: {tensor["data_type"]} dims: [ {dims} ]'
    text += " reshape: { shape: [ ] }" if tensor["reshape_scalar"] else ""
    text += " optional: true" if tensor["optional"] else ""
    return f"  {{ {text}{' allow_ragged_batch: true' if tensor['allow_ragged_batch'] else ''} }}"


def _signature(model: dict) -> str:
    sides = ("input", "output")
    return "\n".join(f"{side} [\n" + ",\n".join(map(_tensor, model[f"{side}s"])) + "\n]" for side in sides)


def _parameters(model: dict) -> str:
    rows = (f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}' for k, v in model["parameters"].items())
    return "\n".join(rows)


def _python_model(contract: dict, name: str, instances: str) -> str:
    batching = "dynamic_batching {}"
    if name == "preprocessing":
        policy = "default_queue_policy { max_queue_size: ${max_queue_size} }"
        batching = f"dynamic_batching {{ max_queue_delay_microseconds: ${{max_queue_delay_microseconds}} {policy} }}"
    return "\n".join(
        (
            f'name: "{name}"\nbackend: "python"\nmax_batch_size: ${{triton_max_batch_size}}',
            batching,
            _signature(contract[name]),
            _parameters(contract[name]),
            f"instance_group [ {{ count: ${{{name}_instance_count}} kind: KIND_CPU }} ]\n",
        )
    )


def _engine(contract: dict) -> str:
    return "\n".join(
        (
            'name: "tensorrt_llm"\nbackend: "${triton_backend}"\nmax_batch_size: ${triton_max_batch_size}',
            "model_transaction_policy { decoupled: ${decoupled_mode} }",
            "dynamic_batching {\n  preferred_batch_size: [ ${triton_max_batch_size} ]",
            "  max_queue_delay_microseconds: ${max_queue_delay_microseconds}",
            "  default_queue_policy: { max_queue_size: ${max_queue_size} }\n}",
            _signature(contract["tensorrt_llm"]),
            "instance_group [ { count: 1 kind: KIND_CPU } ]",
            _parameters(contract["tensorrt_llm"]) + "\n",
        )
    )


def _map(side: str, pairs: dict[str, str]) -> str:
    return "\n".join(f'      {side}_map {{ key: "{key}" value: "{value}" }}' for key, value in pairs.items())


def _step(name: str, inputs: dict[str, str], outputs: dict[str, str]) -> str:
    head = f'    {{\n      model_name: "{name}" model_version: -1\n'
    return head + _map("input", inputs) + "\n" + _map("output", outputs) + "\n    }"


def _ensemble(contract: dict) -> str:
    model = contract["ensemble"]
    to_preprocessing = {theirs: name for name, theirs in TO_PREPROCESSING.items()}
    engine_inputs = {theirs: inner for inner, theirs in BETWEEN.values()}
    for tensor in model["inputs"]:
        if tensor["name"] not in TO_PREPROCESSING:
            engine_inputs[RENAMED.get(tensor["name"], tensor["name"])] = tensor["name"]
    engine_outputs = {name: inner for name, (inner, _) in ENGINE_TO_POST.items()}
    engine_outputs |= {t["name"]: t["name"] for t in model["outputs"] if t["name"] != "text_output"}
    steps = (
        _step("preprocessing", to_preprocessing, {name: inner for name, (inner, _) in BETWEEN.items()}),
        _step("tensorrt_llm", engine_inputs, engine_outputs),
        _step(
            "postprocessing", {theirs: inner for inner, theirs in ENGINE_TO_POST.values()}, {"OUTPUT": "text_output"}
        ),
    )
    head = 'name: "ensemble"\nplatform: "ensemble"\nmax_batch_size: ${triton_max_batch_size}\n'
    return head + _signature(model) + "\nensemble_scheduling {\n  step [\n" + ",\n".join(steps) + "\n  ]\n}\n"

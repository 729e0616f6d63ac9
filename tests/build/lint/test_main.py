"""The lint on a small right repository with one thing made wrong at a time, and on the classic 1.x layout."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import classic_repository
import pytest
from gpu_recipes import make

from build.base import layout
from build.lint import __main__, repository
from build.lint.repository import ERROR, NOTE, WARNING
from build.package import model_configs
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


def test_our_own_model_repository_is_without_a_fault():
    assert [row for row in faults(layout.MODEL_REPOSITORY) if row[0] != NOTE] == []


def test_a_right_repository_is_without_a_fault(tmp_path):
    assert faults(put(tmp_path, texts())) == []


WRONG = [
    # model, what is replaced, by what, severity, rule, part of the message
    (
        "ensemble",
        '"detokenizer" model_version',
        '"detokeniser" model_version',
        ERROR,
        "graph",
        "'detokeniser' is not a model",
    ),
    ("ensemble", 'key: "streaming"', 'key: "stream"', ERROR, "graph", "step engine has no input 'stream'"),
    (
        "ensemble",
        'key: "stream_state" value: "_stream_state" } },',
        'key: "state" value: "_stream_state" } },',
        ERROR,
        "graph",
        "step engine has no output 'state'",
    ),
    (
        "ensemble",
        'input_map { key: "input_lengths" value: "_input_lengths" }',
        "",
        ERROR,
        "graph",
        "required input 'input_lengths' of step engine",
    ),
    (
        "ensemble",
        '{ key: "input_ids" value: "_input_ids" }\n    input_map',
        '{ key: "input_ids" value: "_ids" }\n    input_map',
        ERROR,
        "graph",
        "tensor '_ids' is used by a step and produced by none",
    ),
    (
        "ensemble",
        'key: "text_output" value: "text_output"',
        'key: "text_output" value: "text"',
        ERROR,
        "graph",
        "output 'text_output' is produced by no step",
    ),
    ("ensemble", 'input_map { key: "streaming" value: "stream" }', "", ERROR, "graph", "input 'stream' feeds no step"),
    (
        "ensemble",
        'key: "input_lengths" value: "_input_lengths" }\n    output_map',
        'key: "input_lengths" value: "_input_ids" }\n    output_map',
        ERROR,
        "graph",
        "tensor '_input_ids' comes from both tokenizer and tokenizer",
    ),
    (
        "tokenizer",
        '"input_ids" data_type: TYPE_INT32',
        '"input_ids" data_type: TYPE_INT64',
        ERROR,
        "dtype",
        "tokenizer.input_ids -> engine.input_ids: TYPE_INT64 -> TYPE_INT32",
    ),
    (
        "tokenizer",
        '"input_ids" data_type: TYPE_INT32 dims: [ -1 ]',
        '"input_ids" data_type: TYPE_INT32 dims: [ -1, 2 ]',
        ERROR,
        "shape",
        "[-1, -1, 2] -> [-1, -1]",
    ),
    (
        "tokenizer",
        "max_batch_size: 8",
        "max_batch_size: 0",
        ERROR,
        "shape",
        "max_batch_size 1 is more than step tokenizer's 0",
    ),
    (
        "ensemble",
        '"text_input" data_type: TYPE_STRING dims: [ 1 ] }',
        '"text_input" data_type: TYPE_STRING dims: [ 1 ] optional: true }',
        ERROR,
        "optional",
        "optional input 'text_input' feeds tokenizer.text_input",
    ),
    (
        "ensemble",
        'platform: "ensemble"',
        'platform: "ensemble" model_transaction_policy { decoupled: true }',
        WARNING,
        "decoupled",
        "derives an ensemble's decoupled",
    ),
    (
        "ensemble",
        'platform: "ensemble"',
        'platform: "ensemble" response_cache { enable: true }',
        ERROR,
        "decoupled",
        "a response cache on a decoupled ensemble",
    ),
    ("engine", "decoupled: true", "decoupled: false", ERROR, "decoupled", "no step is decoupled"),
    ("detokenizer", "count: 1", "count: 2", ERROR, "order", "with 2 instances: chunks are reordered"),
    (
        "detokenizer",
        "instance_group [ { kind: KIND_CPU count: 1 } ]",
        "",
        ERROR,
        "order",
        "say instance_group KIND_CPU count 1",
    ),
    (
        "detokenizer",
        "instance_group",
        "dynamic_batching { default_queue_policy { max_queue_size: 9 } } instance_group",
        ERROR,
        "order",
        "unless preserve_ordering",
    ),
    (
        "detokenizer",
        "instance_group",
        "dynamic_batching { preserve_ordering: true default_queue_policy { max_queue_size: 9 } } instance_group",
        WARNING,
        "order",
        "a cancelled request leaks",
    ),
    (
        "detokenizer",
        "instance_group",
        "response_cache { enable: true } instance_group",
        ERROR,
        "order",
        "another's state",
    ),
    (
        "tokenizer",
        "dynamic_batching { default_queue_policy { max_queue_size: 64 } }",
        "",
        WARNING,
        "queue",
        "its queue cannot be bounded",
    ),
    ("tokenizer", "max_queue_size: 64", "timeout_action: REJECT", ERROR, "queue", "grows without bound"),
    (
        "tokenizer",
        "dynamic_batching {",
        "dynamic_batching { priority_levels: 2 priority_queue_policy { key: 2 value { max_queue_size: 0 } }",
        ERROR,
        "queue",
        "priority level 2 has no max_queue_size",
    ),
    (
        "tokenizer",
        "dynamic_batching {",
        "dynamic_batching { priority_levels: 2 default_priority_level: 1",
        WARNING,
        "priority",
        "reset to 0 at engine, detokenizer",
    ),
    (
        "ensemble",
        '"max_tokens" data_type: TYPE_INT32',
        '"max_tokens" data_type: TYPE_INT64',
        ERROR,
        "contract",
        "input 'max_tokens' is TYPE_INT64 [1]; the contract says TYPE_INT32 [1]",
    ),
    (
        "engine",
        '{ name: "stream_note" data_type: TYPE_STRING dims: [1] }',
        '{ name: "note" data_type: TYPE_STRING dims: [1] }',
        ERROR,
        "contract",
        "output 'stream_note' of contract/tensors.py is missing",
    ),
    ("engine", "KIND_CPU count: 1", "KIND_CPU count: 2", ERROR, "instances", "a second engine"),
    ("engine", 'name: "engine"', 'name: "motor"', ERROR, "name", "called 'motor', its folder 'engine'"),
    ("tokenizer", "max_batch_size: 8", "max_batch: 8", ERROR, "parse", 'no field named "max_batch"'),
    (
        "tokenizer",
        "max_batch_size: 8",
        "max_batch_size: ${triton_max_batch_size}",
        ERROR,
        "placeholder",
        "${triton_max_batch_size}",
    ),
    (
        "tokenizer",
        '"max_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true',
        '"text_input" data_type: TYPE_STRING dims: [ 1 ]',
        ERROR,
        "duplicate",
        "input 'text_input' is listed 2 times",
    ),
]


@pytest.mark.parametrize(
    ("model", "old", "new", "severity", "rule", "part"), WRONG, ids=[f"{w[0]}-{w[4]}-{n}" for n, w in enumerate(WRONG)]
)
def test_one_thing_made_wrong_is_named(tmp_path, model, old, new, severity, rule, part):
    configs = texts()
    assert configs[model].count(old) >= 1
    configs[model] = configs[model].replace(old, new, 1)
    found = faults(put(tmp_path, configs))
    assert [row for row in found if row[0] == severity and row[2] == rule and part in row[3]], found


def test_steps_that_wait_for_each_other_are_named(tmp_path):
    configs = texts()
    configs["tokenizer"] = configs["tokenizer"].replace(
        '"text_input" data_type: TYPE_STRING dims: [ 1 ] },',
        '"text_input" data_type: TYPE_STRING dims: [ 1 ] }, { name: "back" data_type: TYPE_INT64 dims: [ -1 ] },',
    )
    configs["ensemble"] = configs["ensemble"].replace(
        '{ key: "text_input" value', '{ key: "back" value: "_stream_state" } input_map { key: "text_input" value'
    )
    found = faults(put(tmp_path, configs))
    assert any("wait for each other: tokenizer -> engine" in message for *_, message in found)


def test_a_step_that_mixes_a_decoupled_origin_with_another_is_named(tmp_path):
    configs = texts()
    configs["detokenizer"] = configs["detokenizer"].replace(
        "input [", 'input [ { name: "prompt" data_type: TYPE_INT32 dims: [ -1 ] },'
    )
    configs["ensemble"] = configs["ensemble"].replace(
        'input_map { key: "output_ids"', 'input_map { key: "prompt" value: "_input_ids" } input_map { key: "output_ids"'
    )
    found = faults(put(tmp_path, configs))
    said = [message for *_, rule, message in found if rule == "decoupled"]
    assert len(said) == 1 and "step detokenizer mixes inputs of different decoupled origin" in said[0]
    assert "'_input_ids' from no decoupled model" in said[0] and "from engine" in said[0]


def test_a_folder_without_a_configuration_or_a_version_is_named(tmp_path):
    put(tmp_path, texts())
    (tmp_path / "extra").mkdir()
    shutil.rmtree(tmp_path / "tokenizer" / "1")
    messages = [message for *_, message in faults(tmp_path)]
    assert "extra has no config.pbtxt, so Triton would guess one" in messages
    assert any("no version folder (1/)" in message for message in messages)


def trtllm(**changes: str) -> str:
    """A right TensorRT-LLM configuration with parameters changed or, set to None, left out."""
    text = model_configs.render(make())
    for key, value in changes.items():
        lines = [row for row in text.splitlines() if f'key: "{key}"' not in row]
        row = [] if value is None else [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}']
        text = "\n".join([*lines, *row]) + "\n"
    return text


def test_a_packaged_engine_is_without_a_fault(tmp_path):
    assert faults(put(tmp_path, {"engine": trtllm()})) == []


@pytest.mark.parametrize(
    ("changes", "severity", "part"),
    [
        ({"gpt_model_type": "V1"}, ERROR, "in-flight batching is off: gpt_model_type is 'V1' (batching is static)"),
        ({"gpt_model_type": "inflight"}, ERROR, "the backend throws"),
        ({"gpt_model_type": None}, ERROR, "parameter gpt_model_type must be there"),
        ({"xgrammar_tokenizer_info_path": None}, ERROR, "parameter xgrammar_tokenizer_info_path must be there"),
        ({"gpt_model_path": ""}, ERROR, "there is no engine to load"),
        (
            {"enable_kv_cache_reuse": "yes"},
            ERROR,
            "enable_kv_cache_reuse = 'yes' counts as unset; allowed is true or false",
        ),
        ({"batch_scheduler_policy": "max_util"}, ERROR, "one of guaranteed_no_evict, max_utilization"),
        ({"decoding_mode": "lookahead"}, ERROR, "decoding_mode lookahead throws without lookahead_ngram_size"),
        ({"decoding_mode": "greedy"}, ERROR, "decoding_mode = 'greedy' counts as unset"),
        ({"max_beam_width": "one"}, ERROR, "allowed is a whole number"),
        ({"kv_cache_free_gpu_mem_fraction": "1.5"}, ERROR, "a share above 0 and at most 1"),
        ({"worker_path": "/x"}, WARNING, "executor_worker_path took its place"),
        ({"enable_trt_overlap": "true"}, WARNING, "no longer read"),
        ({"enable_kv_reuse": "true"}, WARNING, "nearest is 'enable_kv_cache_reuse'"),
        ({"exclude_input_in_output": "false"}, WARNING, "repeats its prompt"),
    ],
)
def test_a_parameter_the_backend_would_not_take_is_named(tmp_path, changes, severity, part):
    found = faults(put(tmp_path, {"engine": trtllm(**changes)}))
    assert any(row[0] == severity and part in row[3] for row in found), found


@pytest.mark.parametrize(
    ("old", "new", "severity", "part"),
    [
        ("decoupled: true", "decoupled: false", ERROR, "streaming requests and request batches over 1 are errors"),
        ("max_queue_delay_microseconds: 0", "max_queue_delay_microseconds: 500", WARNING, "only delays"),
        ("KIND_CPU count: 1", "KIND_GPU count: 1", ERROR, "say instance_group KIND_CPU count 1"),
        ("{ max_queue_size: 64 }", "{ }", ERROR, "grows without bound"),
        (
            '"seed" data_type: TYPE_UINT64',
            '"seed" data_type: TYPE_INT64',
            ERROR,
            "input 'seed' is TYPE_INT64; the backend's is TYPE_UINT64",
        ),
        (
            '"stop_words_list" data_type: TYPE_INT32 dims: [ 2, -1 ]',
            '"stop_words_list" data_type: TYPE_INT32 dims: [ -1 ]',
            ERROR,
            "dims [-1]; the backend's are [2, -1]",
        ),
        (
            '"end_id" data_type: TYPE_INT32 dims: [ 1 ] reshape: { shape: [ ] }',
            '"end_id" data_type: TYPE_INT32 dims: [ 1 ]',
            ERROR,
            "input 'end_id' needs reshape { shape: [ ] }",
        ),
        (
            'name: "temperature"',
            'name: "temprature"',
            ERROR,
            "the backend has no input 'temprature'; nearest is 'temperature'",
        ),
        ('name: "sequence_length"', 'name: "cum_log_probs_"', ERROR, "output 'sequence_length' is missing"),
        ('name: "input_lengths"', 'name: "encoder_output_lengths"', ERROR, "required input 'input_lengths' is missing"),
        ('backend: "tensorrtllm"', 'backend: "tensorrt_llm"', ERROR, "allowed is tensorrtllm"),
    ],
)
def test_a_tensor_or_policy_the_backend_would_not_take_is_named(tmp_path, old, new, severity, part):
    text = trtllm()
    assert old in text
    found = faults(put(tmp_path, {"engine": text.replace(old, new, 1)}))
    assert any(row[0] == severity and part in row[3] for row in found), found


def test_logits_of_another_type_than_the_engines_are_named(tmp_path):
    text = model_configs.render(make(build={"gather_context_logits": True}))
    assert faults(put(tmp_path / "right", {"engine": text})) == []
    wrong = text.replace('"context_logits" data_type: TYPE_FP32', '"context_logits" data_type: TYPE_FP16')
    assert any("allowed is TYPE_FP32" in row[3] for row in faults(put(tmp_path / "wrong", {"engine": wrong})))


KNOWN_OF_CLASSIC = [
    ("ensemble", ERROR, "output 'kv_cache_alloc_total_blocks' is listed 2 times"),
    ("ensemble", ERROR, "postprocessing follows a decoupled step: its dynamic_batching reorders chunks"),
    ("ensemble", WARNING, "a cancelled request leaks"),
    ("ensemble", WARNING, "postprocessing decodes every response alone"),
    ("ensemble", WARNING, "without max_inflight_requests responses pile up"),
    ("ensemble", NOTE, "a client that goes away does not stop tensorrt_llm"),
    ("preprocessing", ERROR, "grows without bound"),
    ("postprocessing", ERROR, "grows without bound"),
    ("tensorrt_llm", ERROR, "grows without bound"),
    ("tensorrt_llm", WARNING, "'runtime_top_p_min' is offered"),
    ("tensorrt_llm", WARNING, "'early_stopping' is offered"),
]


@pytest.mark.parametrize("values", [None, classic_repository.VALUES], ids=["templates", "filled"])
def test_the_classic_layouts_known_faults_are_named(tmp_path, values):
    found = faults(classic_repository.write(tmp_path, values))
    for model, severity, part in KNOWN_OF_CLASSIC:
        assert any(row[0] == severity and row[1] == model and part in row[3] for row in found), (model, part)


def test_the_classic_layout_has_no_fault_that_we_made_up(tmp_path):
    filled = classic_repository.VALUES | {"skip_special_tokens": "true", "add_special_tokens": "true"}
    found = faults(classic_repository.write(tmp_path, filled))
    for severity, model, rule, message in found:
        known = any(m == model and s == severity and part in message for m, s, part in KNOWN_OF_CLASSIC)
        assert known or rule == "placeholder", (severity, model, rule, message)


def test_unfilled_templates_say_which_placeholders_are_left_and_that_they_do_not_parse(tmp_path):
    found = faults(classic_repository.write(tmp_path))
    for model in ("ensemble", "preprocessing", "tensorrt_llm", "postprocessing"):
        assert any(row[1] == model and row[2] == "placeholder" for row in found)
        assert any(row[1] == model and row[2] == "parse" for row in found)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"decoupled_mode": "false"}, "streaming requests and request batches over 1 are errors"),
        ({"batching_strategy": "V1"}, "in-flight batching is off"),
        ({"max_queue_delay_microseconds": "1000"}, "only delays"),
        ({"logits_datatype": "TYPE_FP16"}, "engines are built with float32 logits"),
    ],
)
def test_the_classic_layouts_known_wrong_settings_are_named(tmp_path, changes, part):
    found = faults(classic_repository.write(tmp_path, classic_repository.VALUES | changes))
    assert any(part in row[3] for row in found)


def test_a_variant_is_read_as_triton_would(tmp_path):
    put(tmp_path, texts())
    (tmp_path / "detokenizer" / "configs").mkdir()
    (tmp_path / "detokenizer" / "configs" / "fast.pbtxt").write_text(DETOKENIZER.replace("count: 1", "count: 4"))
    assert repository.config_names(tmp_path) == ["", "fast"]
    assert faults(tmp_path) == []
    assert any("with 4 instances" in row[3] for row in faults(tmp_path, "fast"))
    assert any("with 4 instances" in row[3] for row in faults(tmp_path, "fast")) and faults(tmp_path, "other") == []


def run(*arguments: str) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "build.lint", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, cwd=layout.ROOT)


def test_the_program_prints_faults_and_ends_with_status_1(tmp_path):
    folder = str(classic_repository.write(tmp_path / "classic"))
    done = run(folder)
    assert done.returncode == 1 and done.stderr == ""
    assert done.stdout.splitlines()[-1].startswith(f"{folder}: ")
    rows = json.loads(run(folder, "--json").stdout)
    assert {"model", "rule", "severity", "message", "model_config_name"} == set(rows[0])


@pytest.mark.slow
def test_the_program_checks_every_variant_unless_one_is_named(tmp_path):
    put(tmp_path, texts())
    (tmp_path / "detokenizer" / "configs").mkdir()
    (tmp_path / "detokenizer" / "configs" / "fast.pbtxt").write_text(DETOKENIZER.replace("count: 1", "count: 4"))
    assert "error: ensemble (fast): order: " in run(str(tmp_path)).stdout
    assert run(str(tmp_path), "--model-config-name", "").returncode == 0


@pytest.mark.slow
def test_the_program_says_when_there_is_nothing_to_read(tmp_path):
    assert run(str(tmp_path)).returncode == 2
    assert "is not a folder" in run(str(tmp_path / "none")).stderr


def test_a_number_that_is_no_data_type_is_named(tmp_path):
    configs = texts() | {"engine": engine_text().replace("TYPE_UINT64", "99", 1)}
    assert any("'seed' is data_type 99" in row[3] for row in faults(put(tmp_path, configs)))


def test_a_bls_model_is_warned_of(tmp_path):
    parameter = 'parameters { key: "tensorrt_llm_model_name" value { string_value: "x" } }'
    text = f'name: "tensorrt_llm_bls" backend: "python" {parameter}'
    assert any(row[2] == "bls" for row in faults(put(tmp_path, {"tensorrt_llm_bls": text})))


def program_faults(folder: Path) -> list[tuple[str, str]]:
    return [
        (model, message) for severity, model, rule, message in faults(folder) if (severity, rule) == (ERROR, "program")
    ]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (None, "1/model.py is missing"),
        ("class TritonPythonModel\n    pass\n", "does not compile: expected ':' (line 1)"),
        ("x = (\n", "does not compile"),
        ("\0", "1/model.py "),
        ("", "defines no class TritonPythonModel"),
        ("class Model:\n    def execute(self, requests):\n        return []\n", "defines no class TritonPythonModel"),
        ("def f():\n    class TritonPythonModel: ...\n", "defines no class TritonPythonModel"),
        ("class TritonPythonModel:\n    def initialize(self, args): ...\n", "without execute()"),
    ],
)
def test_a_python_model_needs_a_program_that_triton_can_load(tmp_path, program, said):
    file = put(tmp_path, texts()) / "detokenizer" / "1" / "model.py"
    file.unlink() if program is None else file.write_text(program)
    (found,) = program_faults(tmp_path)
    assert found[0] == "detokenizer" and said in found[1]
    assert run(str(tmp_path)).returncode == 1


@pytest.mark.parametrize(
    "program",
    [
        "from package.model import TritonPythonModel\n",
        "from package.model import Model as TritonPythonModel\n",
        "from package.model import *\n",
        "import package\nTritonPythonModel = package.Model\n",
        "class TritonPythonModel(Base): ...\n",
        "try:\n    from a import TritonPythonModel\nexcept ImportError:\n    from b import TritonPythonModel\n",
    ],
)
def test_a_program_may_take_its_class_from_elsewhere(tmp_path, program):
    (put(tmp_path, texts()) / "detokenizer" / "1" / "model.py").write_text(program)
    assert program_faults(tmp_path) == []


def test_a_program_of_another_name_is_the_one_that_is_looked_at(tmp_path):
    put(tmp_path, texts())
    config = tmp_path / "detokenizer" / "config.pbtxt"
    config.write_text(config.read_text() + 'default_model_filename: "other.py"\n')
    assert program_faults(tmp_path) == [
        ("detokenizer", "1/other.py is missing: the Python backend has no program to load")
    ]


def test_every_version_needs_its_program(tmp_path):
    (put(tmp_path, texts()) / "detokenizer" / "2").mkdir()
    ((model, message),) = program_faults(tmp_path)
    assert (model, message.split()[0]) == ("detokenizer", "2/model.py")

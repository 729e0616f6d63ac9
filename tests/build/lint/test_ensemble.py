"""The lint of the ensemble: a small correct repository with one thing made wrong at a time."""

import pytest

from build.lint.repository import ERROR, WARNING
from tests.fakes.small_repository import faults, put, texts

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
        '{ name: "stream_state" data_type: TYPE_INT64 dims: [-1] }',
        '{ name: "note" data_type: TYPE_STRING dims: [1] }',
        ERROR,
        "contract",
        "output 'stream_state' of contract/tensors.py is missing",
    ),
    ("engine", "KIND_CPU count: 1", "KIND_CPU count: 2", ERROR, "instances", "a second engine"),
    ("engine", 'name: "engine"', 'name: "motor"', ERROR, "name", "called 'motor', its folder 'engine'"),
    ("tokenizer", "max_batch_size: 8", "max_batch: 8", ERROR, "parse", 'no field named "max_batch"'),
    ("tokenizer", "max_batch_size: 8", "max_batch_size: ${triton_max_batch_size}", ERROR, "parse", "does not parse"),
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

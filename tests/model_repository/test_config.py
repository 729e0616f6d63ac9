"""Every config.pbtxt is one the server can read, and says what contract/tensors.py says."""

import ast
import importlib
import json
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from contract import packed_delta, tensors
from contract.encoder import MAX_ROWS

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = ROOT / "model_repository"
MODELS = ("ensemble", "tokenizer", "engine", "detokenizer")
PACKED = ("ensemble_packed", "detokenizer_packed")
PYTHON_MODELS = {
    "tokenizer": "python_backends.tokenizer.model",
    "engine": "python_backends.cpu_engine.model",
    "detokenizer": "python_backends.detokenizer.model",
    "client_watch": "python_backends.client_watch.model",
}


def read(path):
    return text_format.Parse(path.read_text("utf-8"), ModelConfig())


def config(model):
    return read(REPOSITORY / model / "config.pbtxt")


def ensemble_kinds():
    """The ensemble as a whole behind each kind of engine: its steps' configurations by model name."""
    ours = {model: config(model) for model in (*MODELS, *PACKED, "client_watch")}
    variants = ROOT / "build" / "trtllm"
    bare = {model: read(variants / f"{model}.pbtxt") for model in ("ensemble", "detokenizer", *PACKED)}
    return {"cpu": ours, "trtllm": ours | bare | {"engine": _cpp_backend(variants / "triton_contract_1.x.json")}}


def _cpp_backend(path):
    """The C++ backend's signature as a configuration; what a template decides is left out."""
    model = ModelConfig(name="engine", backend="tensorrtllm", max_batch_size=1)
    contract = json.loads(path.read_text())["tensorrt_llm"]
    for side in ("input", "output"):
        for tensor in contract[f"{side}s"]:
            if not tensor["data_type"].startswith("$"):
                entry = getattr(model, side).add(
                    name=tensor["name"], data_type=tensor["data_type"], dims=tensor["dims"]
                )
                if side == "input":
                    entry.optional = tensor["optional"]
                if tensor["name"] == "lora_weights":  # the builder writes the type of the model
                    entry.data_type = DataType.Value("TYPE_BF16")
    return model


def signature(entries):
    """name -> (KServe datatype, dims)."""
    datatypes = {entry.name: DataType.Name(entry.data_type).removeprefix("TYPE_") for entry in entries}
    return {
        entry.name: ("BYTES" if datatypes[entry.name] == "STRING" else datatypes[entry.name], tuple(entry.dims))
        for entry in entries
    }


def promised(table):
    return {tensor.name: (tensor.datatype, tensor.dims) for tensor in table}


@pytest.mark.parametrize(
    "path", sorted(REPOSITORY.rglob("*.pbtxt")), ids=lambda path: str(path.relative_to(REPOSITORY))
)
def test_every_configuration_is_whole_and_has_its_folders_name(path):
    text = path.read_text("utf-8")
    assert "${" not in text
    assert text.startswith("# "), "its first lines say what it maps to what"
    model = next(parent for parent in path.parents if parent.parent == REPOSITORY)
    assert read(path).name == model.name
    assert (model / "1").is_dir()


def test_the_repository_holds_the_ensemble_and_its_steps_and_nothing_else():
    assert sorted(path.name for path in REPOSITORY.iterdir() if path.is_dir()) == sorted(
        [*MODELS, *PACKED, "client_watch", "encoder"]
    )


def test_an_encoder_is_batched_across_requests_with_a_bounded_queue_and_delay():
    encoder = config("encoder")
    assert encoder.max_batch_size == MAX_ROWS
    assert 0 < encoder.dynamic_batching.max_queue_delay_microseconds <= 1000
    assert encoder.dynamic_batching.default_queue_policy.max_queue_size == 1024
    assert not encoder.model_transaction_policy.decoupled


@pytest.mark.parametrize("kind", ["cpu", "trtllm"])
def test_the_ensembles_tensors_are_the_contracts_whatever_the_engine(kind):
    ensemble = ensemble_kinds()[kind]["ensemble"]
    assert signature(ensemble.input) == promised(tensors.ENSEMBLE_INPUTS)
    assert signature(ensemble.output) == promised(tensors.ENSEMBLE_OUTPUTS)
    assert {entry.name for entry in ensemble.input if entry.optional} == {
        tensor.name for tensor in tensors.ENSEMBLE_INPUTS if tensor.optional
    }


def test_around_the_cpp_backend_the_packed_ensemble_differs_from_the_ensemble_in_its_outputs_alone():
    models = ensemble_kinds()["trtllm"]
    plain, packed = models["ensemble"], models["ensemble_packed"]
    output = ModelConfig().output.add(name=packed_delta.OUTPUT, data_type="TYPE_UINT8", dims=[-1])
    assert list(packed.output) == list(models["detokenizer_packed"].output) == [output]
    last = packed.ensemble_scheduling.step[-1]
    assert last.model_name == "detokenizer_packed" and dict(last.output_map) == {
        packed_delta.OUTPUT: packed_delta.OUTPUT
    }
    for one in (plain, packed):
        step = one.ensemble_scheduling.step[-1]
        step.output_map.clear()
        one.ClearField("output")
        step.model_name = one.name = ""
    assert plain == packed


def test_the_packed_ensemble_differs_from_the_ensemble_behind_the_engine_alone():
    plain, packed = config("ensemble"), config("ensemble_packed")
    watch = {packed_delta.WATCHED: ("UINT8", (1,))}
    assert signature(packed.output) == {packed_delta.OUTPUT: ("UINT8", (-1,))} | watch
    *_, engine, last = packed.ensemble_scheduling.step
    assert dict(engine.output_map) == {packed_delta.OUTPUT: packed_delta.OUTPUT, packed_delta.WATCH: "_watch"}
    assert last.model_name == "client_watch" and dict(last.input_map) == {packed_delta.WATCH: "_watch"}
    for one in (plain, packed):
        one.ClearField("output")
        one.ClearField("name")
        del one.ensemble_scheduling.step[-1]
        one.ensemble_scheduling.step[-1].ClearField("output_map")
    assert plain == packed


@pytest.mark.parametrize("kind", ["cpu", "trtllm"])
def test_the_packed_detokenizer_answers_every_increment_in_order(kind):
    models = ensemble_kinds()[kind]
    packed, plain = models["detokenizer_packed"], models["detokenizer"]
    assert packed.input == plain.input and packed.instance_group == plain.instance_group
    assert not packed.model_transaction_policy.decoupled
    assert not packed.HasField("dynamic_batching") and not packed.HasField("sequence_batching")
    source = (REPOSITORY / "detokenizer_packed" / "1" / "model.py").read_text()
    assert "from python_backends.detokenizer.model import PackedModel as TritonPythonModel" in source


def test_the_clients_watch_answers_in_order_and_from_the_cache():
    watch = config("client_watch")
    assert signature(watch.input) == {packed_delta.WATCH: promised(tensors.ENGINE_OUTPUTS)[packed_delta.WATCH]}
    assert signature(watch.output) == {packed_delta.WATCHED: ("UINT8", (1,))}
    # Only a model that is not decoupled may have its answers kept, and only with one instance are they in order.
    assert watch.response_cache.enable and not watch.model_transaction_policy.decoupled
    assert [group.count for group in watch.instance_group] == [1] and not watch.WhichOneof("scheduling_choice")


def test_the_engines_tensors_are_the_contracts():
    engine = config("engine")
    assert signature(engine.input) == promised(tensors.ENGINE_INPUTS)
    assert signature(engine.output) == promised(tensors.ENGINE_OUTPUTS)
    assert {entry.name for entry in engine.input if not entry.optional} == {
        tensor.name for tensor in tensors.ENGINE_INPUTS if not tensor.optional
    }


@pytest.mark.parametrize(
    ("model", "inputs", "outputs"),
    [
        ("ensemble", tensors.ENSEMBLE_INPUTS, tensors.ENSEMBLE_OUTPUTS),
        ("tensorrt_llm", tensors.ENGINE_INPUTS, tensors.ENGINE_OUTPUTS),
    ],
)
def test_what_is_not_marked_as_ours_is_tensorrt_llms_to_the_letter(model, inputs, outputs):
    upstream = json.loads((ROOT / "build" / "trtllm" / "triton_contract_1.x.json").read_text())[model]
    for side, table in (("inputs", inputs), ("outputs", outputs)):
        theirs = {tensor["name"]: tensor for tensor in upstream[side]}
        for tensor in table:
            if tensor.ours:
                assert tensor.name not in theirs, tensor.name
                continue
            found = theirs[tensor.name]
            datatype = found["data_type"].removeprefix("TYPE_")
            assert tensor.datatype == ("BYTES" if datatype == "STRING" else datatype), tensor.name
            assert tensor.dims == tuple(found["dims"]), tensor.name


def test_the_tokenizer_takes_from_the_ensemble_and_gives_to_the_engine_under_their_names():
    tokenizer = config("tokenizer")
    ensemble, engine = promised(tensors.ENSEMBLE_INPUTS), promised(tensors.ENGINE_INPUTS)
    for name, found in signature(tokenizer.input).items():
        assert found == ensemble[name], name
    engine |= {"lora_weights": ("BF16", (-1, -1)), "lora_config": ("INT32", (-1, 3))}  # of the C++ backend alone
    for name, found in signature(tokenizer.output).items():
        assert found == engine["request_output_len" if name == "max_tokens" else name], name
    assert all(entry.optional for entry in tokenizer.input)


def test_the_detokenizer_takes_from_the_engine_and_gives_what_the_ensemble_promises():
    detokenizer = config("detokenizer")
    engine = promised(tensors.ENGINE_OUTPUTS)
    for name, found in signature(detokenizer.input).items():
        assert found == engine[name], name
    assert signature(detokenizer.output) == promised(tensors.ENSEMBLE_OUTPUTS)


@pytest.mark.parametrize("kind", ["cpu", "trtllm"])
def test_the_ensembles_graph_is_closed(kind):
    models = ensemble_kinds()[kind]
    ensemble = models["ensemble"]
    outside = signature(ensemble.input)
    made, used = {}, set()
    for step in ensemble.ensemble_scheduling.step:
        model = models[step.model_name]
        takes, gives = signature(model.input), signature(model.output)
        required = {entry.name for entry in model.input if not entry.optional}
        assert required <= set(step.input_map), f"{step.model_name} is not given {required - set(step.input_map)}"
        for name, value in step.input_map.items():
            source = made | outside
            assert value in source, f"{step.model_name}.{name} is fed from {value}, which no step makes"
            assert takes[name] == source[value], f"{step.model_name}.{name} is not what {value} is"
            used.add(value)
        for name, value in step.output_map.items():
            assert value not in made and value not in outside, f"{value} is made twice"
            made[value] = gives[name]
    assert set(outside) <= used, f"no step reads {set(outside) - used}"
    assert signature(ensemble.output) == {name: made[name] for name in signature(ensemble.output)}
    inside = set(made) - set(signature(ensemble.output))
    assert inside <= used, f"no step reads {inside - used}"
    assert all(name.startswith("_") for name in inside), "what never leaves is marked by an underscore"


@pytest.mark.parametrize("kind", ["cpu", "trtllm"])
def test_values_keep_their_names_but_for_the_engines_step(kind):
    for step in ensemble_kinds()[kind]["ensemble"].ensemble_scheduling.step:
        renamed = {
            value.removeprefix("_"): name
            for name, value in (*step.input_map.items(), *step.output_map.items())
            if name != value.removeprefix("_")
        }
        expected = {
            "max_tokens": "request_output_len",
            "top_k": "runtime_top_k",
            "top_p": "runtime_top_p",
            "length_penalty": "len_penalty",
        }
        assert renamed == (expected if step.model_name == "engine" else {})


def test_only_the_tokenizer_batches():
    sizes = {model: config(model).max_batch_size for model in MODELS}
    assert sizes["ensemble"] == sizes["engine"] == sizes["detokenizer"] == 1 < sizes["tokenizer"]
    for model in MODELS:
        assert config(model).HasField("dynamic_batching") == (model == "tokenizer"), model


def test_the_tokenizers_queue_is_bounded_and_lists_of_any_length_share_a_batch():
    tokenizer = config("tokenizer")
    policy = tokenizer.dynamic_batching.default_queue_policy
    assert policy.max_queue_size > 0 and tokenizer.dynamic_batching.max_queue_delay_microseconds == 0
    assert {entry.name for entry in tokenizer.input if -1 in entry.dims} == {
        entry.name for entry in tokenizer.input if entry.allow_ragged_batch
    }
    assert tokenizer.instance_group[0].count > 1


@pytest.mark.parametrize("kind", ["cpu", "trtllm"])
def test_tokens_cannot_be_reordered_nor_their_detokenizer_refuse_them(kind):
    detokenizer = ensemble_kinds()[kind]["detokenizer"]
    assert [group.count for group in detokenizer.instance_group] == [1]
    assert not detokenizer.HasField("dynamic_batching") and not detokenizer.HasField("sequence_batching")


def test_one_engine_holds_the_kv_cache():
    assert [group.count for group in config("engine").instance_group] == [1]


def test_engine_and_detokenizer_answer_as_often_as_they_like():
    decoupled = {model: config(model).model_transaction_policy.decoupled for model in MODELS}
    assert decoupled == {"ensemble": False, "tokenizer": False, "engine": True, "detokenizer": True}
    assert not config("ensemble").HasField("model_transaction_policy")  # core sets it by itself


def test_nothing_asks_for_a_gpu():
    for model in PYTHON_MODELS:
        assert all(group.kind == group.KIND_CPU for group in config(model).instance_group), model


@pytest.mark.parametrize(("model", "module"), PYTHON_MODELS.items())
def test_a_models_source_is_one_import(model, module):
    [statement] = ast.parse((REPOSITORY / model / "1" / "model.py").read_text()).body
    assert isinstance(statement, ast.ImportFrom) and statement.module == module
    assert [alias.name for alias in statement.names] == ["TritonPythonModel"]
    loaded = importlib.import_module(module).TritonPythonModel
    assert callable(loaded.initialize) and callable(loaded.execute)

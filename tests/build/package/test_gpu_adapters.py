"""Adapters of GPU engines: PEFT's files become the tensors that TensorRT-LLM's C++ backend reads."""

import gpu_recipes
import numpy as np
import pytest

from build.base import layout, numerics
from build.base import shape as shapes
from build.base.checkpoint import open_checkpoint
from build.package import gpu_adapters, model_configs
from build.recipe import commands
from contract.errors import InvalidArgument
from tests.fakes import adapters

MODEL = layout.ROOT / "build" / "demo_model" / "checkpoint"
# From TensorRT-LLM's LoraManager and hf_lora_convert.py.
IDS = {"q_proj": 1, "k_proj": 2, "v_proj": 3, "o_proj": 4, "gate_proj": 5, "down_proj": 6, "up_proj": 7}


@pytest.fixture(scope="module")
def values():
    return {name: np.array(tensor.f32()) for name, tensor in open_checkpoint(MODEL).tensors.items()}


def shape_of(made):
    return shapes.find(made.model)


def recipe(folder, *names, **changes):
    listed = [{"name": name, "path": str(folder / name)} for name in names]
    table = {"model": str(MODEL), "precision": "bf16", "kv_cache_precision": "auto", "max_seq_len": 512}
    return gpu_recipes.make(**table | {"adapters": listed} | changes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_row_is_a_matrix_of_the_fused_model(tmp_path, values, dtype):
    config = {"use_rslora": True, "rank_pattern": {"o_proj": 3}, "alpha_pattern": {"up_proj": 3}}
    fused = adapters.write(tmp_path / "poet", values, rank=5, seed=1, **config)
    files = gpu_adapters.package(recipe(tmp_path, "poet"), open_checkpoint(MODEL), tmp_path / "e", dtype)
    assert [path.relative_to(tmp_path / "e").parts for path in files] == [
        ("adapters", "1", "model.lora_config.npy"),
        ("adapters", "1", "model.lora_weights.npy"),
    ]
    config, weights = (np.load(path) for path in files)
    assert config.dtype == np.int32 and config.shape == (1, weights.shape[1], 3) and weights.shape[0] == 1
    assert weights.dtype == ("V2" if dtype == "bfloat16" else np.float16)
    plain = numerics.bf16_to_f32(weights.view(np.uint16)) if dtype == "bfloat16" else weights.astype(np.float32)
    by_id = {number: name for name, number in IDS.items()}
    changed = set()
    for (module, layer, rank), row in zip(config[0].tolist(), plain[0], strict=True):
        part = "self_attn" if module < 5 else "mlp"
        name = f"model.layers.{layer}.{part}.{by_id[module]}.weight"
        outer, inner = values[name].shape
        assert rank == (3 if module == 4 else 5) and not row[rank * (inner + outer) :].any()
        a, b = row[: rank * inner].reshape(rank, inner), row[rank * inner : rank * (inner + outer)].reshape(outer, rank)
        added = fused[name] - values[name]
        np.testing.assert_allclose(b @ a, added, atol=0.02 * np.abs(added).max())
        changed.add(name)
    assert changed == {name for name in values if not np.array_equal(values[name], fused[name])}


def test_a_value_beyond_float16_is_refused_by_the_adapters_name(tmp_path, values):
    adapters.write(tmp_path / "loud", values, alpha=1e-9, size=1e9)
    with pytest.raises(InvalidArgument, match=r"adapters\.loud: holds .* beyond float16: build with dtype bfloat16"):
        gpu_adapters.package(recipe(tmp_path, "loud"), open_checkpoint(MODEL), tmp_path / "e", "float16")


def test_the_llm_api_reads_pefts_own_files(tmp_path, values):
    adapters.write(tmp_path / "poet", values, targets=("q_proj", "up_proj"))
    made = recipe(tmp_path, "poet", kind="llmapi", precision="fp8", kv_cache_precision="fp8")
    old = tmp_path / "e" / "adapters" / "7"
    old.mkdir(parents=True)
    files = gpu_adapters.package(made, open_checkpoint(MODEL), tmp_path / "e", "bfloat16")
    assert [path.read_bytes() for path in files] == [
        (tmp_path / "poet" / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")
    ]
    assert not old.exists()
    assert commands.lora_modules(made) == (["attn_q", "attn_k", "attn_v", "mlp_gate"], 4)
    adapters.write(tmp_path / "poet", values, alpha_pattern={"q_proj": 3})
    with pytest.raises(InvalidArgument, match=r"adapters\.poet: alpha_pattern must be empty"):
        gpu_adapters.package(made, open_checkpoint(MODEL), tmp_path / "e", "bfloat16")


def test_the_build_has_a_plugin_for_the_matrices_and_ranks_of_all_adapters(tmp_path, values):
    adapters.write(tmp_path / "poet", values, rank=5, targets=("q_proj",))
    adapters.write(tmp_path / "lawyer", values, rank=3, targets=("down_proj",))
    two = recipe(tmp_path, "poet", "lawyer")
    options = commands.build_options(two, shape_of(two))
    assert options["lora_plugin"] == "auto" and options["max_lora_rank"] == 5
    assert options["lora_target_modules"] == ["attn_q", "attn_k", "attn_v", "mlp_4h_to_h"]
    plain = recipe(tmp_path)
    assert "lora_plugin" not in commands.build_options(plain, shape_of(plain))


def test_the_configurations_carry_the_weights_in_the_models_type(tmp_path, values):
    adapters.write(tmp_path / "poet", values, rank=5)
    for dtype, pbtxt in (("bfloat16", "TYPE_BF16"), ("float16", "TYPE_FP16")):
        made = recipe(tmp_path, "poet", convert={"dtype": dtype})
        text = model_configs.render(made)
        assert f'name: "lora_weights" data_type: {pbtxt} dims: [ -1, -1 ] optional: true' in text
        assert 'name: "lora_config" data_type: TYPE_INT32 dims: [ -1, 3 ] optional: true' in text
    repository = tmp_path / "repository"
    written = {path.parts[-3]: path.read_text() for path in model_configs.write_steps(made, repository)}
    both = {"ensemble", "detokenizer", "ensemble_packed", "detokenizer_packed"}
    assert written.keys() == {*both, "tokenizer"}
    assert 'name: "lora_weights" data_type: TYPE_FP16' in written["tokenizer"]
    for side in ("output_map", "input_map"):
        assert f'{side} {{ key: "lora_weights" value: "_lora_weights" }}' in written["ensemble"]


def test_the_hosts_cache_has_a_page_for_each_adapter_that_it_is_to_hold(tmp_path, values):
    for name in ("a", "b", "c"):
        adapters.write(tmp_path / name, values, rank=4)
    arch = open_checkpoint(MODEL).architecture
    rows = {"q": arch.num_heads * arch.head_dim, "k": arch.num_kv_heads * arch.head_dim, "m": arch.intermediate_size}
    widths = [arch.hidden_size + rows[each] for each in "qkkqmmm"]
    least = 2 * 4 * arch.num_layers * sum(widths)  # of one adapter, in bytes

    def cache(**changes):
        given = {key: value for key, value, _ in model_configs.parameters(recipe(tmp_path, "a", "b", "c", **changes))}
        return [int(given[f"lora_cache_{name}"]) for name in ("host_memory_bytes", "max_adapter_size")]

    size, rank = cache()
    # The backend's rule: a page has slots as wide as the narrowest matrix's rows, whole ones for each row.
    slots = sum(-(-width // min(widths)) for width in widths)
    page = 2 * 4 * arch.num_layers * slots * min(widths)
    assert rank == 4 and least <= page and 3 * page <= size <= 12 * page
    assert cache(adapter_cache=1)[0] == size // 3

"""The checkpoint that ships: its files agree with each other and fit into git."""

import csv
import json
import math
import struct
from pathlib import Path

import pytest
from tokenizers import Tokenizer

CHECKPOINT = Path(__file__).resolve().parents[3] / "build/demo_model/checkpoint"
MAX_BYTES = 24 * 1000 * 1000


def read(name):
    return json.loads((CHECKPOINT / name).read_text())


@pytest.fixture(scope="module")
def config():
    return read("config.json")


@pytest.fixture(scope="module")
def tensors():
    """Name -> header entry of model.safetensors, read by hand."""
    with (CHECKPOINT / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__")
    return header


def expected_shapes(config):
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{layer}.input_layernorm.weight": [hidden],
            f"model.layers.{layer}.post_attention_layernorm.weight": [hidden],
            f"model.layers.{layer}.self_attn.q_proj.weight": [hidden, hidden],
            f"model.layers.{layer}.self_attn.k_proj.weight": [kv_size, hidden],
            f"model.layers.{layer}.self_attn.v_proj.weight": [kv_size, hidden],
            f"model.layers.{layer}.self_attn.o_proj.weight": [hidden, hidden],
            f"model.layers.{layer}.mlp.gate_proj.weight": [intermediate, hidden],
            f"model.layers.{layer}.mlp.up_proj.weight": [intermediate, hidden],
            f"model.layers.{layer}.mlp.down_proj.weight": [hidden, intermediate],
        }
    return shapes


def test_the_weights_are_those_of_the_configured_llama(config, tensors):
    assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"] is True
    assert {name: entry["shape"] for name, entry in tensors.items()} == expected_shapes(config)


def test_the_weights_are_bf16_and_fill_the_file(tensors):
    assert {entry["dtype"] for entry in tensors.values()} == {"BF16"}
    end = 0
    for entry in sorted(tensors.values(), key=lambda entry: entry["data_offsets"]):
        assert entry["data_offsets"] == [end, end + 2 * math.prod(entry["shape"])]
        end = entry["data_offsets"][1]
    header_bytes = struct.unpack("<Q", (CHECKPOINT / "model.safetensors").read_bytes()[:8])[0]
    assert (CHECKPOINT / "model.safetensors").stat().st_size == 8 + header_bytes + end


def test_the_whole_folder_fits_in_24_megabytes():
    assert sum(file.stat().st_size for file in CHECKPOINT.rglob("*") if file.is_file()) <= MAX_BYTES


def test_configuration_and_tokenizer_agree(config):
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    tokenizer_config, generation = read("tokenizer_config.json"), read("generation_config.json")
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert tokenizer_config["model_max_length"] == config["max_position_embeddings"]
    assert config["bos_token_id"] == generation["bos_token_id"] == tokenizer.token_to_id(tokenizer_config["bos_token"])
    assert config["eos_token_id"] == generation["eos_token_id"]
    assert config["pad_token_id"] == tokenizer.token_to_id(tokenizer_config["pad_token"])
    for token_id, token in tokenizer_config["added_tokens_decoder"].items():
        assert tokenizer.id_to_token(int(token_id)) == token["content"]


def test_the_training_record_describes_the_weights(config, tensors):
    record = read("training.json")
    assert record["parameters"] == sum(math.prod(entry["shape"]) for entry in tensors.values())
    assert all(config[name] == value for name, value in record["architecture"].items())


def test_the_loss_curve_has_every_step_and_falls():
    with (CHECKPOINT / "loss_curve.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["loss_nats_per_token"]) for row in rows]
    assert [int(row["step"]) for row in rows] == list(range(read("training.json")["steps_taken"]))
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-50:]) / 50 < 0.6 * losses[0]

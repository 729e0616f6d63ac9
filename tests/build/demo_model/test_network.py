"""The demo model's network and its files. Needs torch and transformers."""

import json

import pytest

torch = pytest.importorskip("torch")
network = pytest.importorskip("build.demo_model.network")
tiny_llama = pytest.importorskip("tests.fakes.tiny_llama")

pytestmark = pytest.mark.build_env


def test_saved_weights_are_the_bf16_values_of_the_model(tmp_path):
    model = tiny_llama.tiny_model()
    network.save_weights(model, tmp_path)
    loaded = network.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded[name], tensor.to(torch.bfloat16).float())


def test_the_configuration_is_one_that_the_builder_reads(tmp_path):
    from build.base import architecture

    model = tiny_llama.tiny_model()
    network.save_weights(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    expected = architecture.from_config(config).expected_tensors()
    stored = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert stored.keys() - expected.keys() == {"lm_head.weight"}
    assert all(stored[name] == shape for name, shape in expected.items())
    assert config["eos_token_id"] == [0, 5] and config["torch_dtype"] == "bfloat16"


def test_the_full_network_has_the_shipped_models_parameters():
    assert network.new_model(0).num_parameters() == 7_344_384


def test_the_same_seed_begins_alike_and_another_does_not():
    first, again, other = (tiny_llama.tiny_model(seed).model.embed_tokens.weight for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)

"""The demo model's network. Needs torch."""

import pytest

torch = pytest.importorskip("torch")
llama = pytest.importorskip("build.demo_model.llama")
tiny_llama = pytest.importorskip("tests.fakes.tiny_llama")
TINY, tiny_model = tiny_llama.TINY, tiny_llama.tiny_model

pytestmark = pytest.mark.build_env


def test_a_token_never_sees_what_follows_it():
    model = tiny_model()
    ids = torch.arange(20)[None]
    changed = ids.clone()
    changed[0, 12:] = 1
    with torch.inference_mode():
        before, after = model(ids), model(changed)
    assert torch.equal(before[0, :12], after[0, :12])
    assert not torch.allclose(before[0, 12:], after[0, 12:])


def test_saved_weights_are_the_bf16_values_of_the_model(tmp_path):
    model = tiny_model()
    llama.save_weights(model, tmp_path)
    loaded = llama.load_weights(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(torch.bfloat16).float())


@pytest.mark.filterwarnings("ignore")
def test_logits_are_those_of_the_reference_llama(tmp_path):
    transformers = pytest.importorskip("transformers")
    llama.save_weights(tiny_model(), tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, torch_dtype=torch.float32).eval()
    ids = torch.randint(0, TINY.vocab_size, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ours, theirs = llama.load_weights(tmp_path)(ids), reference(ids).logits
    assert torch.allclose(ours, theirs, atol=1e-5)

"""An adapter learns what it is shown, and PEFT and our own reader make the same model of its folder. Needs torch."""

import json

import numpy as np
import pytest

from build.base.checkpoint import open_checkpoint
from build.model import lora_adapter
from contract.errors import InvalidArgument
from tests.fakes import checkpoints, numpy_llama

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
train_adapter = pytest.importorskip("build.demo_model.train_adapter")

pytestmark = pytest.mark.build_env

COUNTING = [[(start + step) % 200 for step in range(40)] for start in range(0, 200, 7)]


@pytest.fixture
def base(tmp_path):
    config = checkpoints.CONFIGS["llama_gqa"]
    return tmp_path / "model", config, checkpoints.write(tmp_path / "model", config)


def test_the_loss_falls_and_the_folder_is_the_model_that_peft_makes(base, tmp_path):
    folder, config, values = base
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = {"rank": 5, "targets": ("q_proj", "up_proj"), "learning_rate": 2e-2}
    adapted, losses = train_adapter.train(model, COUNTING, steps=40, seed=0, **settings)
    assert np.mean(losses[-5:]) < losses[0] - 0.5
    adapted.save_pretrained(tmp_path / "adapter", safe_serialization=True)

    opened = lora_adapter.open_adapter("a", str(tmp_path / "adapter"), open_checkpoint(folder))
    assert opened.record.rank == 5 and {name.split(".")[-2] for name in opened.matrices} == {"q_proj", "up_proj"}
    fused = values | {name: values[name] + matrix.b @ matrix.a for name, matrix in opened.matrices.items()}
    prompt = COUNTING[3][:12]
    again = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = loaded(torch.tensor([prompt])).logits[0].numpy()
    np.testing.assert_allclose(numpy_llama.logits(config, fused, prompt), expected, atol=2e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\.up_proj": 7}, "alpha_pattern": {"up_proj": 5}},
        {"init_lora_weights": "gaussian", "lora_dropout": 0.1},
    ],
)
def test_peft_means_by_its_settings_what_we_read(base, tmp_path, settings):
    folder, _, values = base
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wanted = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "up_proj", "down_proj"], **settings)
    adapted = peft.get_peft_model(model, wanted)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    adapted.save_pretrained(tmp_path / "adapter", safe_serialization=True)
    opened = lora_adapter.open_adapter("a", str(tmp_path / "adapter"), open_checkpoint(folder))
    merged = adapted.merge_and_unload().state_dict()
    assert len(opened.matrices) == 6
    for name, matrix in opened.matrices.items():
        np.testing.assert_allclose(values[name] + matrix.b @ matrix.a, merged[name].numpy(), atol=1e-5, err_msg=name)


def test_the_command_reads_chats_and_texts_and_names_a_line_that_is_neither(base, tmp_path, capsys):
    folder = base[0]
    texts = tmp_path / "texts.jsonl"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    entries = ({"messages": chat}, {"text": "some\u2028words"})
    texts.write_text("".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries), encoding="utf-8")
    command = ["--model", str(folder), "--texts", str(texts), "--out", str(tmp_path / "out"), "--steps", "2"]
    assert train_adapter.main(command) == 0 and "loss" in capsys.readouterr().out
    assert lora_adapter.record("out", str(tmp_path / "out")).rank == 8
    for line in ("[]", "no JSON"):
        with pytest.raises(InvalidArgument, match='texts: line 1: must have "messages" or "text"'):
            train_adapter.texts_of([line], None)
    with pytest.raises(InvalidArgument, match="texts: must hold a text of at least two tokens, got none"):
        train_adapter.texts_of([], None)

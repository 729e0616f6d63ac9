"""The numpy encoder against transformers."""

import math

import numpy as np
import pytest

from build.base.encoder_checkpoint import open_encoder
from build.model import encoder_reference
from build.model.encoder_reference import Reference
from tests.fakes import tiny_encoders as tiny

IDS, TYPES = [2, 7, 8, 9, 3, 5, 6, 3], [0, 0, 0, 0, 0, 1, 1, 1]


def test_the_error_function_is_exact_to_seven_places():
    x = np.linspace(-6, 6, 1001, dtype=np.float32)
    exact = np.array([math.erf(value) for value in x.tolist()])
    assert np.abs(encoder_reference._erf(x) - exact).max() < 3e-7


@pytest.mark.build_env
@pytest.mark.parametrize(
    "config", [tiny.BERT, tiny.BERT | {"hidden_act": "gelu_new"}, tiny.RERANKER, tiny.ROBERTA_RERANKER]
)
def test_transformers_computes_the_same(tmp_path, config):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = tiny.write_bert(tmp_path, config)
    kind = "embedding" if config["architectures"] == ["BertModel"] else "rerank"
    reference = Reference(open_encoder(folder, kind))
    types = TYPES if config["type_vocab_size"] == 2 and kind == "rerank" else [0] * len(IDS)
    inputs = {"input_ids": torch.tensor([IDS]), "token_type_ids": torch.tensor([types])}
    name = config["architectures"][0]
    model = getattr(transformers, name).from_pretrained(folder).eval()
    with torch.no_grad():
        output = model(**inputs)
    expected = output.last_hidden_state[0].mean(0) if kind == "embedding" else torch.sigmoid(output.logits[0])
    assert np.abs(reference.vector(IDS, types) - expected.numpy()).max() < 1e-5


@pytest.mark.build_env
def test_transformers_qwen3_has_the_same_last_hidden_state(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = tiny.write_qwen3(tmp_path)
    model = transformers.Qwen3ForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    ids = [5, 9, 200, 31, 31, 8]
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0, -1].numpy()
        no, yes = model(torch.tensor([ids])).logits[0, -1, [260, 261]].numpy()
    embedded = Reference(open_encoder(folder, "embedding")).vector(ids, [0] * 6)
    assert np.abs(embedded - hidden / np.linalg.norm(hidden)).max() < 1e-5
    score = Reference(open_encoder(folder, "rerank"), (260, 261)).vector(ids, [0] * 6)
    assert abs(score[0] - 1 / (1 + np.exp(no - yes))) < 1e-5

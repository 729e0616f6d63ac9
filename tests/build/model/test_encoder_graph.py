"""The graph computes what a reference in numpy does, whatever else is in the batch; transformers computes it too."""

import functools

import numpy as np
import openvino as ov
import pytest
from hypothesis import given
from hypothesis import strategies as st

from build.base.encoder_checkpoint import open_encoder
from build.model.encoder_graph import encoder
from build.model.weights import Weights
from tests.fakes import tiny_encoders as tiny
from tests.fakes.encoder_reference import Reference

F32 = {"INFERENCE_PRECISION_HINT": "f32"}
ANSWERS = (260, 261)
WRITERS = {
    "bert mean": lambda f: tiny.write_sentence_files(tiny.write_bert(f, tiny.BERT)),
    "bert cls": lambda f: tiny.write_sentence_files(tiny.write_bert(f, tiny.BERT), "cls_token", normalize=False),
    "bert tanh": lambda f: tiny.write_bert(f, tiny.BERT | {"hidden_act": "gelu_new"}),
    "bert relu": lambda f: tiny.write_bert(f, tiny.BERT | {"hidden_act": "relu"}),
    "bert rerank": lambda f: tiny.write_bert(f, tiny.RERANKER),
    "roberta rerank": lambda f: tiny.write_bert(f, tiny.ROBERTA_RERANKER),
    "qwen3": lambda f: tiny.write_qwen3(f, bare=True),
    "qwen3 rerank": tiny.write_qwen3,
}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """``opened(name)``: the compiled graph and the reference of one checkpoint."""

    @functools.cache
    def open_(name):
        folder = WRITERS[name](tmp_path_factory.mktemp("encoder"))
        checkpoint = open_encoder(folder, "rerank" if "rerank" in name else "embedding")
        weights = Weights(checkpoint, "fp32", 128)
        compiled = ov.Core().compile_model(encoder(checkpoint, weights, ANSWERS), "CPU", F32)
        return compiled, Reference(checkpoint, ANSWERS), checkpoint

    return open_


def made(compiled, rows, types):
    length = max(map(len, rows))
    ids, mask, kinds = (np.zeros((len(rows), length), np.int64) for _ in range(3))
    for number, row in enumerate(rows):
        ids[number, : len(row)], mask[number, : len(row)], kinds[number, : len(row)] = row, 1, types[number]
    inputs = {"input_ids": ids, "attention_mask": mask}
    if any("token_type_ids" in port.names for port in compiled.inputs):
        inputs["token_type_ids"] = kinds
    return next(iter(compiled(inputs).values())).reshape(len(rows), -1).copy()


@pytest.mark.parametrize("name", WRITERS)
def test_a_batch_of_texts_of_all_lengths_is_what_the_reference_computes_alone(opened, name):
    compiled, reference, checkpoint = opened(name)
    random = np.random.default_rng(1)
    rows = [random.integers(0, checkpoint.architecture.vocab_size, n).tolist() for n in (1, 2, 7, 31, 32)]
    paired = checkpoint.encoder.token_types
    types = [[int(paired and place > len(row) // 2) for place in range(len(row))] for row in rows]
    expected = np.stack([reference.vector(row, kind) for row, kind in zip(rows, types, strict=True)])
    assert np.abs(made(compiled, rows, types) - expected).max() < 1e-5
    if checkpoint.encoder.normalize:
        assert np.allclose(np.linalg.norm(expected, axis=1), 1)


@given(rows=st.lists(st.lists(st.integers(0, 63), min_size=1, max_size=32), min_size=1, max_size=6))
def test_a_text_has_the_same_vector_in_every_batch(opened, rows):
    compiled, _, _ = opened("bert mean")
    together = made(compiled, rows, [[0] * len(row) for row in rows])
    for number, row in enumerate(rows):
        assert np.abs(made(compiled, [row], [[0] * len(row)]) - together[number]).max() < 1e-5


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.05), ("fp16", 0.01), ("int8", 0.1)])
def test_narrow_weights_are_near_the_reference(tmp_path, precision, bound):
    checkpoint = open_encoder(WRITERS["bert mean"](tmp_path), "embedding")
    weights = Weights(checkpoint, precision, 128)
    compiled = ov.Core().compile_model(encoder(checkpoint, weights), "CPU", F32)
    row = list(range(4, 20))
    expected = Reference(checkpoint).vector(row, [0] * len(row))
    assert np.abs(made(compiled, [row], [[0] * len(row)])[0] - expected).max() < bound


IDS, TYPES = [2, 7, 8, 9, 3, 5, 6, 3], [0, 0, 0, 0, 0, 1, 1, 1]


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

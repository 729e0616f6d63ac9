"""A graph that another program wrote in f32 gets the weights that our own builder would have given it."""

import dataclasses

import numpy as np
import openvino as ov
import openvino.opset13 as ops
import pytest

from build.base import checkpoint as checkpoints_of
from build.base.checkpoint import CheckpointError
from build.model import exported_graph, graph
from build.model.openvino_engine import OpenVinoEngine
from build.model.weights import Weights
from tests.fakes import checkpoints

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
IDS = np.random.default_rng(3).integers(0, 256, (1, 24))


def save(model: ov.Model, folder) -> None:
    folder.mkdir()
    ov.save_model(model, str(folder / "openvino_model.xml"), compress_to_fp16=False)


def logits(folder) -> np.ndarray:
    return next(OpenVinoEngine(folder, EXACT, 331).logits(IDS))


# Each checkpoint and each precision once; the other combinations are slow tests.
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("llama_gqa", "int4"),
        ("llama_mha_tied", "int8"),
        *(
            pytest.param(*both, marks=pytest.mark.slow)
            for both in (
                ("llama_gqa", "bf16"),
                ("llama_gqa", "int8"),
                ("llama_mha_tied", "bf16"),
                ("llama_mha_tied", "int4"),
                ("qwen2", "bf16"),
                ("qwen2", "int8"),
                ("qwen2", "int4"),
            )
        ),
    ],
)
def test_it_computes_what_our_own_builder_makes_of_the_same_weights(name, precision, tmp_path):
    config = checkpoints.CONFIGS[name]
    checkpoints.write(tmp_path / "own", config, dtype="F32")
    opened = checkpoints_of.open_checkpoint(tmp_path / "own")
    for kind in ("fp32", precision):
        weights = Weights(opened, kind, 32)
        save(graph.decoder(opened.architecture, weights.matrix, weights.vector), tmp_path / kind)
    stored, exported = exported_graph.matrices(dataclasses.replace(opened, graph=tmp_path / "fp32"))
    layers = config["num_hidden_layers"]
    assert len(stored.tensors) == 7 * layers + (1 if config["tie_word_embeddings"] else 2)
    weights = Weights(stored, precision, 32)
    save(exported.with_weights(weights.matrix), tmp_path / "replaced")
    assert np.array_equal(logits(tmp_path / "replaced"), logits(tmp_path / precision))
    sizes = [(tmp_path / kind / "openvino_model.bin").stat().st_size for kind in (precision, "replaced")]
    assert sizes[1] <= sizes[0] * 1.02 + 2000


def test_an_embedding_whose_shape_is_read_too_is_compressed(tmp_path):
    table = ops.constant(np.random.default_rng(0).standard_normal((331, 64)).astype(np.float32))
    ids = ops.parameter([1, -1], ov.Type.i64)
    rows = ops.gather(table, ids, graph.i64(0))
    widened = ops.add(rows, ops.convert(ops.reduce_max(ops.shape_of(table), graph.i64([0]), False), ov.Type.f32))  # OPT
    save(ov.Model([ops.result(ops.matmul(widened, table, False, True))], [ids], "tied"), tmp_path / "graph")
    checkpoints.write(tmp_path / "own", checkpoints.CONFIGS["llama_gqa"])
    opened = checkpoints_of.open_checkpoint(tmp_path / "own")
    stored, _ = exported_graph.matrices(dataclasses.replace(opened, graph=tmp_path / "graph"))
    assert list(stored.tensors) == ["model.embed_tokens.weight"]


def test_matrices_of_experts_are_stored_in_eight_bits(tmp_path):
    experts = np.random.default_rng(0).standard_normal((3, 32, 64)).astype(np.float32)
    x = ops.parameter([3, -1, 64], ov.Type.f32)
    model = ov.Model([ops.result(ops.matmul(x, ops.constant(experts), False, True))], [x], "experts")
    save(model, tmp_path / "graph")
    config = checkpoints.CONFIGS["llama_gqa"]
    checkpoints.write(tmp_path / "own", config)
    opened = checkpoints_of.open_checkpoint(tmp_path / "own")
    stored, exported = exported_graph.matrices(dataclasses.replace(opened, graph=tmp_path / "graph"))
    weights = Weights(stored, "int4", 32)
    compiled = ov.Core().compile_model(exported.with_weights(weights.matrix), "CPU", EXACT)
    given = np.eye(64, dtype=np.float32)[None].repeat(3, axis=0)
    found = compiled([given])[0].transpose(0, 2, 1)
    assert 0 < np.abs(found - experts).max() < np.abs(experts).max() / 127


def test_a_graph_without_matrices_is_refused(tmp_path):
    x = ops.parameter([1, 4], ov.Type.f32)
    save(ov.Model([ops.result(ops.relu(x))], [x], "nothing"), tmp_path / "graph")
    checkpoints.write(tmp_path / "own", checkpoints.CONFIGS["llama_gqa"])
    opened = checkpoints_of.open_checkpoint(tmp_path / "own")
    with pytest.raises(CheckpointError, match="has no matrices that can be compressed"):
        exported_graph.matrices(dataclasses.replace(opened, graph=tmp_path / "graph"))

"""The engine as the quality gate runs it, against the numpy reference."""

import numpy as np

from build.base.checkpoint import open_checkpoint
from build.model.openvino_engine import OpenVinoEngine
from build.package import compile_cpu
from build.quality import evaluation
from build.recipe import recipe as recipes
from tests.fakes import checkpoints

TABLE = {
    "kind": "cpu",
    "precision": "fp32",
    "kv_cache_precision": "f32",
    "max_batch_size": 8,
    "max_num_tokens": 64,
    "max_seq_len": 256,
    "kv_cache_tokens": 2048,
}


def test_openvino_and_the_numpy_reference_give_the_same_logits_piece_by_piece(tmp_path, monkeypatch):
    monkeypatch.setattr("build.model.openvino_engine.PIECE_TOKENS", 5)
    random_checkpoint = tmp_path / "checkpoint"
    checkpoints.write(random_checkpoint, checkpoints.CONFIGS["llama_gqa"])
    made = recipes.parse(TABLE | {"model": str(random_checkpoint)}, "tiny.toml")
    opened = open_checkpoint(random_checkpoint)
    compile_cpu.compile_cpu(opened, made, tmp_path, lambda line: None)
    compiled = OpenVinoEngine(tmp_path, compile_cpu.properties(made), 331)
    blocks = np.random.default_rng(0).integers(0, 331, (3, 17))
    expected = list(evaluation.reference(opened, lambda line: None).logits(blocks))
    np.testing.assert_allclose(np.stack(list(compiled.logits(blocks))), expected, atol=2e-3)
    ids = blocks[0].tolist()
    for length in (3, 9, 17, 4, 4):  # going on, starting over, the same again
        np.testing.assert_allclose(compiled.next_logits(ids[:length]), expected[0][length - 1], atol=2e-3)

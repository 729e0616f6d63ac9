"""The graph computes what BERT is, for every shape of folder that is allowed; others are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from contract.errors import InvalidArgument
from gateway.cache.sentence_encoder import SentenceEncoder
from tests.gateway import tiny_bert

FIRST = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
TEXTS = ["how", "how do sort a list", "what is the string in the list what is open close make " * 2]


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"pooling": FIRST, "hidden_act": "gelu_new"},
        {"dtype": np.float16, "prefix": "bert.", "num_attention_heads": 2},
        {"dtype": ml_dtypes.bfloat16, "num_hidden_layers": 1, "layer_norm_eps": 1e-5},
    ],
)
def test_a_vector_is_that_of_the_forward_pass_written_in_numpy(tmp_path: Path, shape: dict[str, Any]) -> None:
    tensors = tiny_bert.write(tmp_path, **shape)
    config = json.loads((tmp_path / "config.json").read_text())
    encoder = SentenceEncoder(tmp_path)
    for text in TEXTS:
        ids = encoder.token_ids(text)
        vector = encoder.embed(ids)
        assert vector.shape == (encoder.dimensions,) and vector.dtype == np.float32
        expected = tiny_bert.forward(tensors, ids, config, first=shape.get("pooling") == FIRST)
        np.testing.assert_allclose(vector, expected, atol=2e-5)


def test_a_text_that_is_not_read_whole_has_no_tokens(tmp_path: Path) -> None:
    tiny_bert.write(tmp_path, longest=10)
    encoder = SentenceEncoder(tmp_path)
    assert len(encoder.token_ids("how " * 8)) == 10
    assert encoder.token_ids("how " * 9) is None, "too long"
    assert encoder.token_ids("how do sort the Liste") is None, "a word that is unknown"


def test_the_longest_text_need_not_fill_a_bucket(tmp_path: Path) -> None:
    tensors = tiny_bert.write(tmp_path)  # 40 positions, between the buckets of 32 and 64
    encoder = SentenceEncoder(tmp_path)
    ids = encoder.token_ids("how " * 38)
    expected = tiny_bert.forward(tensors, ids, tiny_bert.CONFIG, first=False)
    np.testing.assert_allclose(encoder.embed(ids), expected, atol=2e-5)


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [
        ({"model_type": "roberta"}, "model_type is 'roberta'; allowed is bert"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'; allowed is absolute"),
        ({"hidden_act": "silu"}, "hidden_act is 'silu'; allowed is one of gelu, "),
        ({"pooling": {"pooling_mode_max_tokens": True}}, "allowed is the mean of the tokens or the first token"),
        ({"pooling": FIRST | {"pooling_mode_mean_tokens": True}}, "allowed is the mean of the tokens or the first"),
        ({"prefix": "model."}, r"the tensor embeddings\.\S+ is missing"),
    ],
)
def test_what_is_no_such_model_is_refused_by_name(tmp_path: Path, shape: dict[str, Any], complaint: str) -> None:
    tiny_bert.write(tmp_path, **shape)
    with pytest.raises(InvalidArgument, match=complaint):
        SentenceEncoder(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_that_is_missing_or_broken_is_named(tmp_path: Path, name: str) -> None:
    tiny_bert.write(tmp_path)
    for broken in (True, False):
        (tmp_path / name).write_text("[]") if broken else (tmp_path / name).unlink()
        with pytest.raises(InvalidArgument, match=f"{name}"):
            SentenceEncoder(tmp_path)


def test_a_shape_that_config_json_does_not_say_is_asked_for(tmp_path: Path) -> None:
    tiny_bert.write(tmp_path)
    config = {name: value for name, value in tiny_bert.CONFIG.items() if name != "hidden_size"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidArgument, match=r"config\.json: hidden_size is missing"):
        SentenceEncoder(tmp_path)

"""Tiny engines of both kinds, built once as ``make build-engine`` builds them."""

import pytest

from build.package import encoder
from build.recipe import recipe as recipes
from tests.fakes import tiny_encoders as tiny


@pytest.fixture(scope="session")
def encoder_engine(tmp_path_factory):
    """``encoder_engine(name)``: the folder of an engine: embedding, matryoshka, rerank or decoder-rerank."""
    built = {}

    def build(name):
        if name not in built:
            folder = tmp_path_factory.mktemp(name)
            sentences = {"prompts": {"query": "the ", "document": ""}}
            writers = {
                "embedding": lambda: tiny.write_sentence_files(tiny.write_bert(folder, tiny.BERT), **sentences),
                "matryoshka": lambda: tiny.write_sentence_files(
                    tiny.write_bert(folder, tiny.BERT | {"matryoshka_dimensions": [8, 16]})
                ),
                "rerank": lambda: tiny.write_bert(folder, tiny.RERANKER),
                "decoder-rerank": lambda: tiny.write_qwen3(folder),
            }
            writers[name]()
            kind = "rerank" if "rerank" in name else "embedding"
            recipe = recipes.encoder({"kind": kind, "model": str(folder)}, f"{name}.toml")
            built[name] = encoder.build(recipe, tmp_path_factory.mktemp("engines"), lambda line: None)
        return built[name]

    return build

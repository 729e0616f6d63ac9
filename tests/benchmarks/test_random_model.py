import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks import random_model
from contract.errors import EngineFailed


def test_every_id_of_the_vocabulary_has_a_text(tmp_path):
    random_model.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == random_model.VOCABULARY
    assert tokenizer.decode([random_model.VOCABULARY - 3])


def test_the_model_has_about_160_million_parameters():
    assert 150e6 < sum(np.prod(shape) for shape in random_model.shapes().values()) < 170e6


def test_the_weights_are_those_that_the_builder_expects():
    from build.base import architecture

    assert random_model.shapes() == architecture.from_config(random_model.CONFIG).expected_tensors()


def test_a_weight_file_can_be_read_back(tmp_path):
    from build.base import shards

    random_model.write_weights(tmp_path / "a.safetensors", {"matrix": (64, 256), "norm": (256,)})
    stored = shards.read_header(tmp_path / "a.safetensors")
    assert 0.1 < stored["matrix"].f32().std() < 0.15 and 0.9 < stored["norm"].f32().mean() < 1.1


def test_a_folder_that_no_engine_can_be_built_of_is_named(tmp_path):
    with pytest.raises(EngineFailed, match=f"no engine 'bench-{tmp_path.name}' could be built of {tmp_path}"):
        random_model.engine(of=tmp_path)


def test_an_engine_is_named_by_its_name_or_its_checkpoint(tmp_path, monkeypatch):
    built = []
    monkeypatch.setattr(random_model, "engine", lambda precision="bf16", of=None: built.append(of) or "made")
    assert random_model.named("demo") == "demo" and not built
    (tmp_path / "config.json").write_text("{}")
    assert random_model.named(random_model.NAME) == random_model.named(str(tmp_path)) == "made"
    assert built == [None, tmp_path]

from tokenizers import Tokenizer

from benchmarks import checkpoints, random_model


def test_every_id_of_the_vocabulary_has_a_text(tmp_path):
    checkpoints.write_tokenizer(tmp_path)
    random_model.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == random_model.VOCABULARY
    assert tokenizer.decode([random_model.VOCABULARY - 3])


def test_the_model_has_about_160_million_parameters():
    assert 150e6 < random_model.parameters() < 170e6

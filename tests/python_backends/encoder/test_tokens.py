import pytest
import tokenizers

from contract.encoder import Encoder
from contract.errors import InvalidArgument, PromptTooLong
from python_backends.encoder.tokens import Row, Tokens
from tests.fakes import tiny_encoders as tiny


@pytest.fixture
def folder(tmp_path):
    tiny.write_word_pieces(tmp_path)
    return tmp_path


@pytest.fixture
def tokens(folder):
    return Tokens(folder, Encoder("mean", True, 32), 32, 64)


def test_a_text_has_its_special_tokens_whatever_limits_the_file_has(tokens):
    [row] = tokens.texts("text_input", ["the man eats food on the second"], None)
    assert row.ids[0] == 2 and row.ids[-1] == 3 and len(row.ids) == 9
    assert row.types == [0] * 9


def test_a_pair_is_joined_by_the_tokenizer_with_its_types(tokens):
    [row] = tokens.pairs("text_pair", [("the man", "eats food")], None)
    assert [tokens._tokenizer.id_to_token(i) for i in row.ids] == "[CLS] the man [SEP] eats food [SEP]".split()
    assert row.types == [0, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(("text", "got"), [("a " * 31, "33"), ("a" * 10_000_000, "more than .* bytes")])
def test_a_text_that_is_too_long_is_refused_by_its_place(tokens, text, got):
    words = rf"text_input\[1\]: must have at most 32 tokens, got {got}; truncate_prompt_tokens=-1 cuts it"
    with pytest.raises(PromptTooLong, match=words):
        tokens.texts("text_input", ["a", text, "a"], None)


def test_a_text_without_tokens_is_refused_by_its_place(tmp_path):
    tiny.write_qwen3(tmp_path)
    tokens = Tokens(tmp_path, Encoder("last", True, 32), 32, 311)
    with pytest.raises(InvalidArgument, match=r"text_pair\[1\]: must encode to at least one token, got none"):
        tokens.texts("text_pair", ["a", ""], None)


@pytest.mark.parametrize("most", [3, 10, 32])
def test_a_text_is_cut_between_its_special_tokens(tokens, most):
    [row] = tokens.texts("text_input", ["a " * 500_000], most)
    assert len(row.ids) == most and (row.ids[0], row.ids[-1]) == (2, 3)


def test_a_length_without_room_for_the_special_tokens_is_refused(tokens):
    assert len(tokens.texts("text_input", ["a a a"], 2)[0].ids) == 2
    with pytest.raises(InvalidArgument, match="truncate_prompt_tokens: must be at least 2, .* got 1"):
        tokens.texts("text_input", ["a a a"], 1)
    assert len(tokens.pairs("text_pair", [("a a", "a a")], 3)[0].ids) == 3
    with pytest.raises(InvalidArgument, match="truncate_prompt_tokens: must be at least 3, .* got 2"):
        tokens.pairs("text_pair", [("a a", "a a")], 2)


def test_a_template_stands_around_a_pair_and_is_never_cut(tmp_path):
    tiny.write_qwen3(tmp_path)
    encoder = Encoder("last", False, 1, template=("<s>", "Q {query} D {document}", "</s>"))
    tokens = Tokens(tmp_path, encoder, 40, 311)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    [row] = tokens.pairs("text_pair", [("x {document}", "y")], None)
    assert library.decode(list(row.ids)) == "<s>Q x {document} D y</s>"
    [cut] = tokens.pairs("text_pair", [("x", "y" * 100)], 40)
    assert len(cut.ids) == 40 and library.decode(list(cut.ids)).endswith("y</s>")
    with pytest.raises(PromptTooLong, match=r"text_pair\[0\]: must have at most 40 tokens"):
        tokens.pairs("text_pair", [("x", "y" * 100)], None)
    around = len(row.ids) - len(library.encode("Q x {document} D y", add_special_tokens=False).ids)
    assert len(tokens.pairs("text_pair", [("x", "y")], around + 1)[0].ids) == around + 1
    with pytest.raises(
        InvalidArgument, match=f"truncate_prompt_tokens: must be at least {around}, .* got {around - 1}"
    ):
        tokens.pairs("text_pair", [("x", "y")], around - 1)
    assert tokens.answers() == (library.token_to_id("no"), library.token_to_id("yes"))


def test_given_ids_are_kept_checked_and_cut(tokens):
    assert tokens.ids("input_ids", [[5, 6, 7]], 2) == [Row([5, 6], [0, 0])]
    for ids, words in (
        ([], "at least one"),
        ([64], "from 0 to 63, got 64"),
        ([-2], "got -2"),
        ([1] * 33, "at most 32"),
    ):
        with pytest.raises(InvalidArgument, match=words) as caught:
            tokens.ids("input_ids", [[1], ids], None)
        assert caught.value.field == "input_ids[1]"


def test_a_vocabulary_without_answers_cannot_rerank(folder):
    library = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    library.save(str(folder / "tokenizer.json"))
    with pytest.raises(InvalidArgument, match="'no' and 'yes'"):
        Tokens(folder, Encoder("last", False, 1), 32, 64).answers()

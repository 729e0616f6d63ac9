import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import PromptTooLong
from python_backends.tokenizer.encoding import Encoding
from tests.fakes import tokenizer_families


@pytest.fixture(scope="module", params=tokenizer_families.FAMILIES)
def tokenizer(request):
    return tokenizer_families.FAMILIES[request.param]()


@pytest.fixture(scope="module")
def encoding(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return Encoding(path, max_seq_len=100)


def test_ids_are_the_librarys_own_for_every_text_of_a_batch(tokenizer, encoding):
    texts = [*tokenizer_families.TEXTS, "x"]
    for special in (True, False):
        expected = [tokenizer.encode(text, add_special_tokens=special).ids for text in texts]
        assert encoding.encode(texts, special) == expected


@pytest.mark.parametrize("special", [True, False])
def test_the_end_of_a_text_is_what_the_library_keeps_when_it_truncates_on_the_left(tokenizer, encoding, special):
    added = tokenizer.num_special_tokens_to_add(False) if special else 0
    for text in tokenizer_families.TEXTS:
        for tokens in range(added + 1, len(tokenizer.encode(text).ids) + 3):
            tokenizer.enable_truncation(tokens, direction="left")
            expected = tokenizer.encode(text, add_special_tokens=special).ids
            tokenizer.no_truncation()
            assert encoding.encode_end(text, special, tokens) == expected
        assert len(encoding.encode_end(text, special, 1)) == 1


def test_an_empty_batch_is_empty(encoding):
    assert encoding.encode([], True) == []


def test_a_word_is_encoded_without_special_tokens(tokenizer, encoding):
    assert encoding.encode_word("fox") == tuple(tokenizer.encode("fox", add_special_tokens=False).ids)


def test_no_prompt_that_would_fit_is_refused_for_its_length(tokenizer, encoding):
    for text in tokenizer_families.TEXTS:
        longest = text * 50
        while (tokens := len(tokenizer.encode(longest).ids)) > 100:
            longest = longest[: len(longest) // 2 if tokens > 200 else len(longest) * 7 // 8]
        encoding.check_length("text_input", longest)


@pytest.mark.slow
@given(st.text(min_size=1, max_size=20))
def test_a_megabyte_is_refused_before_it_is_encoded(encoding, text):
    with pytest.raises(PromptTooLong, match="text_input: must have at most 100 tokens, got .* bytes"):
        encoding.check_length("text_input", text * (1_000_000 // len(text.encode())))


def test_a_tokenizer_that_truncates_and_pads_by_itself_is_kept_from_it(tmp_path):
    tokenizer = tokenizer_families.byte_level_bpe()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    text = tokenizer_families.TEXTS[0]
    assert Encoding(path, 100).encode([text], False) == [tokenizer.encode(text, add_special_tokens=False).ids]

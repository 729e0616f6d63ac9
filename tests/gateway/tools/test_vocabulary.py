"""Token ids by name, with the demo model's own tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from contract.errors import InvalidArgument
from gateway.tools.vocabulary import Vocabulary

TOKENIZER = Path(__file__).resolve().parents[3] / "build" / "demo_model" / "checkpoint" / "tokenizer.json"


def test_without_a_tokenizer_ids_stand_for_themselves():
    assert Vocabulary().token(17) == ("token_id:17", None)


@pytest.mark.parametrize("text", ["Hello world", "naïve café", "🐟 fish", "日本語\n\t x"])
def test_the_bytes_of_a_texts_tokens_are_the_bytes_of_the_text(text: str):
    vocabulary, tokenizer = Vocabulary(TOKENIZER), tokenizers.Tokenizer.from_file(str(TOKENIZER))
    pieces = [bytes(vocabulary.token(one)[1]) for one in tokenizer.encode(text, add_special_tokens=False).ids]
    assert b"".join(pieces).decode() == text


def test_an_id_beyond_the_vocabulary_has_no_bytes():
    assert Vocabulary(TOKENIZER).token(10**8) == ("token_id:100000000", None)


def test_special_tokens_are_known_and_found_by_their_text():
    vocabulary = Vocabulary(TOKENIZER)
    end = vocabulary.id("<|end|>")
    assert vocabulary.known and end in vocabulary.special and vocabulary.token(end)[0] == "<|end|>"
    assert vocabulary.id("<tool_call>") is None
    unknown = Vocabulary()
    assert (unknown.known, unknown.special, unknown.id("<|end|>")) == (False, frozenset(), None)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidArgument, match="must be a tokenizer.json"):
        Vocabulary(tmp_path / "tokenizer.json")

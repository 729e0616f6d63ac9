"""What an id spells, for the kinds of tokenizers that models have."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models

from python_backends.detokenizer.decoding import Decoding
from python_backends.detokenizer.stages import byte_level
from python_backends.grammar.vocabulary import SPECIAL_MARK, spelling, tokenizer_info

SENTENCEPIECE = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def tokenizer(vocabulary, decoder, special=(), plain=()):
    made = tokenizers.Tokenizer(models.BPE(vocab={word: place for place, word in enumerate(vocabulary)}, merges=[]))
    made.decoder = decoder
    made.add_special_tokens(list(special))
    made.add_tokens(list(plain))
    return Decoding.from_tokenizer(made)


@pytest.mark.parametrize(
    ("vocabulary", "decoder", "spelled"),
    [
        (["a", "Ġb", "ÃĹ", "Ã"], decoders.ByteLevel(), [b"a", b" b", b"\xc3\x97", b"\xc3"]),
        (["a", "▁b", "<0xC3>", "é"], SENTENCEPIECE, [b"a", b" b", b"\xc3", "é".encode()]),
        (["a", "▁b", "<0xF4>"], SENTENCEPIECE, [b"a", b" b", b""]),  # no token can begin the mark
        (["a", "▁b"], decoders.Metaspace(), [b"a", b" b"]),
    ],
)
def test_an_id_spells_what_it_adds_within_a_text(vocabulary, decoder, spelled):
    decoding = tokenizer(vocabulary, decoder, special=["<end>"], plain=["<tool_call>"])
    marked = (SPECIAL_MARK + "<end>").encode()
    ids = range(len(vocabulary) + 3)
    assert [spelling(decoding, token_id) for token_id in ids] == [*spelled, marked, b"<tool_call>", b""]


@pytest.mark.parametrize("marked", [True, False])
def test_the_file_of_a_tensorrt_llm_engine_spells_as_ours_does(tiny_engine, marked):
    decoding = Decoding.from_tokenizer(tiny_engine)
    info = tokenizer_info(tiny_engine / "tokenizer.json", 300, [256], marked)
    assert list(info) == ["encoded_vocab", "tokenizer_str", "stop_token_ids"] and info["stop_token_ids"] == [256]
    assert json.loads(info["tokenizer_str"])["decoder"]["type"] == "ByteLevel"
    words = [byte_level(word) if word else b"" for word in json.loads(json.dumps(info["encoded_vocab"]))]
    mark = SPECIAL_MARK.encode()
    assert len(words) == 300 and any(word.startswith(mark) for word in words) == marked
    assert [word.removeprefix(mark) for word in words] == [spelling(decoding, i).removeprefix(mark) for i in range(300)]

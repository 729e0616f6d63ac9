"""What an id spells, for the kinds of tokenizers that models have."""

import pytest
import tokenizers
from tokenizers import decoders, models

from python_backends.detokenizer.decoding import Decoding
from python_backends.grammar.vocabulary import SPECIAL_MARK, spelling

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

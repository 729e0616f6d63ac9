"""The yardsticks of the model card: byte n-grams and compressors, held to what they must be."""

import gzip
import lzma

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from build.demo_model.compression import compression_bits_per_byte, gzip_primed_bytes, xz_primed_bytes
from build.demo_model.ngram import KNESER_NEY, SMOOTHINGS, WITTEN_BELL, ByteNgram, grams

TEXTS = [b"the cat sat on the mat", b"the dog sat on the cat", b"a man, a plan"]


def test_grams_are_each_byte_with_its_context_and_a_final_nul():
    assert [int(code).to_bytes(3, "big") for code in grams(b"ab", 2)] == [b"\0\0a", b"\0ab", b"ab\0"]


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@given(context=st.binary(min_size=3, max_size=3), seen=st.sampled_from(TEXTS), at=st.integers(0, 10))
@settings(max_examples=30, deadline=None)
def test_probabilities_after_any_context_sum_to_one(smoothing, context, seen, at):
    model = ByteNgram(TEXTS, 3, smoothing)
    for before in (context, seen[at : at + 3]):
        codes = np.arange(256) + (int.from_bytes(before, "big") << 8)
        probabilities = model.probabilities(codes)
        assert probabilities.min() > 0
        assert probabilities.sum() == pytest.approx(1)


def test_witten_bell_of_order_zero_is_the_textbook_formula():
    model = ByteNgram([b"aab"], 0, WITTEN_BELL)  # a twice, b once, the end once; three distinct
    codes = np.frombuffer(b"ab\0z", np.uint8).astype(np.int64)
    expected = [(count + 3 / 256) / (4 + 3) for count in (2, 1, 1, 0)]
    assert model.probabilities(codes) == pytest.approx(expected)


def test_kneser_ney_judges_a_rare_context_by_how_many_contexts_a_byte_follows():
    # "u" is frequent but only ever after "q"; "e" is as frequent and follows many bytes.
    model = ByteNgram([b"ququququ aebecede" * 3], 1, KNESER_NEY)
    after_unseen = np.frombuffer(b"ue", np.uint8).astype(np.int64) + (ord("z") << 8)
    u, e = model.probabilities(after_unseen)
    assert e > 2 * u


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_a_longer_context_codes_repetitive_text_in_fewer_bits(smoothing):
    training, text = [b"for i in range(10): print(i)\n" * 20], b"for i in range(10): print(i)\n"
    bits = [ByteNgram(training, order, smoothing).bits(text) for order in (0, 1, 3, 5)]
    assert bits[0] > 2 * bits[1] > 4 * bits[2]
    assert bits[3] < len(text) / 2


def test_an_order_or_smoothing_it_does_not_have_is_refused():
    with pytest.raises(ValueError, match="order: 9, allowed are 0 to 6"):
        ByteNgram(TEXTS, 9)
    with pytest.raises(ValueError, match="smoothing: 'laplace', allowed are kneser_ney, witten_bell"):
        ByteNgram(TEXTS, 2, "laplace")


def test_compressors_are_gzip_9_and_xz_9_extreme():
    held_out, training = [b"def f(x):\n    return x\n" * 30, b"class A:\n    pass\n" * 9], [b"import os\n" * 40]
    figures = compression_bits_per_byte(held_out, training)
    joined = b"".join(held_out)
    together = {name.split(",")[0]: figure for name, figure in figures.items() if "one stream" in name}
    assert together["gzip -9"] == 8 * len(gzip.compress(joined, 9)) / len(joined)
    assert together["xz -9e"] == 8 * len(lzma.compress(joined, preset=9 | lzma.PRESET_EXTREME)) / len(joined)


def test_priming_makes_text_cheap_that_was_read_before():
    random = np.random.default_rng(0).integers(0, 256, 4000, dtype=np.uint8).tobytes()
    assert xz_primed_bytes(random, random) < 200
    assert gzip_primed_bytes([random], random) < 200
    assert gzip_primed_bytes([random], random + bytes(40_000)) > 4000  # out of gzip's window

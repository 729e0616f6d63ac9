import random

from benchmarks.prompts import Prompts


def test_without_a_tokenizer_a_word_is_a_token(tmp_path):
    prompts = Prompts.for_engine(tmp_path)
    text = prompts.text(random.Random(1), 12, "once upon a time")
    assert text.startswith("once upon a time ") and prompts.count(text) == 12


def test_a_prefix_is_kept_whole_even_if_it_is_too_long():
    prefix = "one two three four"
    assert Prompts().text(random.Random(1), 2, prefix).startswith(prefix + " ")

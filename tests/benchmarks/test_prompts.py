import random

from benchmarks import prompts
from benchmarks.prompts import Passages, Prompts


def test_without_a_tokenizer_a_word_is_a_token(tmp_path):
    source = Prompts.for_engine(tmp_path)
    text = source.text(random.Random(1), 12, "once upon a time")
    assert text.startswith("once upon a time ") and source.count(text) == 12


def test_a_prefix_is_kept_whole_even_if_it_is_too_long():
    prefix = "one two three four"
    assert Prompts().text(random.Random(1), 2, prefix).startswith(prefix + " ")


def test_passages_are_successive_words_of_the_pages_and_depend_on_the_seed(tmp_path):
    first, again = (Passages().text(random.Random(3), 40) for _ in range(2))
    pages = " ".join(page.read_text() for page in sorted(prompts.PAGES.glob("*.md")))
    assert first == again and first in pages and first != Passages().text(random.Random(4), 40)
    assert Passages().count(Passages().text(random.Random(3), 40, "a prefix")) >= 2

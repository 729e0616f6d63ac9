from benchmarks import textbook_cost
from benchmarks.efficiency import Batch
from benchmarks.textbook_cost import TEXTBOOK


def batch(serving_s, tokens, messages):
    return Batch("x", 8, 1, tokens, 2.0, [0.1], 0.0, {"tritonserver": serving_s}, messages=messages)


def test_a_response_and_a_token_are_held_against_the_textbooks_of_the_same_round():
    textbook = [batch(0.3, 1000, 1000), batch(0.4, 1000, 1000)]
    ours = [batch(0.15, 1000, 500), batch(0.4, 1000, 500)]
    lines = textbook_cost.described({8: {TEXTBOOK: textbook, "packed": ours}}).splitlines()
    assert len(lines) == 4
    assert "1.50 (1.00–2.00)" in lines[3] and "0.75 (0.50–1.00)" in lines[3]
    assert lines[3].split()[-3:] == ["2.00", "250.00", "500.00"]


def test_a_textbook_batch_too_short_to_be_measured_has_no_ratio():
    lines = textbook_cost.described({8: {TEXTBOOK: [batch(0.0, 8, 8)], "packed": [batch(0.1, 8, 8)]}}).splitlines()
    assert lines[3].split().count("–") == 2

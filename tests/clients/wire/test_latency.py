from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from clients.wire.latency import Stopwatch
from contract.generation import FinishReason, TokenDelta


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_figures_of_a_stream_are_those_its_reader_saw() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    for after_s, delta in (
        (0.5, TokenDelta("a", (1,))),
        (0.1, TokenDelta("b", (2,))),
        (0.0, TokenDelta("")),  # no token, no time
        (0.4, TokenDelta("cdef", (3, 4, 5, 6))),
        (0.3, TokenDelta("", (), (), FinishReason.STOP)),
    ):
        clock.now_s += after_s
        watch.observe(delta)
    assert round(watch.ttft_s, 9) == 0.5
    assert round(watch.total_s, 9) == 1.0
    assert watch.tokens == 6
    assert round(watch.tokens_per_s, 9) == 10.0  # five tokens in half a second
    assert round(watch.inter_token_s(0.99), 9) == 0.1


def test_before_the_first_token_there_are_no_figures() -> None:
    watch = Stopwatch(Clock())
    assert (watch.ttft_s, watch.tokens_per_s, watch.inter_token_s(0.5), watch.total_s) == (None, None, None, 0.0)
    watch.observe(TokenDelta("a", (1,)))
    assert (watch.ttft_s, watch.tokens_per_s, watch.inter_token_s(0.5)) == (0.0, None, None)


def test_text_without_ids_counts_as_one_token() -> None:
    watch = Stopwatch(Clock())
    watch.observe(TokenDelta("héllo"))
    assert watch.tokens == 1


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5)), min_size=1), st.floats(0.01, 1.0))
def test_the_time_between_tokens_is_that_of_the_values_written_out(
    values: list[tuple[float, int]], fraction: float
) -> None:
    watch = Stopwatch(Clock())
    watch.gaps_s = [(value * weight, weight) for value, weight in values]
    flat = sorted(value * weight / weight for value, weight in values for _ in range(weight))
    assert watch.inter_token_s(fraction) == next(v for n, v in enumerate(flat, 1) if n >= fraction * len(flat))

from __future__ import annotations

from clients.wire.completion import join
from contract.generation import FinishReason, Timings, TokenDelta, Usage


def test_the_deltas_of_a_stream_add_up_to_the_answer() -> None:
    usage, timings = Usage(3, 2), Timings(1, 2, 3, 4)
    deltas = [
        TokenDelta("a", (1,), (-0.5,), top_log_probs=(((1, -0.5),),)),
        TokenDelta("b", (2,), (-0.25,), FinishReason.STOP, "x", usage, timings),
        TokenDelta(),
    ]
    whole = join(deltas, "id", 0.5, 1.0)
    assert (whole.text, whole.token_ids, whole.log_probs) == ("ab", (1, 2), (-0.5, -0.25))
    assert (whole.finish_reason, whole.stop_reason, whole.usage, whole.timings) == (
        FinishReason.STOP,
        "x",
        usage,
        timings,
    )
    assert whole.top_log_probs == (((1, -0.5),),)
    assert (whole.request_id, whole.ttft_s, whole.total_s) == ("id", 0.5, 1.0)


def test_a_stream_that_was_left_has_no_finish_reason() -> None:
    assert join([TokenDelta("a", (1,))], "id").finish_reason is None
    assert join([], "id").text == ""

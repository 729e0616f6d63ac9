from python_backends.ensemble.stream_state import StreamEvent, StreamState
from python_backends.ensemble.token_increment import TokenIncrement, TopLogProbs


def test_what_an_engine_does_not_send_is_empty():
    increment = TokenIncrement(StreamState(1, 2, StreamEvent.RUNNING), [5])
    assert (increment.log_probs, increment.top_log_probs, increment.options, increment.error) == ((), (), "", "")
    assert (increment.cum_log_prob, increment.num_output_tokens) == (0.0, 0)


def test_an_entry_unpacks_to_ids_and_their_log_probabilities():
    ids, log_probs = TopLogProbs([5, 7], [-0.5, -2.5])
    assert (ids, log_probs) == ([5, 7], [-0.5, -2.5])

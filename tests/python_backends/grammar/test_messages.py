"""What the compiler's process sends back."""

import pickle

from python_backends.grammar.messages import costly


def test_a_refusal_for_its_cost_is_checked_again_after_a_minute_also_in_another_process():
    refused = pickle.loads(pickle.dumps(costly("must not hold up other requests")))
    assert str(refused) == "guided_decoding_guide: must not hold up other requests" and refused.retry_after_s == 60.0

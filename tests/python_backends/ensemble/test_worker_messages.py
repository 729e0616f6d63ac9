import pickle

import numpy as np

from contract.generation import SamplingParams
from python_backends.ensemble.token_increment import StreamEvent, TopLogProbs
from python_backends.ensemble.worker_messages import AddSequence, EndSequence, Failed, Ready, StepOutput, StepReport


def test_every_message_survives_the_pipe_between_engine_and_worker():
    output = StepOutput(1, [5], [-0.5], StreamEvent.STOP, [TopLogProbs([5], [-0.5])])
    for message in (EndSequence(1), Ready(), Failed("reason"), StepReport(1, 2, [output], 3, 4, 5, 0.5)):
        assert pickle.loads(pickle.dumps(message)) == message
    command = AddSequence(1, np.arange(3), 4, SamplingParams(seed=7), frozenset({2}), 0.9)
    copy = pickle.loads(pickle.dumps(command))
    assert copy.input_ids.tolist() == [0, 1, 2]
    assert (copy.id, copy.max_tokens, copy.sampling) == (1, 4, SamplingParams(seed=7))
    assert (copy.stop_ids, copy.priority) == ({2}, 0.9)

import queue

import numpy as np
import pytest

from benchmarks.mock_engine import MockLink
from contract.generation import SamplingParams
from python_backends.ensemble.token_increment import StreamEvent
from python_backends.ensemble.worker_messages import AddSequence, EndSequence


class Listener:
    def __init__(self):
        self.reports = queue.Queue()

    def on_ready(self):
        pass

    def on_report(self, report):
        self.reports.put(report)


def outputs(listener, count):
    found = []
    while len(found) < count:
        found += listener.reports.get(timeout=60).outputs
    return found


@pytest.mark.parametrize("step_ms", ["0", "1"])
def test_it_repeats_the_prompt_up_to_the_limit_and_ends_what_is_to_end(monkeypatch, step_ms):
    monkeypatch.setenv("MOCK_STEP_MS", step_ms)
    listener = Listener()
    link = MockLink(listener)
    link.send(AddSequence(1, np.array([5, 6]), 3, SamplingParams(), frozenset()))
    found = outputs(listener, 3)
    assert [one.token_ids for one in found] == [[6], [5], [5]]
    assert [one.event for one in found] == [StreamEvent.RUNNING, StreamEvent.RUNNING, StreamEvent.LENGTH]
    link.send(AddSequence(2, np.array([5]), 10**9, SamplingParams(), frozenset()))
    link.send(EndSequence(2))
    while outputs(listener, 1)[-1].event is not StreamEvent.CANCELLED:
        pass

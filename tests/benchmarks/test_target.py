"""What a target records of an answer."""

import pytest
from tritonclient.grpc import service_pb2

from benchmarks.prompts import Prompts
from benchmarks.record import Record
from benchmarks.target import DeltaTarget, EngineTarget, EnsembleTarget, infer
from benchmarks.workload import PlannedRequest
from contract.errors import Unavailable
from contract.generation import FinishReason, TokenDelta, Usage


class Scripted(DeltaTarget):
    """Answers every request with the same deltas."""

    def __init__(self, *deltas):
        self.deltas, self.closed = deltas, 0

    async def open(self, request):
        try:
            for delta in self.deltas:
                yield delta
        finally:
            self.closed += 1


async def test_messages_usage_and_end_are_recorded():
    end = TokenDelta("", (), (), FinishReason.LENGTH, usage=Usage(5, 3))
    target, record = Scripted(TokenDelta("a", (1, 2)), TokenDelta("b", (3,)), end), Record(0, 0.0)
    await target.send(PlannedRequest(0, "x", 3), record)
    assert [count for _, count in record.messages] == [2, 1] and record.ok
    assert (record.input_tokens, record.usage_tokens, record.finish_reason) == (5, 3, "length")


async def test_a_request_that_is_to_be_cancelled_is_closed_after_its_tokens():
    target, record = Scripted(*(TokenDelta("a", (n,)) for n in range(9))), Record(0, 0.0)
    await target.send(PlannedRequest(0, "x", 9, cancel_after_tokens=4), record)
    assert record.cancelled and record.tokens == 4 and target.closed == 1


async def test_the_ensemble_is_asked_for_greedy_answers_of_fixed_length(replica):
    server = replica()
    target, record = EnsembleTarget(server.url), Record(0, 0.0)
    try:
        await target.send(PlannedRequest(0, "a b", 5), record)
    finally:
        await target.close()
    assert record.tokens == 5 and record.finish_reason == "length"


async def test_a_server_that_is_not_there_is_an_error_and_not_retried():
    target = EnsembleTarget("127.0.0.1:9")
    try:
        with pytest.raises(Unavailable):
            await target.send(PlannedRequest(0, "a", 1), Record(0, 0.0))
    finally:
        await target.close()


def test_a_request_has_one_tensor_for_each_input():
    message = service_pb2.ModelInferRequest.FromString(infer([5, 6, 7], 9, True))
    raws = dict(zip((one.name for one in message.inputs), message.raw_input_contents, strict=True))
    assert message.model_name == "engine" and list(message.inputs[0].shape) == [1, 3]
    assert raws["input_ids"] == b"\5\0\0\0\6\0\0\0\7\0\0\0" and raws["request_output_len"] == b"\t\0\0\0"


def test_a_prompt_needs_a_tokenizer():
    with pytest.raises(AssertionError):
        EngineTarget("127.0.0.1:1", Prompts()).open(PlannedRequest(0, "hello", 3))

"""What the messages of one response mean, without a network."""

from __future__ import annotations

import struct

import grpc
import pytest
from grpc.aio import Metadata
from tritonclient.grpc import service_pb2

from clients.wire.response_reader import ResponseReader
from contract.errors import DeadlineExceeded, EngineFailed, Overloaded, TridentError, Unavailable, to_text
from contract.generation import FinishReason, GenerationRequest

REQUEST = GenerationRequest(text_input="x", timeout_s=30.0)


def message(
    text: str = "", reason: str = "", error: str = "", *, ids: tuple[int, ...] = (), final: bool = False
) -> bytes:
    response = service_pb2.ModelStreamInferResponse()
    inner = response.infer_response
    inner.model_name = "ensemble"
    inner.parameters["triton_final_response"].bool_param = final
    for name, value in (("text_output", text), ("finish_reason", reason), ("error_message", error)):
        inner.outputs.add(name=name, datatype="BYTES", shape=[1, 1])
        inner.raw_output_contents.append(struct.pack("<I", len(value.encode())) + value.encode())
    inner.outputs.add(name="output_ids", datatype="INT32", shape=[1, len(ids)])
    inner.raw_output_contents.append(struct.pack(f"<{len(ids)}i", *ids))
    return response.SerializeToString()


def test_deltas_are_counted_up_to_the_one_that_ends_the_response():
    reader = ResponseReader(REQUEST)
    assert (reader.started, reader.complete, reader.ended) == (False, False, False)
    assert reader.read(message("a", ids=(1,))).text == "a"
    assert (reader.started, reader.complete, reader.tokens) == (True, False, 1)
    last = reader.read(message("b", "stop", ids=(2, 3), final=True))
    assert reader.complete and reader.last is last and last.finish_reason is FinishReason.STOP and reader.tokens == 3


def test_an_error_behind_text_is_deferred_and_one_without_text_is_raised():
    error = to_text(EngineFailed("boom"))
    reader = ResponseReader(REQUEST)
    delta = reader.read(message("a", "error", error, ids=(1,), final=True))
    assert (delta.text, delta.finish_reason) == ("a", None)
    assert isinstance(reader.deferred_error, EngineFailed) and reader.ended and not reader.complete
    with pytest.raises(EngineFailed, match="boom"):
        ResponseReader(REQUEST).read(message("", "error", error, final=True))


def test_an_error_message_and_unreadable_bytes_are_raised():
    response = service_pb2.ModelStreamInferResponse(error_message=to_text(Overloaded("full")))
    with pytest.raises(Overloaded, match="full"):
        ResponseReader(REQUEST).read(response.SerializeToString())
    with pytest.raises(TridentError):
        ResponseReader(REQUEST).read(b"\xff\xff")


def test_a_final_message_without_outputs_completes_the_response():
    response = service_pb2.ModelStreamInferResponse()
    response.infer_response.parameters["triton_final_response"].bool_param = True
    reader = ResponseReader(REQUEST)
    assert reader.read(response.SerializeToString()) is None and reader.complete and not reader.started


def test_the_errors_of_an_early_end_name_the_position():
    reader = ResponseReader(REQUEST)
    assert isinstance(reader.deadline_error(), DeadlineExceeded)
    assert str(reader.truncation_error("h:1")) == "h:1 closed the stream without a response, with no final response"
    reader.read(message("a", ids=(1, 2)))
    assert "after 2 tokens" in str(reader.deadline_error())
    error = reader.truncation_error("h:1")
    assert isinstance(error, Unavailable) and "after 2 tokens" in str(error)


def test_a_connection_that_breaks_names_the_server_and_the_position():
    broken = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), "Socket closed")
    reader = ResponseReader(REQUEST)
    assert str(reader.status_error(broken, "h:1")[0]) == "Socket closed"  # as it stands: a server may say so itself
    reader.read(message("a", ids=(1, 2)))
    error, _ = reader.status_error(broken, "h:1")
    assert isinstance(error, Unavailable) and str(error) == "h:1 ended the call after 2 tokens: Socket closed"

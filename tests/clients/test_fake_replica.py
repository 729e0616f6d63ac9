"""The scripted replica, held to what unchanged tritonclient sees of a real server."""

from __future__ import annotations

import asyncio
import gc
import queue
import socket
import urllib.parse
import warnings

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio

from contract.errors import InvalidArgument
from tests.fakes.replica import FakeReplica, Script, echo


def inputs(prompt: str, max_tokens: int) -> list[tritonclient.grpc.InferInput]:
    text = tritonclient.grpc.InferInput("text_input", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([[prompt.encode()]], dtype=object))
    limit = tritonclient.grpc.InferInput("max_tokens", [1, 1], "INT32")
    limit.set_data_from_numpy(np.array([[max_tokens]], dtype=np.int32))
    return [text, limit]


def read(result: tritonclient.grpc.InferResult) -> tuple[str, bool]:
    final = result.get_response().parameters["triton_final_response"].bool_param
    text = result.as_numpy("text_output")
    return ("" if text is None else text.flat[0].decode()), final


async def test_the_asyncio_client_streams_from_it_without_asking_for_empty_responses(replica, playlist) -> None:
    playlist.set(Script(("a", "b"), empty_final=True))

    async def requests():
        yield {"model_name": "ensemble", "inputs": inputs("x", 2), "request_id": "1"}

    got = []
    async with tritonclient.grpc.aio.InferenceServerClient(replica.url) as client:
        async for result, error in client.stream_infer(requests()):
            assert error is None
            got.append(read(result))
    assert got == [("a", False), ("b", True)]


def test_the_blocking_client_streams_from_it_and_sees_refusals(threaded_replica, playlist) -> None:
    playlist.set(Script(("a", "b"), empty_final=True), Script(refuse=InvalidArgument("max_tokens", "got 0")))
    arrived: queue.Queue = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(threaded_replica.url) as client:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("ensemble")
        assert {tensor.name for tensor in client.get_model_metadata("ensemble").outputs} >= {"text_output"}
        assert client.get_model_config("ensemble").config.model_transaction_policy.decoupled
        client.start_stream(lambda result, error: arrived.put((result, error)))
        for n in range(2):
            client.async_stream_infer("ensemble", inputs("x", 2), request_id=str(n), enable_empty_final_response=True)
        texts = [read(arrived.get(timeout=60)[0]) for _ in range(3)]
        _, error = arrived.get(timeout=60)
        client.stop_stream()
    assert texts == [("a", False), ("b", False), ("", True)]
    assert "in ensemble 'ensemble', InvalidArgument: max_tokens: got 0" in str(error)


def test_a_decoupled_model_refuses_the_unary_call_as_triton_does(threaded_replica) -> None:
    with tritonclient.grpc.InferenceServerClient(threaded_replica.url) as client:
        with pytest.raises(tritonclient.grpc.InferenceServerException, match="decoupled transaction policy"):
            client.infer("ensemble", inputs("x", 1))


async def test_a_connection_taken_while_it_stops_is_closed() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ResourceWarning)
        for passes in range(8):
            async with FakeReplica(echo) as replica:
                url = urllib.parse.urlparse(replica.metrics_url)
                with socket.create_connection((url.hostname, url.port)):
                    for _ in range(passes):
                        await asyncio.sleep(0)
        gc.collect()
    assert [str(warning.message) for warning in told] == []

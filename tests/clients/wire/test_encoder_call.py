"""The encoder's unary call, held to tritonclient's own protobufs."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from clients.wire import encoder_call
from clients.wire.encoder_call import Rows
from contract.errors import EngineFailed, InvalidArgument


def parsed(rows):
    return service_pb2.ModelInferRequest.FromString(encoder_call.call(rows, "r").payload)


def test_texts_pairs_and_options_are_one_row_each():
    request = parsed(Rows(("a", "bé"), ("c", ""), prompt_name="query", dimensions=8, truncate=-1))
    assert (request.model_name, request.id) == ("encoder", "r")
    shapes = {tensor.name: (tensor.datatype, list(tensor.shape)) for tensor in request.inputs}
    assert shapes == {
        "text_input": ("BYTES", [2, 1]),
        "text_pair": ("BYTES", [2, 1]),
        "prompt_name": ("BYTES", [2, 1]),
        "dimensions": ("INT32", [2, 1]),
        "truncate_prompt_tokens": ("INT32", [2, 1]),
    }
    assert request.raw_input_contents[0] == b"\1\0\0\0a\3\0\0\0b\xc3\xa9"
    assert request.raw_input_contents[4] == struct.pack("<2i", -1, -1)


def test_rows_of_ids_are_filled_to_the_longest():
    request = parsed(Rows(ids=((1, 2, 3), (4,))))
    assert [(tensor.name, list(tensor.shape)) for tensor in request.inputs] == [("input_ids", [2, 3])]
    assert np.frombuffer(request.raw_input_contents[0], "<i4").tolist() == [1, 2, 3, 4, -1, -1]


def test_text_that_is_none_is_refused_by_its_row():
    with pytest.raises(InvalidArgument, match=r"text_input\[1\]: must be encodable"):
        encoder_call.call(Rows(("a", "\ud800")), "r")


@pytest.mark.parametrize(("name", "columns"), [("embedding", 4), ("score", 1)])
def test_a_response_is_read_with_its_dimensions_and_tokens(name, columns):
    values = np.arange(2 * columns, dtype="<f4").reshape(2, columns)
    response = service_pb2.ModelInferResponse(model_name="encoder")
    for output, array in ((name, values), ("num_input_tokens", np.array([[3], [4]], "<i4"))):
        response.outputs.add(name=output, shape=array.shape)
        response.raw_output_contents.append(array.tobytes())
    found = encoder_call.read(response.SerializeToString())
    assert (found.values, found.dimensions, found.tokens) == (values.tobytes(), columns, 7)


@pytest.mark.parametrize("data", [b"", b"\xff", service_pb2.ModelInferResponse(id="x").SerializeToString()])
def test_what_is_no_response_is_the_servers_failure(data):
    with pytest.raises(EngineFailed, match="unreadable"):
        encoder_call.read(data)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12), rows=st.integers(1, 8), size=st.integers(1, 99))
def test_every_row_of_ids_is_in_one_call_within_the_bounds_as_it_is_filled_up(lengths, rows, size):
    ids = tuple((1,) * length for length in lengths)
    slices = encoder_call.batches(Rows(ids=ids), rows, size)
    assert [row for one in slices for row in ids[one]] == list(ids)
    for one in slices:
        sent = parsed(Rows(ids=ids[one])).raw_input_contents[0]
        assert len(ids[one]) == 1 or len(sent) <= size


@given(texts=st.lists(st.text(max_size=9), min_size=1, max_size=12), rows=st.integers(1, 8), size=st.integers(1, 40))
def test_every_row_is_in_one_batch_within_the_bounds(texts, rows, size):
    slices = encoder_call.batches(Rows(tuple(texts)), rows, size)
    assert [text for one in slices for text in texts[one]] == texts
    for one in slices:
        part = texts[one]
        assert 1 <= len(part) <= rows
        assert len(part) == 1 or sum(len(text.encode(errors="replace")) for text in part) <= size

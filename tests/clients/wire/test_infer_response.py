"""Responses by hand, as tritonclient's protobufs write them."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from clients.wire import infer_request, infer_response, protobuf
from contract import packed_delta, tensors
from contract.generation import FinishReason, Timings, TokenDelta, Usage
from tests.fakes.replica import Script, content, final_only, refusal

INT32 = st.integers(-(2**31), 2**31 - 1)
OUTPUTS = {tensor.name: tensor for tensor in tensors.ENSEMBLE_OUTPUTS}


def tensor_bytes(datatype: str, values: list) -> bytes:
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(value.encode())) + value.encode() for value in values)
    return struct.pack(f"<{len(values)}{infer_request.STRUCT_CODES[datatype]}", *values)


def response(values: dict[str, list], final: bool = False, request_id: str = "r") -> bytes:
    """A streamed response with the official protobufs, outputs in the dictionary's order."""
    answer = service_pb2.ModelStreamInferResponse()
    inner = answer.infer_response
    inner.model_name, inner.model_version, inner.id = "ensemble", "1", request_id
    inner.parameters["triton_final_response"].bool_param = final
    inner.parameters["sequence_id"].int64_param = 7
    for name, elements in values.items():
        datatype = OUTPUTS[name].datatype if name in OUTPUTS else "FP32"
        inner.outputs.add(name=name, datatype=datatype, shape=[1, len(elements)])
        inner.raw_output_contents.append(tensor_bytes(datatype, elements))
    return answer.SerializeToString()


@given(
    texts=st.lists(st.text(), min_size=1, max_size=8),
    ids=st.lists(st.lists(INT32, max_size=9), min_size=8, max_size=8),
    seed=st.integers(0, 99),
    sparse=st.booleans(),
)
def test_responses_are_read_by_name_whatever_their_order_and_length(texts, ids, seed, sparse) -> None:
    decoders, order = [infer_response.ResponseDecoder(), infer_response.ResponseDecoder()], random.Random(seed)
    for n, text in enumerate(texts):
        values = {"text_output": [text], "output_ids": ids[n], "unknown_tensor": [1.0, 2.0]}
        if not sparse:
            values |= {"finish_reason": [""], "num_input_tokens": [3], "num_output_tokens": [n], "error_message": [""]}
            values |= {"output_log_probs": [-0.5] * len(ids[n])}
        names = list(values)
        if order.random() < 0.3:
            order.shuffle(names)
        data = response({name: values[name] for name in names}, request_id="r" * order.randrange(200))
        delta, final, error = order.choice(decoders).decode(data)
        log_probs = () if sparse else (-0.5,) * len(ids[n])
        assert (delta, final, error) == (TokenDelta(text, tuple(ids[n]), log_probs), False, "")


def test_counts_on_both_sides_of_the_reason_are_no_echoed_prompt():
    values = {"num_input_tokens": [3], "finish_reason": [""], "num_output_tokens": [1], "text_output": ["a"]}
    for names in (list(values), ["text_output", "num_input_tokens", "finish_reason", "num_output_tokens"]):
        for _ in range(2):  # from the second on, the order is known
            delta, _, _ = infer_response.ResponseDecoder().decode(response({name: values[name] for name in names}))
            assert delta == TokenDelta("a", (), ())


def test_the_first_response_of_an_echo_tells_how_many_ids_are_the_prompts() -> None:
    values = {"text_output": ["ab"], "output_ids": [4, 5, 6], "num_input_tokens": [2]}
    delta, _, _ = infer_response.ResponseDecoder().decode(response(values))
    assert delta == TokenDelta("ab", (4, 5, 6), prompt_ids=2)


def test_the_last_response_carries_usage_timings_and_both_reasons() -> None:
    last = {
        "text_output": ["bye"],
        "output_ids": [9],
        "finish_reason": ["stop"],
        "stop_reason": ["\n\n"],
        "num_input_tokens": [5],
        "num_output_tokens": [7],
        "num_cached_tokens": [4],
        "arrival_time_ns": [1],
        "first_scheduled_time_ns": [2],
        "first_token_time_ns": [2**40],
        "last_token_time_ns": [2**41],
    }
    decoder = infer_response.ResponseDecoder()
    expected = TokenDelta("bye", (9,), (), FinishReason.STOP, "\n\n", Usage(5, 7, 4), Timings(1, 2, 2**40, 2**41), "")
    for _ in range(2):  # the second time from the remembered header
        assert decoder.decode(response(last, final=True)) == (expected, True, "")


def test_the_likeliest_ids_come_as_pairs_for_each_new_id() -> None:
    values = {
        "text_output": ["ab"],
        "top_log_probs": [-0.5, -1.0, -0.25, -2.0],
        "output_ids": [7, 9],
        "top_log_probs_ids": [7, 8, 9, 7],
    }
    decoder = infer_response.ResponseDecoder()
    pairs = (((7, -0.5), (8, -1.0)), ((9, -0.25), (7, -2.0)))
    for _ in range(2):
        assert decoder.decode(response(values))[0] == TokenDelta("ab", (7, 9), top_log_probs=pairs)
    ended, _, _ = decoder.decode(response(values | {"finish_reason": ["stop"]}, final=True))
    assert ended == TokenDelta("ab", (7, 9), (), FinishReason.STOP, top_log_probs=pairs)
    with pytest.raises(protobuf.WireError, match="top_log_probs: 4 ids and 4 values do not fit 3 new tokens"):
        decoder.decode(response(values | {"output_ids": [1, 2, 3]}))
    # An echoed prompt's ids need not have any.
    echoed, _, _ = decoder.decode(response(values | {"output_ids": [1, 7, 9], "output_log_probs": [-0.5, -0.25]}))
    assert (echoed.token_ids, echoed.top_log_probs) == ((1, 7, 9), pairs)


def test_one_stream_may_mix_full_sparse_and_coalesced_responses() -> None:
    decoder = infer_response.ResponseDecoder()
    script, order = Script(("a",) * 5), list(range(len(tensors.ENSEMBLE_OUTPUTS)))
    sparse = Script(("a",) * 5, sparse=True)
    for _ in range(3):
        for text, one in (("a", script), ("a", sparse)):
            got, final, _ = decoder.decode(content("id", "ensemble", 0, (text,), None, one, order, 3, False))
            assert (got.text, got.token_ids, final) == ("a", (0,), False)
        got, _, _ = decoder.decode(content("id", "ensemble", 3, ("b", "c"), None, sparse, order, 3, False))
        assert (got.text, got.token_ids) == ("bc", (3, 4))


def test_what_one_stream_has_taught_is_known_to_all(monkeypatch) -> None:
    values = {"output_ids": [5], "finish_reason": [""], "num_input_tokens": [1], "num_output_tokens": [1]}
    infer_response.ResponseDecoder().decode(response({"text_output": ["a"], **values}, request_id="first"))
    monkeypatch.delattr(infer_response.ResponseDecoder, "_decode_whole")
    for request_id in ("second", "", "x" * 300):
        decoder = infer_response.ResponseDecoder()
        for reason in ("", "stop"):
            data = response({"text_output": ["b"], **values, "finish_reason": [reason]}, request_id=request_id)
            delta, final, error = decoder.decode(data)
            assert (delta.text, delta.token_ids, final, error) == ("b", (5,), False, "")
            assert delta.finish_reason == (FinishReason.STOP if reason else None)


@given(texts=st.lists(st.text(max_size=9), min_size=1, max_size=9), ids=st.lists(INT32, max_size=4), data=st.data())
def test_a_known_layout_reads_what_the_outputs_one_by_one_say(texts, ids, data) -> None:
    names = data.draw(st.permutations(["text_output", "output_ids", "unknown", "output_log_probs", "top_log_probs"]))
    values = {"output_ids": ids, "unknown": [0.5], "output_log_probs": [-0.5] * len(ids), "top_log_probs": []}
    values = {name: values.get(name, []) for name in names} | {"finish_reason": [""]}
    decoder = infer_response.ResponseDecoder()
    for text in texts:
        values["text_output"] = [text]
        found = [decoder.decode(response(values)) for _ in range(3)]
        assert found == [(TokenDelta(text, tuple(ids), (-0.5,) * len(ids)), False, "")] * 3
    # Of the same sizes in all, but in other outputs, or an end.
    values |= {"output_ids": [*ids, 7], "unknown": [], "output_log_probs": [-0.5] * len(ids)}
    assert decoder.decode(response(values))[0] == TokenDelta(text, (*ids, 7), (-0.5,) * len(ids))
    ended, _, _ = decoder.decode(response(values | {"finish_reason": ["stop"]}))
    assert (ended.text, ended.finish_reason) == (text, FinishReason.STOP)


def test_the_outputs_of_a_known_layout_are_not_read_one_by_one(monkeypatch) -> None:
    decoder, values = infer_response.ResponseDecoder(), {name: [] for name in OUTPUTS}
    values |= {"finish_reason": [""], "cum_log_probs": [0.5], "num_output_tokens": [1]}
    for text in ("ab", "cd", "ef"):
        found, _, _ = decoder.decode(response(values | {"text_output": [text], "output_ids": [ord(text[0])]}))
        assert found == TokenDelta(text, (ord(text[0]),))
        if text == "cd":
            monkeypatch.delattr(infer_response, "_read_raws")


def test_a_header_that_begins_with_another_is_known_as_well(monkeypatch) -> None:
    short, decoder = {"text_output": ["a"], "output_ids": [5]}, infer_response.ResponseDecoder()
    both = (response(short), response({**short, "output_log_probs": [-0.5]}))
    expected = [decoder.decode(data) for data in both]
    monkeypatch.delattr(infer_response.ResponseDecoder, "_decode_whole")
    for _ in range(2):
        assert [decoder.decode(data) for data in both] == expected


def test_the_empty_final_response_and_a_refusal_carry_no_delta() -> None:
    decoder = infer_response.ResponseDecoder()
    assert decoder.decode(final_only("id", "ensemble")) == (None, True, "")
    assert decoder.decode(refusal("no such thing", "id")) == (None, True, "no such thing")


@given(st.binary(max_size=200))
def test_garbage_is_refused_as_such_and_nothing_else(data: bytes) -> None:
    try:
        infer_response.ResponseDecoder().decode(data)
    except protobuf.WireError:
        pass


@given(st.data())
def test_a_damaged_response_never_passes_for_another_kind_of_failure(data) -> None:
    good = response({"text_output": ["hello"], "output_ids": [1, 2], "finish_reason": [""]})
    decoder = infer_response.ResponseDecoder()
    decoder.decode(good)
    cut = data.draw(st.integers(0, len(good)))
    flipped = bytearray(good[:cut])
    for at in data.draw(st.lists(st.integers(0, max(0, cut - 1)), max_size=3)):
        if cut:
            flipped[at] ^= data.draw(st.integers(1, 255))
    try:
        decoder.decode(bytes(flipped))
    except protobuf.WireError:
        pass


def test_an_unknown_finish_reason_is_named_with_those_that_are_allowed() -> None:
    with pytest.raises(protobuf.WireError, match="finish_reason: must be one of stop, length,.*, got 'bored'"):
        infer_response.ResponseDecoder().decode(response({"text_output": [""], "finish_reason": ["bored"]}))


def test_an_output_of_another_type_is_named() -> None:
    answer = service_pb2.ModelStreamInferResponse()
    answer.infer_response.outputs.add(name="text_output", datatype="INT32", shape=[1, 1])
    answer.infer_response.raw_output_contents.append(b"\1\0\0\0")
    with pytest.raises(protobuf.WireError, match="text_output: the server sends it as INT32"):
        infer_response.ResponseDecoder().decode(answer.SerializeToString())


@pytest.mark.parametrize(
    ("outputs", "problem"),
    [
        ([("output_ids", "FP32", b"\0\0\0\0")], "output_ids: the server sends it as FP32"),
        ([("output_ids", "BOOL", b"\1")], "output_ids: the server sends it as BOOL"),
        ([("output_log_probs", "INT32", b"\0\0\0\0")], "output_log_probs: the server sends it as INT32"),
        ([("output_ids", "INT32", b"\1\2\3")], "3 bytes are no numbers of 4"),
        ([("text_output", "BYTES", b"\xff\0\0\0a")], "5 bytes do not hold a text that says it ends after 259"),
        ([("text_output", "BYTES", b"\1\0")], "2 bytes do not hold a text"),
        ([("text_output", "BYTES", b"\1\0\0\0a"), ("output_ids", "INT32", None)], "2 outputs, and contents for 1"),
    ],
)
def test_contents_that_are_not_what_their_header_says_are_refused(outputs: list[tuple], problem: str) -> None:
    answer = service_pb2.ModelStreamInferResponse()
    for name, datatype, raw in outputs:
        answer.infer_response.outputs.add(name=name, datatype=datatype, shape=[1, 1])
        if raw is not None:
            answer.infer_response.raw_output_contents.append(raw)
    with pytest.raises(protobuf.WireError, match=problem):
        infer_response.ResponseDecoder().decode(answer.SerializeToString())


@pytest.mark.parametrize("name", ["num_input_tokens", "num_output_tokens", "num_cached_tokens"])
def test_fewer_tokens_than_none_are_no_usage(name: str) -> None:
    counts = {"num_input_tokens": [3], "num_output_tokens": [1], "num_cached_tokens": [0]} | {name: [-1]}
    data = response({"text_output": ["a"], "finish_reason": ["stop"], **counts}, final=True)
    with pytest.raises(protobuf.WireError, match="usage"):
        infer_response.ResponseDecoder().decode(data)


def test_a_packed_delta_is_read_whole_however_often_its_header_was_seen() -> None:
    decoder = infer_response.ResponseDecoder()
    running, last = TokenDelta("é" * 99, (1, 2)), TokenDelta("!", (3,), (-0.5,), FinishReason.STOP, "3", Usage(1, 2))
    for delta in (running, running, last, TokenDelta()):
        answer = service_pb2.ModelStreamInferResponse()
        answer.infer_response.model_name = packed_delta.MODEL
        raw = packed_delta.pack(delta)
        answer.infer_response.outputs.add(name=packed_delta.OUTPUT, datatype="UINT8", shape=[1, len(raw)])
        answer.infer_response.raw_output_contents.append(raw)
        assert decoder.decode(answer.SerializeToString()) == (delta, False, "")
    answer.infer_response.raw_output_contents[0] = b"\1\0\0\0" + raw[4:]
    with pytest.raises(protobuf.WireError):
        decoder.decode(answer.SerializeToString())

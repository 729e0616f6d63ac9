import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import errors
from contract.errors import BY_NAME, InvalidArgument, Overloaded, from_text, make
from python_backends import triton_io
from python_backends.triton_io import Inputs, decode_text


def inputs(triton, **tensors):
    return Inputs(triton.incoming(tensors))


def test_absent_inputs_give_their_default(triton):
    nothing = inputs(triton)
    assert nothing.array("x") is None
    assert nothing.scalar("x", 5) == 5 and nothing.scalar("x") is None
    assert nothing.text("x") is None
    assert nothing.texts("x") == nothing.values("x") == []


def test_a_scalar_is_a_plain_python_value_of_its_kind(triton):
    found = inputs(
        triton,
        i=("INT32", [[5]]),
        f=("FP32", [[0.5]]),
        b=("BOOL", [[True]]),
        u=("UINT64", [[2**64 - 1]]),
        t=("BYTES", [["é"]]),
    )
    assert [found.scalar(name) for name in "ifbut"] == [5, 0.5, True, 2**64 - 1, "é".encode()]
    assert [type(found.scalar(name)) for name in "ifbut"] == [int, float, bool, int, bytes]


@pytest.mark.parametrize("values", [[[]], [[1, 2]]])
def test_a_scalar_that_is_none_or_several_is_refused_by_name(triton, values):
    with pytest.raises(InvalidArgument, match=f"max_tokens: must hold exactly one value, got {len(values[0])}"):
        inputs(triton, max_tokens=("INT32", values)).scalar("max_tokens")


def test_vectors_are_flat_lists(triton):
    found = inputs(triton, ids=("INT32", [[1, 2]]), words=("BYTES", [["a", "é"]]), weights=("FP32", [[0.5]]))
    assert (found.values("ids"), found.texts("words"), found.values("weights")) == ([1, 2], ["a", "é"], [0.5])


@given(st.text().filter(lambda text: "\0" not in text))
def test_text_in_utf_8_is_read_as_it_is(text):
    assert decode_text("text_input", text.encode()) == text


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (b"ab\xff", "must be UTF-8, got an invalid sequence at byte 2"),
        ("é".encode()[:1], "must be UTF-8, got an invalid sequence at byte 0"),
        (b"\xed\xa0\x80", "must be UTF-8, got an invalid sequence at byte 0"),  # half a surrogate pair
        (b"ab\0c", "must hold no NUL character, got one at position 2"),
    ],
)
def test_what_is_no_text_is_refused_by_name_and_place(value, problem):
    with pytest.raises(InvalidArgument, match=f"text_input: {problem}"):
        decode_text("text_input", value)


def test_parameters_are_a_table_also_when_there_are_none(triton):
    assert triton_io.parameters(triton.incoming({})) == {}
    assert triton_io.parameters(triton.incoming({}, parameters={"x-tenant": "a", "n": 1})) == {"x-tenant": "a", "n": 1}


@pytest.mark.parametrize("name", BY_NAME)
def test_every_error_is_a_triton_error_that_clients_read_back(triton, name):
    error = make(BY_NAME[name], "max_tokens: must be 1, got 0")
    answer = triton_io.error_response(error)
    assert answer.has_error() and not answer.output_tensors()
    read = from_text(f"in ensemble 'ensemble', {answer.error().message()}")
    assert type(read) is type(error) and str(read) == str(error)


def test_half_a_character_that_an_error_quotes_is_escaped(triton):
    answer = triton_io.error_response(InvalidArgument("messages", "must have a known role, got \ud800é"))
    assert answer.error().message() == "InvalidArgument: messages: must have a known role, got \\ud800é"


def test_the_nearest_code_of_triton_goes_with_it(triton):
    codes = {
        error: triton_io.error_response(error).error().code()
        for error in (InvalidArgument("a", "b"), Overloaded("full"))
    }
    assert list(codes.values()) == [triton.TritonError.INVALID_ARG, triton.TritonError.UNAVAILABLE]
    assert triton_io.error_response(errors.EngineFailed("x")).error().code() == triton.TritonError.INTERNAL


def test_responses_carry_their_arrays_by_name(triton):
    answer = triton_io.response({"text": triton_io.texts("a", "é"), "ids": triton_io.row([1, 2])})
    found = {tensor.name(): (tensor.triton_dtype(), tensor.shape()) for tensor in answer.output_tensors()}
    assert found == {"text": ("BYTES", [1, 2]), "ids": ("INT32", [1, 2])}


def test_a_row_is_int32_unless_told_otherwise():
    assert triton_io.row([]).shape == (1, 0) and triton_io.row([3]).dtype == np.int32
    assert triton_io.row([2**63], np.uint64).dtype == np.uint64


@pytest.mark.parametrize("kind", ["counter", "gauge", "histogram"])
def test_metric_families_are_of_the_kind_they_are_called(triton, kind):
    family = triton_io.metric_family("name", "What it is", kind)
    assert family.kind == getattr(triton.MetricFamily, kind.upper())


def test_a_stop_request_is_tensorrt_llms_and_reads_its_answer_to_the_end(triton):
    seen, read = [], []

    def engine(request):
        seen.append(request)
        for number in range(2):
            read.append(number)
            yield triton.InferenceResponse([])

    triton.served_models["engine"] = engine
    triton_io.stop_request("engine", "id-7")
    [request] = seen
    assert request.request_id() == "id-7" and read == [0, 1]
    found = Inputs(request)
    assert (
        found.scalar("stop") is True and found.scalar("input_lengths") == 1 and found.scalar("request_output_len") == 1
    )


def test_log_lines_go_to_the_servers_log(triton):
    triton_io.log_error("broken")
    assert triton.log == [("error", "broken")]

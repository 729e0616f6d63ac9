import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import InvalidArgument, PromptTooLong
from contract.tensors import ENSEMBLE_INPUTS
from python_backends.adapters import NO_ADAPTERS, AdapterIds
from python_backends.ensemble.request_tensors import StreamOptions
from python_backends.limits import EngineLimits
from python_backends.tokenizer.request import parse
from python_backends.triton_io import Inputs

LIMITS = EngineLimits(vocab_size=100, max_seq_len=200, max_batch_size=4, kv_cache_blocks=32)
DATATYPES = {tensor.name: tensor.datatype for tensor in ENSEMBLE_INPUTS}


@pytest.fixture
def ask(triton):
    """``ask(name=value, …)``: the parsed request of these inputs of the ensemble."""

    def ask(parameters=None, adapters=NO_ADAPTERS, **values):
        tensors = {
            name: (DATATYPES[name], [value if isinstance(value, list) else [value]]) for name, value in values.items()
        }
        return parse(Inputs(triton.incoming(tensors)), parameters or {}, LIMITS, 1000, adapters)

    return ask


def test_a_prompt_alone_takes_the_models_own_for_everything_else(ask):
    prompt = ask(text_input="Hé")
    assert (prompt.prompt, prompt.messages, prompt.max_tokens, prompt.end_id) == ("Hé", None, None, None)
    assert (prompt.seed, prompt.min_tokens, prompt.stop_token_ids, prompt.bad_words) == (None, None, (), ())
    assert prompt.options == StreamOptions()


def test_what_the_detokenizer_is_to_know_rides_along(ask):
    prompt = ask(
        text_input="a",
        stream=True,
        exclude_input_in_output=False,
        stop_words=["x", "y", "x", ""],
        stop_token_ids=[5, 7, 5],
        include_stop_in_output=True,
        skip_special_tokens=False,
        min_tokens=3,
        return_perf_metrics=True,
    )
    assert prompt.options == StreamOptions(
        stream=True,
        echo=True,
        stop=("x", "y"),
        include_stop=True,
        hidden_ids=(5, 7),
        skip_special_tokens=False,
        min_tokens=3,
        timings=True,
    )
    assert prompt.stop_token_ids == (5, 7)


def test_the_empty_lists_that_the_usual_clients_send_mean_none(ask):
    prompt = ask(text_input="a", stop_words=[""], bad_words=[""], embedding_bias_words=[], embedding_bias_weights=[])
    assert (prompt.options.stop, prompt.bad_words, prompt.bias_words) == ((), (), ())


@pytest.mark.parametrize(("name", "older"), [("seed", "random_seed"), ("min_tokens", "min_length")])
def test_an_older_name_means_the_same(ask, name, older):
    assert getattr(ask(text_input="a", **{older: 7}), name) == 7
    assert getattr(ask(text_input="a", **{name: 7, older: 7}), name) == 7
    with pytest.raises(InvalidArgument, match=f"{older}: must equal {name}, its other name, got 8 and 7"):
        ask(text_input="a", **{name: 7, older: 8})


def test_end_tokens_are_the_models_own_one_of_the_callers_or_none(ask):
    assert ask(text_input="a", end_id=99).end_id == 99
    assert ask(text_input="a", end_id=-1).end_id == -1
    assert ask(text_input="a", ignore_eos=True).end_id == -1
    assert ask(text_input="a", ignore_eos=False).end_id is None


@pytest.mark.parametrize(
    ("inputs", "field", "problem"),
    [
        ({}, "text_input", "must be sent if neither messages nor input_ids is, got none"),
        ({"text_input": "a", "messages": "[]"}, "messages", "must be left out if text_input is sent"),
        ({"text_input": "a", "tools": "[]"}, "tools", "must be left out without messages"),
        ({"text_input": "a", "chat_template_kwargs": "{}"}, "chat_template_kwargs", "must be left out without"),
        ({"input_ids": [1], "messages": "[]"}, "input_ids", "must be left out if messages is sent"),
        ({"text_input": "a", "input_ids": [1]}, "input_ids", "must be left out if text_input is sent"),
        ({"input_ids": []}, "input_ids", "must hold at least one token id, got none"),
        ({"input_ids": [0, 100]}, "input_ids", "must hold ids from 0 to 99, got 100"),
        ({"input_ids": [-1]}, "input_ids", "must hold ids from 0 to 99, got -1"),
        ({"continue_ids": [3, 100]}, "continue_ids", "must hold ids from 0 to 99, got 100"),
        ({"continue_ids": [3, 4], "stop_token_ids": [4]}, "continue_ids", "must hold none of stop_token_ids, got 4"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be 1 or more, or -1 for what fits, got 0"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "must be 1 or more, or -1 for what fits, got -2"),
        ({"text_input": ""}, "text_input", "must have at least one character"),
        ({"text_input": b"\xff"}, "text_input", "must be UTF-8, got an invalid sequence at byte 0"),
        ({"text_input": "a\0"}, "text_input", "must hold no NUL character, got one at position 1"),
        ({"text_input": ["a", "b"]}, "text_input", "must hold exactly one value, got 2"),
        ({"max_tokens": 0}, "max_tokens", "must be 1 to 200, or 0 with exclude_input_in_output=false, got 0"),
        ({"max_tokens": -1}, "max_tokens", "must be 1 to 200, or 0 with exclude_input_in_output=false, got -1"),
        ({"max_tokens": 2**31 - 1}, "max_tokens", "must be 1 to 200, got 2147483647"),
        ({"max_tokens": []}, "max_tokens", "must hold exactly one value, got 0"),
        ({"min_tokens": -1}, "min_tokens", "must be 0 to 200, got -1"),
        ({"min_length": 201}, "min_length", "must be 0 to 200, got 201"),
        ({"end_id": 100}, "end_id", "must be 0 to 99, or -1 for none, got 100"),
        ({"end_id": -2}, "end_id", "must be 0 to 99, or -1 for none, got -2"),
        ({"stop_token_ids": [1, 100]}, "stop_token_ids", "must hold ids from 0 to 99, got 100"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "must hold ids from 0 to 99, got -1"),
        ({"stop_token_ids": [1] * 101}, "stop_token_ids", "must hold at most 100 ids, got 101"),
        ({"stop_words": ["x"] * 10_000}, "stop_words", "must hold at most 100 strings, got 10000"),
        ({"stop_words": ["x" * 1001]}, "stop_words", "must hold strings of at most 1000 characters, got 1001"),
        ({"stop_words": [f"{n}" * 500 for n in range(9)]}, "stop_words", "must have at most 4096 characters, got 4500"),
        ({"stop_words": [b"\xff"]}, "stop_words", "must be UTF-8"),
        ({"embedding_bias_words": ["a"]}, "embedding_bias_weights", "must have a value per word, got 0 for 1"),
        (
            {"embedding_bias_words": ["a"], "embedding_bias_weights": [float("nan")]},
            "embedding_bias_weights",
            "must be finite numbers, got",
        ),
    ],
)
def test_what_is_not_allowed_is_refused_by_name(ask, inputs, field, problem):
    prompt = {} if {"text_input", "messages", "input_ids"} & inputs.keys() or not inputs else {"text_input": "a"}
    with pytest.raises(InvalidArgument, match=problem) as caught:
        ask(**prompt, **inputs)
    assert caught.value.field == field


def test_ids_over_the_servers_bound_are_refused_before_they_are_read(ask):
    assert ask(input_ids=[7] * 250).input_ids.tolist() == [7] * 250
    with pytest.raises(PromptTooLong, match="input_ids: must hold at most 250 ids, got 251"):
        ask(input_ids=[-1] * 251)


@pytest.mark.parametrize("name", ["text_input", "messages", "tools", "chat_template_kwargs"])
def test_a_prompt_over_the_servers_bound_is_refused_in_bytes(ask, name):
    chat = {} if name in ("text_input", "messages") else {"messages": "[]"}
    ask(**chat, **{name: "é" * 500})
    with pytest.raises(PromptTooLong, match=f"{name}: must have at most 1000 bytes, got 1002"):
        ask(**chat, **{name: "é" * 501})


@pytest.mark.parametrize(
    "name", ["x-tenant", "X-Request-Id", "traceparent", "triton_enable_empty_final_response", "sequence_id"]
)
def test_headers_and_the_servers_own_parameters_are_let_by(ask, name):
    assert ask({name: "1"}, text_input="a").prompt == "a"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_tokens", "must be sent as an input tensor"),
        ("temprature", "did you mean the input temperature?"),
        ("frobnicate", "see the inputs of the model ensemble"),
        ("", "see the inputs of the model ensemble"),
    ],
)
def test_an_unknown_parameter_is_refused_with_a_hint(ask, name, hint):
    with pytest.raises(InvalidArgument) as caught:
        ask({name: 1}, text_input="a")
    assert caught.value.field == name and hint in str(caught.value)


values = {
    "BYTES": st.lists(st.binary(max_size=8), max_size=3),
    "INT32": st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3),
    "UINT64": st.lists(st.integers(0, 2**64 - 1), max_size=2),
    "FP32": st.lists(st.floats(width=32), max_size=2),
    "BOOL": st.lists(st.booleans(), max_size=2),
}


@given(st.fixed_dictionaries({}, optional={name: values[datatype].map(list) for name, datatype in DATATYPES.items()}))
def test_any_inputs_at_all_are_parsed_or_refused_by_the_name_of_one_of_them(triton_types, inputs):
    request = triton_types.incoming({name: (DATATYPES[name], [value]) for name, value in inputs.items()})
    try:
        prompt = parse(Inputs(request), {}, LIMITS, max_prompt_bytes=1000)
    except InvalidArgument as refusal:
        assert refusal.field in DATATYPES
    else:
        assert sum(sent is not None for sent in (prompt.prompt, prompt.messages, prompt.input_ids)) == 1


def test_an_adapter_is_named_by_number_or_by_name(ask):
    two = AdapterIds(("poet", "lawyer"), 100, 1)
    given = [
        {},
        {"lora_task_id": 2},
        {"lora_name": "lawyer"},
        {"lora_name": "poet", "lora_task_id": 1},
        {"lora_name": ""},
    ]
    assert [ask(text_input="a", adapters=two, **one).lora_task_id for one in given] == [None, 2, 2, 1, None]
    assert ask(text_input="a", lora_task_id=7).lora_task_id == 7  # an engine of TensorRT-LLM's own adapters
    for one, says in (
        ({"lora_task_id": 3}, "lora_task_id: must be 0 .none. or one of 1 .poet., 2 .lawyer., got 3"),
        ({"lora_name": "x"}, "lora_name: must be left out or one of poet, lawyer, got 'x'"),
        (
            {"lora_name": "poet", "lora_task_id": 2},
            "lora_task_id: must be 1 or left out beside lora_name 'poet', got 2",
        ),
    ):
        with pytest.raises(InvalidArgument, match=says):
            ask(text_input="a", adapters=two, **one)
    with pytest.raises(InvalidArgument, match="lora_name: must be left out: this engine has none"):
        ask(text_input="a", lora_name="poet")

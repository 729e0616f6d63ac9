import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import InvalidArgument, PromptTooLong
from contract.generation import Guide, SamplingParams
from contract.tensors import ENGINE_INPUTS
from python_backends.adapters import NO_ADAPTERS, AdapterIds
from python_backends.cpu_engine.request import parse
from python_backends.ensemble.request_tensors import StreamOptions, encode_word_list
from python_backends.limits import EngineLimits
from python_backends.triton_io import Inputs

LIMITS = EngineLimits(vocab_size=100, max_seq_len=200, max_batch_size=4, kv_cache_blocks=32)
DATATYPES = {tensor.name: tensor.datatype for tensor in ENGINE_INPUTS}
NOW_NS = 1_000_000_000
FLOAT32 = {name: float(np.float32(name)) for name in ("0.7", "0.9", "1.1")}


@pytest.fixture
def ask(triton):
    """``ask(name=value, …)``: the parsed request of these tensors, behind a prompt of three ids unless one is given."""

    def ask(*, request_id="", timeout_ns=0, adapters=NO_ADAPTERS, **values):
        values = {"input_ids": [1, 2, 3], "input_lengths": 3, "request_output_len": 10} | values
        tensors = {
            name: (
                DATATYPES[name],
                value if name.endswith("_list") else [value if isinstance(value, list) else [value]],
            )
            for name, value in values.items()
            if value is not None
        }
        return parse(Inputs(triton.incoming(tensors)), LIMITS, request_id, timeout_ns, NOW_NS, adapters=adapters)

    return ask


def test_the_least_a_request_can_say(ask):
    request = ask()
    assert request.input_ids.tolist() == [1, 2, 3] and request.input_ids.dtype == np.int64
    assert request.max_tokens == 10
    assert request.sampling == SamplingParams(top_k=1)  # greedy, as TensorRT-LLM's default is
    assert (request.stop_ids, request.stop_sequences) == (frozenset(), ())
    assert (request.streaming, request.echo, request.stream_options) == (False, False, "")
    assert (request.arrival_ns, request.tokenized_ns, request.deadline_ns) == (NOW_NS, NOW_NS, None)


def test_every_sampling_value_arrives_under_its_name(ask):
    sampling = ask(
        temperature=0.7,
        runtime_top_k=5,
        runtime_top_p=0.9,
        min_p=0.5,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        seed=2**64 - 1,
        min_tokens=3,
        return_log_probs=True,
        num_top_log_probs=20,
    ).sampling
    assert sampling == SamplingParams(
        temperature=FLOAT32["0.7"],
        top_k=5,
        top_p=FLOAT32["0.9"],
        min_p=0.5,
        repetition_penalty=FLOAT32["1.1"],
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        seed=2**64 - 1,
        min_tokens=3,
        log_probs=True,
        top_log_probs=20,
    )


@pytest.mark.parametrize(
    ("sent", "greedy"),
    [
        ({}, True),
        ({"seed": 1, "repetition_penalty": 1.5}, True),
        ({"temperature": 1.0}, False),
        ({"temperature": 0.0}, True),
        ({"runtime_top_p": 0.9}, False),
        ({"min_p": 0.1}, False),
        ({"temperature": 1.0, "runtime_top_k": 1}, True),
        ({"runtime_top_k": 0}, False),
        ({"runtime_top_p": 0.0}, True),
        ({"min_p": 0.0}, True),
        ({"runtime_top_p": 0.0, "min_p": 0.0, "seed": 1}, True),
        ({"runtime_top_p": 0.0, "min_p": 0.1}, False),
        ({"runtime_top_p": 0.0, "temperature": 1.0}, False),
    ],
)
def test_sampling_is_greedy_until_a_value_that_asks_for_chance_is_sent(ask, sent, greedy):
    assert ask(**sent).sampling.greedy is greedy


@pytest.mark.parametrize(
    ("name", "neutral"),
    [
        ("runtime_top_p", 0.0),
        ("beam_width", 1),
        ("num_return_sequences", 1),
        ("len_penalty", 1.0),
        ("return_context_logits", False),
        ("return_generation_logits", False),
        ("lora_task_id", 0),
        ("bad_words_list", np.zeros((1, 2, 0), np.int32)),
        ("stop_words_list", np.zeros((1, 2, 0), np.int32)),
        ("stop_words_list", [[[0], [-1]]]),
        ("embedding_bias", []),
        ("guided_decoding_guide_type", ""),
        ("guided_decoding_guide", ""),
        ("pad_id", 99),
        ("return_perf_metrics", True),
        ("return_num_input_tokens", True),
        ("return_num_output_tokens", True),
    ],
)
def test_what_the_usual_tensorrt_llm_clients_always_send_is_accepted(ask, name, neutral):
    plain = ask()
    request = ask(**{name: neutral})
    assert request.stop_ids == plain.stop_ids and request.stop_sequences == plain.stop_sequences
    assert request.sampling in (plain.sampling, SamplingParams())


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("beam_width", 2, "beam search: not supported by this engine yet"),
        ("num_return_sequences", 3, "several sequences for one request: not supported by this engine yet"),
        ("len_penalty", 0.5, "a length penalty .*: not supported by this engine yet"),
        ("len_penalty", float("nan"), "must be 1.0, got nan"),
        ("return_context_logits", True, "must be False, got True; logits of the prompt: not supported"),
        ("return_generation_logits", True, "logits of the output: not supported"),
        ("lora_task_id", 7, "must be left out or 0: this engine has no LoRA adapters, got 7"),
        ("bad_words_list", encode_word_list([(5,)]), "must be left out; bad words: not supported"),
        ("embedding_bias", [0.0] * 100, "must be left out; a bias on token ids: not supported"),
        ("guided_decoding_guide_type", "yaml", "must be one of json, json_schema, regex, "),
    ],
)
def test_what_this_engine_cannot_honour_is_refused_by_name(ask, name, value, problem):
    with pytest.raises(InvalidArgument, match=problem) as caught:
        ask(**{name: value})
    assert caught.value.field == {"len_penalty": "len_penalty (length_penalty)"}.get(name, name)


CONTINUED = {"input_ids": [1, 2, 3, 4, 5], "input_lengths": 5, "num_continued_tokens": 2, "end_id": 7}


def test_a_continued_sequence_has_what_is_left_of_its_limits(ask):
    request = ask(**CONTINUED, min_tokens=6, seed=11, temperature=1.0, return_log_probs=True)
    assert (request.prompt_ids.tolist(), request.continued_ids.tolist()) == ([1, 2, 3], [4, 5])
    assert request.worker_ids.tolist() == [1, 2, 3, 4, 5] and not request.replay
    assert (request.max_tokens, request.sampling.min_tokens, request.ended_by) == (8, 4, -1)
    assert request.sampling.seed not in (None, 11) and request.sampling.prompt_log_probs
    again = ask(**CONTINUED, seed=11, temperature=1.0)
    assert again.sampling.seed == request.sampling.seed and not again.sampling.prompt_log_probs
    echoed = ask(**CONTINUED, exclude_input_in_output=False)
    assert not echoed.echo and echoed.sampling.seed is None


def test_a_continued_sequence_that_had_ended_generates_nothing(ask):
    assert ask(**CONTINUED, request_output_len=2).max_tokens == 0
    for more in ({}, {"presence_penalty": 1.0}):
        ended = ask(**CONTINUED | {"end_id": 5}, **more)
        assert (ended.max_tokens, ended.ended_by, ended.replay) == (0, 5, False)


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_that_count_generated_ids_have_them_generated_again(ask, name):
    for more in ({}, {"temperature": 1.0, "seed": 3}):
        request = ask(**CONTINUED, **{name: 0.5}, min_tokens=6, **more)
        assert request.replay and request.worker_ids.tolist() == [1, 2, 3]
        assert (request.max_tokens, request.sampling.min_tokens) == (10, 6)
        assert request.sampling.seed == more.get("seed")
    assert not ask(**CONTINUED, repetition_penalty=1.5).replay
    assert ask(**CONTINUED, guided_decoding_guide_type="json").replay
    with pytest.raises(InvalidArgument, match=f"{name}: must be 0 with continue_ids, unless"):
        ask(**CONTINUED, **{name: 0.5}, temperature=1.0)


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        (
            {"num_continued_tokens": -1},
            "num_continued_tokens: must be 0 to request_output_len, and less than input_ids",
        ),
        ({"num_continued_tokens": 5}, "num_continued_tokens: must be 0 to request_output_len"),
        ({"request_output_len": 1}, "num_continued_tokens: must be 0 to request_output_len"),
        ({"end_id": 4}, "continue_ids: must hold an id that ends the output only last, got 4"),
        (
            {"guided_decoding_guide_type": "json", "temperature": 1.0},
            "guided_decoding_guide: must be left out with continue_ids, unless the request is greedy or has a seed",
        ),
        (
            {"exclude_input_in_output": False, "return_log_probs": True, "return_prompt_log_probs": True},
            "return_prompt_log_probs: must be false with continue_ids",
        ),
    ],
)
def test_what_could_not_go_on_as_if_it_had_not_been_cut_is_refused(ask, inputs, problem):
    with pytest.raises(InvalidArgument, match=problem):
        ask(**CONTINUED | inputs)


def test_a_prompt_alone_and_its_log_probabilities_need_an_echo(ask):
    echo = {"exclude_input_in_output": False, "request_output_len": 0}
    assert ask(**echo).max_tokens == 0
    sampling = ask(**echo, return_prompt_log_probs=True, num_top_log_probs=3).sampling
    assert (sampling.prompt_log_probs, sampling.top_log_probs) == (True, 3)
    assert ask(**echo, input_ids=[1] * 200, input_lengths=200).input_ids.size == 200  # no room for a token is needed
    for inputs in ({"return_log_probs": True}, {"exclude_input_in_output": False}):
        with pytest.raises(InvalidArgument, match="return_prompt_log_probs: must be false without"):
            ask(return_prompt_log_probs=True, **inputs)
    with pytest.raises(InvalidArgument, match="request_output_len: must be 1 or more, or 0 with exclude"):
        ask(request_output_len=0)


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "values", "allowed"),
    [
        ("temperature", [-0.1, 101.0, NAN, INFINITY], r"a finite number in \[0, 100\]"),
        ("runtime_top_p", [-0.1, 1.1, NAN, -INFINITY], r"a finite number in \[0, 1\], where 0 means not set"),
        ("runtime_top_k", [-1, -(2**31)], "an integer from 0 to 2147483647"),
        ("min_p", [-0.1, 1.0, NAN], r"a finite number in \[0, 1\)"),
        ("repetition_penalty", [0.0, -1.0, 101.0, NAN, INFINITY], r"a finite number in \(0, 100\]"),
        ("presence_penalty", [-2.1, 2.1, NAN], r"a finite number in \[-2, 2\]"),
        ("frequency_penalty", [-2.1, 2.1, INFINITY], r"a finite number in \[-2, 2\]"),
        ("min_tokens", [-1], "an integer from 0"),
        ("num_top_log_probs", [-1, 21], "an integer from 0 to 20"),
        ("request_output_len", [0, -1, -(2**31)], "1 or more"),
        ("end_id", [-2, 100, 2**31 - 1], "0 to 99, or -1 for none"),
        ("input_lengths", [0, 2, 4, -1], "3, the number of input_ids"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_range(ask, name, values, allowed):
    for value in values:
        with pytest.raises(InvalidArgument, match=f"must be {allowed}.*, got ") as caught:
            ask(**{name: value})
        assert name in caught.value.field


def test_an_error_names_both_tensors_where_the_ensemble_renames_one(ask):
    with pytest.raises(InvalidArgument, match=r"^runtime_top_k \(top_k\): must be an integer"):
        ask(runtime_top_k=-1)
    with pytest.raises(InvalidArgument, match=r"^runtime_top_p \(top_p\): must be a finite number"):
        ask(runtime_top_p=2.0)


@pytest.mark.parametrize("ids", [[], None])
def test_a_prompt_without_ids_is_refused(ask, ids):
    with pytest.raises(InvalidArgument, match="input_ids: must hold at least one token id"):
        ask(input_ids=ids, input_lengths=0)


@pytest.mark.parametrize("wrong", [-1, 100, 2**31 - 1, -(2**31)])
def test_an_id_out_of_the_vocabulary_is_refused_with_its_value(ask, wrong):
    with pytest.raises(InvalidArgument, match=f"input_ids: must hold ids from 0 to 99, got {wrong}"):
        ask(input_ids=[1, wrong, 2])


def test_a_request_that_does_not_fit_is_refused_with_the_numbers(ask):
    with pytest.raises(
        PromptTooLong, match="request_output_len: must be at most 197 with a prompt of 3 tokens"
    ) as caught:
        ask(request_output_len=198)
    assert caught.value.field == "request_output_len" and "at most 197" in str(caught.value)
    with pytest.raises(PromptTooLong, match="input_ids: must have at most 199 tokens"):
        ask(input_ids=[1] * 200, input_lengths=200)


@pytest.mark.parametrize("name", ["input_lengths", "request_output_len"])
def test_what_every_request_must_hold_is_asked_for_by_name(ask, name):
    with pytest.raises(InvalidArgument, match=f"{name}: ") as caught:
        ask(**{name: None})
    assert caught.value.field == name


def test_stop_words_of_one_id_and_of_several_are_told_apart(ask):
    request = ask(end_id=7, stop_words_list=encode_word_list([(5,), (1, 2), (6,), (1, 2), (3, 4, 5)]))
    assert request.stop_ids == {5, 6, 7}
    assert request.stop_sequences == ((1, 2), (3, 4, 5))


def test_a_stop_word_out_of_the_vocabulary_is_refused(ask):
    with pytest.raises(InvalidArgument, match="stop_words_list: must hold ids from 0 to 99, got 100"):
        ask(stop_words_list=encode_word_list([(1, 100)]))


def test_more_stop_words_than_the_step_loop_can_look_for_are_refused(ask):
    ask(stop_words_list=encode_word_list([(token, token) for token in range(100)] + [(1,)] * 50))
    with pytest.raises(InvalidArgument, match="stop_words_list: must hold at most 256 words, got 10000"):
        ask(stop_words_list=encode_word_list([(1, 2)] * 10_000))
    with pytest.raises(InvalidArgument, match="stop_words_list: must hold words of at most 200 ids, got one of 5000"):
        ask(stop_words_list=encode_word_list([(1,) * 5000]))


def test_streaming_echo_and_options_are_handed_on(ask):
    request = ask(request_id="r", streaming=True, exclude_input_in_output=False, stream_options='{"stop": ["é"]}')
    assert (request.request_id, request.streaming, request.echo) == ("r", True, True)
    assert request.stream_options == '{"stop": ["é"]}'


def test_the_deadline_counts_from_arrival_at_the_tokenizer(ask):
    request = ask(timeout_ns=5_000, tokenizer_time_ns=[100, 200])
    assert (request.arrival_ns, request.tokenized_ns, request.deadline_ns) == (100, 200, 5_100)
    assert ask(timeout_ns=5_000).deadline_ns == NOW_NS + 5_000


@pytest.mark.parametrize("times", [[-1, 5], [200, 100], [0, NOW_NS + 1], [2**62, 2**63 - 1], [5], []])
def test_times_that_cannot_be_are_refused(ask, times):
    with pytest.raises(InvalidArgument, match="tokenizer_time_ns: must be two instants .*, got") as caught:
        ask(tokenizer_time_ns=times)
    assert caught.value.field == "tokenizer_time_ns"


values = {
    "BYTES": st.lists(st.binary(max_size=4), max_size=2),
    "INT32": st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-1, 100), max_size=4),
    "INT64": st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
    "UINT64": st.lists(st.integers(0, 2**64 - 1), max_size=2),
    "FP32": st.lists(st.floats(width=32), max_size=2),
    "BOOL": st.lists(st.booleans(), max_size=2),
}


@given(
    st.fixed_dictionaries({}, optional={name: values[datatype] for name, datatype in DATATYPES.items()}), st.booleans()
)
def test_any_tensors_at_all_are_parsed_or_refused_by_name(triton_types, tensors, whole):
    if whole:
        tensors = {"input_ids": [1, 2, 3], "input_lengths": [3], "request_output_len": [10]} | {
            name: value for name, value in list(tensors.items())[:2] if name not in ("input_ids", "input_lengths")
        }
    request = triton_types.incoming({name: (DATATYPES[name], [value]) for name, value in tensors.items()})
    try:
        parsed = parse(Inputs(request), LIMITS, "", 0, NOW_NS)
    except InvalidArgument as refusal:
        assert any(name in refusal.field for name in DATATYPES)
    else:
        assert parsed.input_ids.size + parsed.max_tokens <= LIMITS.max_seq_len


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        ({"guided_decoding_guide": "{}"}, "guided_decoding_guide_type: must be sent with guided_decoding_guide"),
        ({"guided_decoding_guide_type": "regex"}, "guided_decoding_guide: must be sent with the type regex"),
        ({"guided_decoding_guide_type": "json", "guided_decoding_guide": "{}"}, "guided_decoding_guide: must be left"),
        ({"guided_decoding_guide_type": "json", "min_tokens": 1, "end_id": 2}, "min_tokens: must be 0 with a guide"),
        ({"guided_decoding_guide_type": "json"}, "ignore_eos: must be false with a guide"),
    ],
)
def test_a_guide_needs_its_text_and_an_end(ask, sent, problem):
    with pytest.raises(InvalidArgument, match=problem):
        ask(**sent)


def test_a_guide_is_read(ask):
    asked = ask(guided_decoding_guide_type="regex", guided_decoding_guide="[0-9]+", end_id=2)
    assert asked.guide == Guide("regex", "[0-9]+")


TWO = AdapterIds(("poet", "lawyer"), 100, 1)


def test_only_the_worker_sees_which_adapter_a_prompt_uses(ask):
    request = ask(lora_task_id=2, adapters=TWO)
    assert (request.adapter, request.input_ids.tolist()) == ("lawyer", [1, 2, 3])
    assert request.worker_ids.tolist() == [101, 2, 3]
    assert ask(lora_task_id=0, adapters=TWO).worker_ids.tolist() == ask(adapters=TWO).worker_ids.tolist() == [1, 2, 3]


def test_a_penalty_on_the_prompt_wants_one_that_begins_as_most_do(ask):
    assert ask(lora_task_id=1, repetition_penalty=1.1, adapters=TWO).adapter == "poet"
    unusual = {"input_ids": [2, 2, 3], "repetition_penalty": 1.1}
    assert ask(**unusual, adapters=TWO).adapter == ""
    with pytest.raises(InvalidArgument, match="repetition_penalty: must be 1 under a LoRA adapter .* id 1, .* got 1.1"):
        ask(lora_task_id=1, **unusual, adapters=TWO)
    with pytest.raises(InvalidArgument, match="lora_task_id: must be 0 .none. or one of 1 .poet., 2 .lawyer., got 3"):
        ask(lora_task_id=3, adapters=TWO)


@pytest.mark.parametrize(
    ("sent", "once"),
    [
        ({"streaming": True, "stream_options": StreamOptions(stop=("x",)).to_json()}, True),
        ({"streaming": True, "stream_options": StreamOptions(stream=True).to_json()}, False),
        ({"streaming": True}, False),
        ({"streaming": False}, True),
    ],
)
def test_a_request_answers_once_also_where_ids_are_sent_to_the_detokenizer_as_they_come(ask, sent, once):
    assert ask(**sent).answers_once is once

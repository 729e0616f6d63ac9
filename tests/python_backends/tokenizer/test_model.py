import dataclasses
import json
import shutil
import time
import uuid
from concurrent.futures import Future

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from contract import manifest as manifests
from contract.backend_settings import Settings
from contract.errors import InvalidArgument, PromptTooLong, Unavailable, from_text
from contract.tensors import ENGINE_INPUTS, ENSEMBLE_INPUTS
from python_backends.ensemble.metadata_channel import MetadataListener
from python_backends.ensemble.request_tensors import StreamOptions, decode_word_list
from python_backends.tokenizer.model import TritonPythonModel
from tests.fakes import tokenizer_families

DATATYPES = {tensor.name: tensor.datatype for tensor in ENSEMBLE_INPUTS}
END = 256


@pytest.fixture
def model(triton, tiny_engine, monkeypatch):
    monkeypatch.setenv("TRIDENT_ENGINE_DIR", str(tiny_engine))
    model = TritonPythonModel()
    model.initialize({})
    return model


@pytest.fixture
def library(tiny_engine):
    return tokenizers.Tokenizer.from_file(str(tiny_engine / "tokenizer.json"))


def request(triton, request_id="", parameters=None, **values):
    tensors = {
        name: (DATATYPES[name], [value if isinstance(value, list) else [value]]) for name, value in values.items()
    }
    return triton.incoming(tensors, request_id=request_id, parameters=parameters)


@pytest.fixture
def ask(triton, model, answer_of):
    """``ask(**inputs)``: the engine's tensors for one request, or the error in the answer."""

    def ask(**inputs):
        [answer] = model.execute([request(triton, **inputs)])
        return from_text(answer.error().message()) if answer.has_error() else answer_of("tokenizer", answer)

    return ask


def test_a_prompt_becomes_the_engines_tensors(ask, library):
    found = ask(text_input="Hello, 世界", max_tokens=7)
    ids = library.encode("Hello, 世界").ids
    assert found["input_ids"].tolist() == [ids]
    assert found["input_lengths"].tolist() == [[len(ids)]]
    assert found["max_tokens"].tolist() == [[7]]
    assert found["end_id"].tolist() == [[END]]
    assert found["stop_words_list"].shape == (1, 2, 0)
    assert found.keys() <= {tensor.name for tensor in ENGINE_INPUTS} | {"max_tokens"}
    for absent in ("seed", "min_tokens", "bad_words_list", "embedding_bias"):
        assert absent not in found  # the engine's own default is taken


def test_while_the_server_drains_every_request_is_refused_as_unavailable(triton, tiny_engine, monkeypatch, tmp_path):
    drain_file = tmp_path / "draining"
    monkeypatch.setenv("TRIDENT_ENGINE_DIR", str(tiny_engine))
    monkeypatch.setenv("TRIDENT_DRAIN_FILE", str(drain_file))
    model = TritonPythonModel()
    model.initialize({})

    def errors_of_a_batch():
        answers = model.execute([request(triton, text_input="Hello"), request(triton, text_input="")])
        return [from_text(answer.error().message()) if answer.has_error() else None for answer in answers]

    served, wrong = errors_of_a_batch()
    assert served is None and isinstance(wrong, InvalidArgument)
    drain_file.touch()
    refused = errors_of_a_batch()
    assert [str(error) for error in refused] == ["the server is shutting down"] * 2
    assert {type(error) for error in refused} == {Unavailable}
    drain_file.unlink()
    assert errors_of_a_batch()[0] is None


def test_times_are_those_of_arrival_and_of_the_ids(ask):
    arrived, ready = ask(text_input="a")["tokenizer_time_ns"][0].tolist()
    assert 0 < arrived <= ready


def test_a_chat_is_rendered_and_gets_no_second_set_of_special_tokens(
    triton, tiny_engine, tmp_path, monkeypatch, library
):
    """With a tokenizer that puts a begin token in front of a text, as Llama's does."""
    begin = library.token_to_id("<|begin|>")
    library.post_processor = tokenizers.processors.TemplateProcessing(
        "<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    folder = tmp_path / "engine"
    shutil.copytree(tiny_engine, folder)
    library.save(str(folder / "tokenizer.json"))
    monkeypatch.setenv("TRIDENT_ENGINE_DIR", str(folder))
    model = TritonPythonModel()
    model.initialize({})
    chat = json.dumps([{"role": "user", "content": "Hi"}])
    answers = model.execute([request(triton, text_input="Hi"), request(triton, messages=chat)])
    text, chat = (answer.output_tensors()[0].as_numpy()[0].tolist() for answer in answers)
    assert text == [begin, *library.encode("Hi", add_special_tokens=False).ids]
    assert chat == library.encode("<|begin|>user\nHi<|end|><|begin|>assistant", add_special_tokens=False).ids


def test_ids_are_the_prompt_as_they_are(ask, library):
    ids = library.encode("Hello, 世界").ids
    found = ask(input_ids=ids, max_tokens=7)
    assert found["input_ids"].tolist() == [ids] and found["input_lengths"].tolist() == [[len(ids)]]


def test_ids_text_and_truncated_prompts_of_one_batch_keep_their_places(triton, model, library):
    answers = model.execute(
        [
            request(triton, text_input="first"),
            request(triton, input_ids=[5, 6, 7], truncate_prompt_tokens=2),
            request(triton, text_input="third one", truncate_prompt_tokens=1),
            request(triton, messages='[{"role": "user", "content": "fourth"}]', truncate_prompt_tokens=3),
            request(triton, text_input="fifth"),
        ]
    )
    first, second, third, fourth, fifth = (answer.output_tensors()[0].as_numpy()[0].tolist() for answer in answers)
    assert (first, second) == (library.encode("first").ids, [6, 7])
    assert third == library.encode("third one").ids[-1:]
    assert len(fourth) == 3 and fourth == library.encode("<|end|><|begin|>assistant").ids[-3:]
    assert fifth == library.encode("fifth").ids


@given(st.lists(st.integers(0, 255), min_size=1, max_size=600), st.integers(-1, 600), st.none() | st.integers(1, 60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_truncated_prompt_is_its_end_and_minus_one_keeps_what_fits(ask, tiny_engine, ids, kept, max_tokens):
    limit = manifests.load(tiny_engine).max_seq_len
    assume(kept)
    output = {} if max_tokens is None else {"max_tokens": max_tokens}
    found = ask(input_ids=ids, truncate_prompt_tokens=kept, **output)
    fits = limit - (min(128, limit // 2) if max_tokens is None else max_tokens)
    expected = ids[-(kept if kept > 0 else max(1, fits)) :]
    if kept == -1 and fits > 0:
        assert not isinstance(found, Exception)
    if isinstance(found, Exception):
        assert len(expected) + (max_tokens or 1) > limit and isinstance(found, PromptTooLong)
    else:
        assert found["input_ids"].tolist() == [expected]
        assert len(expected) + found["max_tokens"].item() <= limit


def test_continued_ids_follow_the_prompt_and_the_detokenizer_learns_what_was_sent(ask, library):
    ids = library.encode("Hello").ids
    for echo, replayed in ((False, (5, 6)), (True, (*ids, 5, 6))):
        found = ask(text_input="Hello", continue_ids=[5, 6], max_tokens=9, exclude_input_in_output=not echo)
        assert found["input_ids"].tolist() == [[*ids, 5, 6]] and found["input_lengths"].item() == len(ids) + 2
        assert (found["num_continued_tokens"].item(), found["max_tokens"].item()) == (2, 9)
        assert StreamOptions.from_json(found["stream_options"].item().decode()).replayed_ids == replayed
    assert "num_continued_tokens" not in ask(text_input="Hello", continue_ids=[])
    assert "continue_ids: must hold at most max_tokens, 1, got 2" in str(
        ask(text_input="a", continue_ids=[5, 6], max_tokens=1)
    )


def test_a_long_prompt_is_refused_unless_it_is_truncated(ask, tiny_engine):
    text = "word " * 4 * manifests.load(tiny_engine).max_seq_len
    assert isinstance(ask(text_input=text), PromptTooLong)
    assert ask(text_input=text, truncate_prompt_tokens=5)["input_lengths"].tolist() == [[5]]


@pytest.fixture
def beyond(tiny_engine, tmp_path, monkeypatch, triton):
    """``beyond(kind)``: a tokenizer with a token for which its engine, of that kind, has no row, and how to ask it."""
    models = []

    def make(kind):
        manifest = dataclasses.replace(manifests.load(tiny_engine), kind=kind)
        library = tokenizers.Tokenizer.from_file(str(tiny_engine / "tokenizer.json"))
        while library.token_to_id("<extra>") is None:
            at_limit = library.get_vocab_size() == manifest.vocab_size
            library.add_tokens(["<extra>" if at_limit else f"<filler{library.get_vocab_size()}>"])
        assert library.token_to_id("<extra>") == manifest.vocab_size
        folder = tmp_path / "engine"
        shutil.copytree(tiny_engine, folder)
        manifest.save(folder)
        library.save(str(folder / "tokenizer.json"))
        monkeypatch.setenv("TRIDENT_ENGINE_DIR", str(folder))
        monkeypatch.setenv("TRIDENT_CONTROL_SOCKET", f"trident-test-{uuid.uuid4()}")
        model = TritonPythonModel()
        model.initialize({})
        models.append(model)
        known = manifest.vocab_size - 1
        return lambda **inputs: (from_text(model.execute([request(triton, **inputs)])[0].error().message()), known)

    yield make
    for model in models:
        if model._metadata_channel is not None:
            model._metadata_channel.close()


def test_a_token_beyond_the_models_vocabulary_is_refused_under_the_name_it_was_sent_by(beyond):
    ask = beyond("cpu")
    chat = json.dumps([{"role": "user", "content": "say <extra>"}])
    for name, inputs in (("text_input", {"text_input": "a<extra>b"}), ("messages", {"messages": chat})):
        refusal, known = ask(**inputs)
        assert str(refusal) == (f"{name}: must hold tokens 0 to {known}, got '<extra>', which is token {known + 1}")


def test_a_word_beyond_the_models_vocabulary_is_refused_under_its_own_name(beyond):
    ask = beyond("trtllm")
    for words in ({"bad_words": ["<extra>"]}, {"embedding_bias_words": ["<extra>"], "embedding_bias_weights": [1.0]}):
        refusal, _ = ask(request_id="r1", text_input="a", **words)
        assert str(refusal).startswith(f"{next(iter(words))}: must hold tokens 0 to ")


def test_a_chat_that_is_too_long_is_refused_under_its_own_name(ask):
    chat = json.dumps([{"role": "user", "content": "a b c d " * 200}])
    assert str(ask(messages=chat)).startswith("messages: ")
    assert str(ask(messages=chat, tools="[]")).startswith("tools: ")


def test_without_max_tokens_there_is_room_for_128_or_for_what_is_left(ask):
    assert ask(text_input="a")["max_tokens"].tolist() == [[128]]
    assert ask(text_input="a" * 200)["max_tokens"].tolist() == [[56]]


def test_what_was_sent_is_handed_on(ask):
    found = ask(text_input="a", seed=2**64 - 1, min_tokens=3, stream=True)
    assert found["seed"].tolist() == [[2**64 - 1]] and found["seed"].dtype == np.uint64
    assert found["min_tokens"].tolist() == [[3]]
    assert found["streaming"].tolist() == [[True]]
    options = StreamOptions.from_json(found["stream_options"][0, 0].decode())
    assert options == StreamOptions(stream=True, min_tokens=3)


def test_stop_ids_go_as_words_of_one_id_each(ask):
    found = ask(text_input="a", stop_token_ids=[9, 8])
    assert found["end_id"].tolist() == [[END]]
    assert decode_word_list("stop_words_list", found["stop_words_list"]) == [(9,), (8,)]


def test_end_tokens_can_be_replaced_and_left_out(ask):
    assert ask(text_input="a", end_id=5)["end_id"].tolist() == [[5]]
    assert ask(text_input="a", ignore_eos=True)["end_id"].tolist() == [[-1]]


def test_a_unary_request_streams_inside_when_a_stop_string_is_to_stop_the_engine(ask):
    assert not ask(text_input="a")["streaming"].item()
    assert ask(text_input="a", stop_words=["x"])["streaming"].item()


def test_a_prompt_that_does_not_fit_is_refused_with_the_numbers(ask):
    assert "max_tokens: must be at most 56 with a prompt of 200 tokens" in str(ask(text_input="a" * 200, max_tokens=57))
    assert "text_input: must have at most 255 tokens" in str(ask(text_input="a" * 256))
    assert "got 1000000 bytes" in str(ask(text_input="a" * 1_000_000))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"text_input": "a", "bad_words": ["x"]},
            'bad_words: must be left out, got ["x"]; OpenVINO GenAI has no mask',
        ),
        (
            {"text_input": "a", "embedding_bias_words": ["x"], "embedding_bias_weights": [1.0]},
            "embedding_bias_words: must be left out",
        ),
        ({"text_input": ""}, "text_input: must have at least one character"),
        ({"messages": "[]"}, "messages: must be a JSON list"),
        ({"text_input": "a", "parameters": {"tempratur": 1}}, "tempratur: must be an input or a known"),
        ({"text_input": "a", "parameters": {"request_priority": 2}}, "request_priority: must be a number"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(ask, inputs, message):
    assert message in str(ask(**inputs))


def test_a_batch_answers_each_request_by_itself_and_in_order(triton, model, library, answer_of):
    chat = json.dumps([{"role": "user", "content": "b"}])
    requests = [
        request(triton, text_input="one"),
        request(triton, text_input=""),
        request(triton, messages=chat),
        request(triton, text_input="two", max_tokens=0),
        request(triton, text_input="x" * 10_000_000),
        request(triton, text_input="three"),
    ]
    answers = model.execute(requests)
    assert [answer.has_error() for answer in answers] == [False, True, False, True, True, False]
    texts = [library.decode(answer_of("tokenizer", answers[index])["input_ids"][0].tolist()) for index in (0, 2, 5)]
    assert texts == ["one", "user\nb" + "assistant", "three"]


def test_refusals_are_counted_by_kind(triton, model):
    model.execute([request(triton, text_input=""), request(triton), request(triton, text_input="a" * 300)])
    counted = {
        name: triton.metric_value("trident_errors_total", model="tokenizer", error_type=name)
        for name in ("InvalidArgument", "PromptTooLong", "EngineFailed")
    }
    assert counted == {"InvalidArgument": 2, "PromptTooLong": 1, "EngineFailed": 0}


def test_a_fault_of_ours_is_one_requests_well_formed_error(triton, model, monkeypatch):
    class Broken:
        def inputs(self):
            return []

        def parameters(self):
            raise RuntimeError("shared memory is gone")

    first, second = model.execute([Broken(), request(triton, text_input="a")])
    assert "EngineFailed: the tokenizer could not read the request: RuntimeError" in first.error().message()
    assert not second.has_error()
    monkeypatch.setattr(model, "_engine_streams", lambda prompt: 1 / 0 if prompt.prompt == "a" else True)
    first, second = model.execute([request(triton, text_input="a"), request(triton, text_input="b")])
    assert "EngineFailed: the tokenizer failed: ZeroDivisionError" in first.error().message()
    assert not second.has_error()


@pytest.fixture
def gpu_engine(tiny_engine, tmp_path, monkeypatch):
    """The same tokenizer in front of an engine that is not ours."""
    folder = tmp_path / "engine"
    shutil.copytree(tiny_engine, folder, ignore=shutil.ignore_patterns("grammar_checker"))
    dataclasses.replace(manifests.load(tiny_engine), kind="trtllm").save(folder)
    monkeypatch.setenv("TRIDENT_ENGINE_DIR", str(folder))
    monkeypatch.setenv("TRIDENT_CONTROL_SOCKET", f"trident-test-{uuid.uuid4()}")
    return folder


@pytest.fixture
def cpp(triton, gpu_engine, answer_of):
    """``cpp(**inputs)`` asks the tokenizer in front of such an engine; ``cpp.known`` is what it told the
    detokenizer."""
    known = {}
    box = MetadataListener(
        Settings.from_env().metadata_socket,
        lambda found: known.setdefault(found.request_id, found) is found,
    )
    model = TritonPythonModel()
    model.initialize({})

    def ask(**inputs):
        [answer] = model.execute([request(triton, **inputs)])
        return from_text(answer.error().message()) if answer.has_error() else answer_of("tokenizer", answer)

    ask.known = known
    yield ask
    model._metadata_channel.close()
    box.close()


def test_behind_the_cpp_backend_the_detokenizer_hears_of_the_request_first(cpp):
    found = cpp(request_id="r1", text_input="abc", max_tokens=9, stop_token_ids=[7], stop_words=["x"])
    metadata = cpp.known["r1"]
    assert (metadata.max_tokens, metadata.num_input_tokens, metadata.end_ids) == (9, 3, (END, 7))
    assert StreamOptions.from_json(metadata.options).stop == ("x",)
    assert found["streaming"].item()


def test_behind_the_cpp_backend_a_request_needs_an_id_of_its_own(cpp):
    assert "request_id: must be unique" in str(cpp(text_input="a"))
    cpp(request_id="r1", text_input="a")
    assert "request_id: must be unique among the live requests of this engine, got one in use" in str(
        cpp(request_id="r1", text_input="a")
    )


def test_behind_the_cpp_backend_a_priority_is_refused_by_name(cpp):
    said = str(cpp(request_id="r1", text_input="a", parameters={"request_priority": 0.9}))
    assert "request_priority: must be left out" in said
    cpp(request_id="r1", text_input="a", parameters={"request_priority": 0.5})


def test_a_refused_request_does_not_take_its_id(cpp):
    assert "must have at most 255 tokens" in str(cpp(request_id="r1", text_input="a" * 300))
    assert not cpp.known
    cpp(request_id="r1", text_input="a")


def test_behind_the_cpp_backend_words_become_ids(cpp, library):
    found = cpp(
        request_id="r1",
        text_input="a",
        bad_words=["ab", "c"],
        embedding_bias_words=["ab", "b"],
        embedding_bias_weights=[1.5, -1.0],
    )
    a, b, c = (library.encode(character, add_special_tokens=False).ids[0] for character in "abc")
    assert decode_word_list("bad_words_list", found["bad_words_list"]) == [(a, b), (c,)]
    bias = found["embedding_bias"][0]
    assert bias.shape == (331,) and (bias[a], bias[b], bias.sum()) == (1.5, 0.5, 2.0)


def test_a_word_of_which_the_tokenizer_makes_nothing_is_refused_by_name(gpu_engine, request):
    library = tokenizer_families.byte_level_bpe()
    library.normalizer = tokenizers.normalizers.Strip()
    library.save(str(gpu_engine / "tokenizer.json"))
    dataclasses.replace(manifests.load(gpu_engine), vocab_size=library.get_vocab_size()).save(gpu_engine)
    cpp = request.getfixturevalue("cpp")
    for words in ({"bad_words": ["fox", " "]}, {"embedding_bias_words": [" "], "embedding_bias_weights": [1.0]}):
        refusal = cpp(request_id="r1", text_input="fox", **words)
        assert f"{next(iter(words))}: must hold words that encode to tokens, got ' '" in str(refusal)
    assert not cpp.known


def test_what_the_cpp_backend_cannot_do_is_refused_by_name(cpp):
    assert "min_p: must be 0, got 0.5" in str(cpp(request_id="r1", text_input="a", min_p=0.5))
    assert "num_top_log_probs: must be 0, got 2" in str(cpp(request_id="r1", text_input="a", num_top_log_probs=2))
    echo = {"request_id": "r1", "text_input": "a", "exclude_input_in_output": False}
    assert "return_prompt_log_probs: must be false, got True" in str(cpp(**echo, return_prompt_log_probs=True))
    assert "max_tokens: must be 1 or more, got 0" in str(cpp(**echo, max_tokens=0))
    assert "continue_ids: must be left out, got 2 ids" in str(cpp(**echo, continue_ids=[1, 2]))
    assert "exclude_input_in_output: must be true, got false" in str(cpp(**echo))
    first = cpp(request_id="r1", text_input="a", parameters={"request_priority": 1})
    assert "request_priority: must be left out, the TensorRT-LLM engine has no priorities; got 1" in str(first)
    assert not cpp.known
    cpp(request_id="r1", text_input="a", parameters={"request_priority": 0.5})
    assert "r1" in cpp.known


def test_a_refusal_that_the_checker_keeps_keeps_no_request():
    kept, result = InvalidArgument("guided_decoding_guide", "must compile"), Future()
    result.set_result(kept)
    with pytest.raises(InvalidArgument, match="guided_decoding_guide: must compile"):
        TritonPythonModel()._checked(result, 0.0)
    assert kept.__traceback__ is None


def test_a_guide_for_an_engine_without_its_vocabulary_is_refused_by_name(cpp):
    refused = cpp(request_id="r1", text_input="abc", guided_decoding_guide_type="json")
    assert (refused.field, "build it again" in refused.problem) == ("guided_decoding_guide_type", True)
    assert "r1" not in cpp.known


@pytest.mark.slow
def test_a_guide_reaches_the_cpp_backend_as_a_grammar_and_others_keep_their_places(
    triton, tiny_engine, gpu_engine, answer_of, library
):
    shutil.copytree(tiny_engine / "grammar_checker", gpu_engine / "grammar_checker")
    box = MetadataListener(Settings.from_env().metadata_socket, lambda found: True)
    model = TritonPythonModel()
    model.initialize({})

    def execute(*kinds):
        guides = [
            {"guided_decoding_guide_type": kind} | ({"guided_decoding_guide": text} if text else {})
            for kind, text in kinds
        ]
        asked = [{"text_input": f"abc{place}", **guide} for place, guide in enumerate(guides)]
        return model.execute([request(triton, request_id=str(n), **inputs) for n, inputs in enumerate(asked)])

    try:
        batch = [("regex", "[0-9]+"), ("", ""), ("regex", "("), ("regex", "[0-9]+"), ("structural_tag", "{}")]
        deadline_s = time.monotonic() + 60
        while any("send the request again" in str(a.error().message()) for a in execute(*batch) if a.has_error()):
            assert time.monotonic() < deadline_s
        first, free, bad, twice, tag = execute(*batch)
        for answer, place in ((first, 0), (free, 1), (twice, 3)):
            assert answer_of("tokenizer", answer)["input_ids"].tolist() == [library.encode(f"abc{place}").ids]
        assert answer_of("tokenizer", first)["guided_decoding_guide_type"].item() == b"ebnf_grammar"
        assert (
            answer_of("tokenizer", first)["guided_decoding_guide"]
            == answer_of("tokenizer", twice)["guided_decoding_guide"]
        )
        assert "guided_decoding_guide" not in answer_of("tokenizer", free)
        assert "guided_decoding_guide: must be a regular expression" in bad.error().message()
        assert "guided_decoding_guide_type: must be one of json, json_schema, regex" in tag.error().message()
    finally:
        model.finalize()
        model._metadata_channel.close()
        box.close()

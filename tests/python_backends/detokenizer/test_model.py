"""The Triton model ``detokenizer`` as a whole, in front of an engine of ours."""

import dataclasses
import queue
import threading
import types
import uuid

import numpy as np
import pytest
import tokenizers

from contract import manifest, packed_delta, step_model
from contract.generation import FinishReason, Timings, TokenDelta, Usage
from python_backends.detokenizer import model as model_module
from python_backends.detokenizer.model import InBandStreams, PackedModel, TritonPythonModel
from python_backends.ensemble.control import ControlListener, ControlMessage, Verb
from python_backends.ensemble.request_tensors import StreamOptions
from python_backends.ensemble.token_increment import StreamEvent, StreamState, TokenIncrement
from python_backends.triton_io import Inputs
from tests.contract.test_step_model import SOME

EPOCH = 77


class Engine:
    """What the engine hears on its control socket."""

    def __init__(self, name):
        self._changed = threading.Condition()
        self.heard = []
        self.listener = ControlListener(name, self._hear)

    def _hear(self, message):
        with self._changed:
            self.heard.append(message)
            self._changed.notify_all()

    def wait_for(self, *messages):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.heard) >= len(messages), timeout=60)
        assert self.heard == list(messages)


@pytest.fixture
def model(triton, tiny_engine, monkeypatch):
    name = f"trident-test-{uuid.uuid4()}"
    monkeypatch.setenv("TRIDENT_ENGINE_DIR", str(tiny_engine))
    monkeypatch.setenv("TRIDENT_CONTROL_SOCKET", name)
    model = TritonPythonModel()
    model.initialize({})
    model.socket_name = name
    yield model
    model.finalize()


@pytest.fixture
def engine(model):
    engine = Engine(model.socket_name)
    yield engine
    engine.listener.close()


@pytest.fixture
def clock(monkeypatch):
    """The detokenizer's clock, moved by hand: ``clock.now_ns``."""
    clock = types.SimpleNamespace(now_ns=10**12)
    monkeypatch.setattr(model_module.time, "monotonic_ns", lambda: clock.now_ns)
    return clock


@pytest.fixture
def say(triton, model):
    """``say(ids, key=…, …)``: one response of the engine; gives the request that the detokenizer got of it."""
    begun = set()

    def say(ids=(), key=1, event=StreamEvent.RUNNING, cancelled=False, log_probs=(), top=(), note=None, **more):
        options = StreamOptions(**{"stream": True} | more.pop("options", {}))
        note = ({} if key in begun else {"options": options.to_json()}) | (note or {})
        begun.add(key)
        increment = TokenIncrement(StreamState(EPOCH, key, event, **more), list(ids), log_probs, top, **note)
        request = triton.incoming({"stream_state": ("INT64", increment.to_array())})
        request.cancelled = cancelled
        model.execute([request])
        assert request.get_response_sender().closed, "every step of an ensemble has one final response"
        return request

    return say


@pytest.fixture
def hear(say, answer_of):
    """``hear(…)``: what the client gets of one response of the engine: tensors by name, or None for nothing."""

    def hear(*args, **options):
        [response] = say(*args, **options).get_response_sender().responses
        return None if response is None else answer_of("detokenizer", response)

    return hear


@pytest.fixture
def encode(tiny_engine):
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_engine / "tokenizer.json"))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def text(answer):
    return answer["text_output"].item().decode()


def test_a_stream_from_its_first_piece_to_its_end(hear, encode):
    first = hear(encode("Hé"), num_input_tokens=3)
    assert text(first) == "Hé" and first["output_ids"].tolist() == [encode("Hé")]
    assert first.keys() == {"text_output", "output_ids"}
    last = hear(encode("y!"), event=StreamEvent.LENGTH, num_input_tokens=3, num_cached_tokens=2)
    assert (text(last), last["finish_reason"].item()) == ("y!", b"length")
    counts = [last[name].item() for name in ("num_input_tokens", "num_output_tokens", "num_cached_tokens")]
    assert counts == [3, 5, 2]
    assert last.keys().isdisjoint({"stop_reason", "error_message", "arrival_time_ns", "output_log_probs"})


def test_half_a_character_gives_the_client_no_response(hear, encode):
    half, other_half = encode("é")
    assert hear([half]) is None
    piece = hear([other_half])
    assert text(piece) == "é" and piece["output_ids"].tolist() == [[half, other_half]]


def test_a_probe_gives_the_client_no_response(hear):
    assert hear(event=StreamEvent.PROBE) is None


def test_a_stop_string_reaches_the_engine_and_the_client(engine, hear, encode):
    assert text(hear(encode("The fox runs"), options={"stop": ("fox",)})) == "The "
    engine.wait_for(ControlMessage(Verb.STOP, EPOCH, 1))
    assert hear(encode(" and runs")) is None
    last = hear(event=StreamEvent.STOP)
    assert (text(last), last["finish_reason"].item(), last["stop_reason"].item()) == ("", b"stop", b"fox")
    assert last["num_output_tokens"].item() == len("The fox")


def test_an_end_token_is_named_by_its_id(hear, encode):
    last = hear([*encode("fox"), 256], event=StreamEvent.STOP, stop_id=256)
    assert (text(last), last["stop_reason"].item()) == ("fox", b"256")


def test_log_probabilities_come_with_their_ids(hear, encode):
    first = hear(encode("ab"), log_probs=[-0.5, -0.25], top=[([1, 2], [-0.1, -0.2]), ([3, 4], [-0.3, -0.4])])
    assert first["output_log_probs"].tolist() == [[[-0.5, -0.25]]] and first["cum_log_probs"].tolist() == [[-0.75]]
    assert first["top_log_probs_ids"].tolist() == [[[1, 2], [3, 4]]]
    np.testing.assert_allclose(first["top_log_probs"], [[[-0.1, -0.2], [-0.3, -0.4]]])
    last = hear(encode("c"), log_probs=[-1.0], event=StreamEvent.LENGTH)
    assert last["output_log_probs"].tolist() == [[[-1.0]]] and last["cum_log_probs"].tolist() == [[-1.75]]


def test_the_engines_instants_come_with_the_end_where_asked(hear, encode):
    times = {"arrival_ns": 1, "first_scheduled_ns": 2, "first_token_ns": 3, "last_token_ns": 4}
    hear(encode("a"), options={"timings": True}, **times)
    last = hear(event=StreamEvent.LENGTH, **times)
    found = [
        last[name].item()
        for name in ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
    ]
    assert found == [1, 2, 3, 4]


def test_an_error_of_the_engine_is_the_streams_end_in_band(hear, encode):
    hear(encode("fox"))
    last = hear(event=StreamEvent.ERROR, note={"error": "EngineFailed: killed; it is being restarted"})
    assert last["finish_reason"].item() == b"error"
    assert last["error_message"].item() == b"EngineFailed: killed; it is being restarted"


def test_a_unary_stream_is_one_response(hear, encode):
    assert hear(encode("The "), options={"stream": False}) is None
    assert hear(encode("fox")) is None
    last = hear(encode("."), event=StreamEvent.LENGTH)
    assert text(last) == "The fox." and last["output_ids"].tolist() == [encode("The fox.")]


# ---- faults ---------------------------------------------------------------------------------------------------------


def test_a_failure_in_the_decoding_is_one_error_in_band_and_nothing_after_it(model, engine, hear, encode, triton):
    assert text(hear(encode("fine"))) == "fine"
    model._streams._open[1].text = None  # whatever may go wrong in there
    failed = hear(encode("x"), num_input_tokens=3)
    assert failed["finish_reason"].item() == b"error"
    assert failed["error_message"].item().startswith(b"EngineFailed: the detokenizer failed: AttributeError")
    engine.wait_for(ControlMessage(Verb.CANCEL, EPOCH, 1))  # not read any more
    assert [level for level, _ in triton.log] == ["error"]
    assert hear(encode("y")) is None
    assert hear(event=StreamEvent.CANCELLED) is None
    assert text(hear(encode("other"), key=2)) == "other"


def test_options_that_cannot_be_read_end_the_stream_in_band(hear):
    for key, options in enumerate(("{", '{"unknown": 1}', "[1]"), 10):
        failed = hear([1], key=key, note={"options": options})
        assert failed["finish_reason"].item() == b"error" and failed["error_message"].item()


@pytest.mark.parametrize("tensors", [{}, {"stream_state": ("INT64", [[1, 2]])}])
def test_even_a_step_without_its_tensors_gets_a_well_formed_answer(triton, model, answer_of, tensors):
    request = triton.incoming(tensors)
    model.execute([request])
    [response] = request.get_response_sender().responses
    assert answer_of("detokenizer", response)["finish_reason"].item() == b"error"


def test_one_bad_step_does_not_take_its_batch_with_it(triton, model, say, encode):
    good = TokenIncrement(StreamState(EPOCH, 9, StreamEvent.LENGTH), encode("ok")).to_array()
    requests = [triton.incoming({}), triton.incoming({"stream_state": ("INT64", good)})]
    model.execute(requests)
    assert [len(request.get_response_sender().responses) for request in requests] == [1, 1]


# ---- clients that go ------------------------------------------------------------------------------------------------


def test_a_client_that_has_gone_is_told_to_the_engine_with_its_first_response(engine, say, encode):
    say(encode("a"), cancelled=True)
    engine.wait_for(ControlMessage(Verb.CANCEL, EPOCH, 1))


def test_a_probe_is_enough_to_notice_that_a_client_has_gone(engine, say):
    say(event=StreamEvent.PROBE, cancelled=True)
    engine.wait_for(ControlMessage(Verb.CANCEL, EPOCH, 1))


def test_each_stream_is_looked_at_every_80_ms_at_most(engine, clock, say, encode):
    checks = []
    for ms in (0, 10, 79, 80, 159, 160, 500):
        clock.now_ns = 10**12 + ms * 1_000_000
        checks.append(say(encode("a"), key=1).cancel_checks)
    assert checks == [1, 0, 0, 1, 0, 1, 1]
    assert say(encode("a"), key=2).cancel_checks == 1  # another one has its own time


def test_a_streams_end_is_not_asked_about_and_forgets_it(model, say, encode):
    say(encode("a"))
    assert say(event=StreamEvent.LENGTH, cancelled=True).cancel_checks == 0
    assert not model._checked_ns


def test_a_cancel_the_engine_did_not_hear_is_said_again_with_the_next_chunk(model, clock, say, encode):
    assert say(encode("a"), cancelled=True).cancel_checks == 1  # no reader
    engine = Engine(model.socket_name)
    try:
        assert say(encode("a"), cancelled=True).cancel_checks == 1  # not 80 ms later
        engine.wait_for(ControlMessage(Verb.CANCEL, EPOCH, 1))
        assert say(encode("a"), cancelled=True).cancel_checks == 0
    finally:
        engine.listener.close()


# ---- metrics --------------------------------------------------------------------------------------------------------


def test_the_detokenizers_share_of_the_first_token_is_observed_once_per_stream(triton, hear, encode, clock):
    for key in (1, 2):
        hear(encode("a"), key=key, first=1, sent_ns=clock.now_ns - 1_000_000)
        hear(encode("b"), key=key, sent_ns=clock.now_ns)
        hear(key=key, event=StreamEvent.LENGTH)
    labels = {"model": "detokenizer", "phase": "detokenize"}
    assert triton.metric_value("trident_time_to_first_token_phase_seconds", **labels) == 2
    assert triton.metric_value("trident_open_streams", model="detokenizer") == 0


def test_a_calibrated_engine_exports_what_its_steps_take(triton, tiny_engine, monkeypatch):
    digest = manifest.sha256_file(tiny_engine / manifest.FILE_NAME)
    known = dataclasses.replace(SOME, manifest_sha256=digest, machine=step_model.machine_kind())
    path = known.save(tiny_engine)
    try:
        monkeypatch.setenv("TRIDENT_ENGINE_DIR", str(tiny_engine))
        monkeypatch.setenv("TRIDENT_CONTROL_SOCKET", f"trident-test-{uuid.uuid4()}")
        model = TritonPythonModel()
        model.initialize({})
        model.finalize()
    finally:
        path.unlink()
    assert triton.metric_value(step_model.METRIC, term="step_s") == SOME.step_s


def test_the_packed_model_says_all_in_one_output_and_always_responds(triton, engine, tiny_engine, encode, clock):
    model = PackedModel()
    model.initialize({"model_name": "detokenizer_packed"})
    half, other_half = encode("é")
    times = {"arrival_ns": 1, "first_scheduled_ns": 2, "first_token_ns": 3, "last_token_ns": 4, "num_input_tokens": 9}
    options = StreamOptions(stream=True, timings=True).to_json()
    clock.now_ns, state = 5, StreamState(EPOCH, 1, StreamEvent.RUNNING)
    increments = [
        TokenIncrement(state, encode("a"), [-0.5], [([1, 2], [-0.5, -1.0])], options=options),
        TokenIncrement(state, [half], [-1.0]),
        TokenIncrement(StreamState(EPOCH, 1, StreamEvent.LENGTH, **times), [other_half], [-2.0]),
    ]
    try:
        requests = [triton.incoming({"stream_state": ("INT64", one.to_array())}) for one in increments]
        first, nothing, last = model.execute(requests)
        broken = triton.incoming({"stream_state": ("INT64", np.zeros((1, 3), dtype=np.int64))})
        [failed] = model.execute([broken])
    finally:
        model.finalize()
    assert triton.metric_value("trident_packed_ensemble") == 1

    def delta(response):
        [tensor] = response.output_tensors()
        return packed_delta.unpack(tensor.as_numpy().tobytes())

    assert delta(first) == TokenDelta("a", tuple(encode("a")), (-0.5,), top_log_probs=(((1, -0.5), (2, -1.0)),))
    assert not nothing.output_tensors() and not nothing.has_error()
    usage, timings = Usage(9, 3), Timings(1, 2, 3, 4, 0, 5, 5)
    ids = (half, other_half)
    assert delta(last) == TokenDelta("é", ids, (-1.0, -2.0), FinishReason.LENGTH, usage=usage, timings=timings)
    assert delta(failed).finish_reason is FinishReason.ERROR and "the detokenizer failed" in delta(failed).error


STATE = StreamState(11, 22, StreamEvent.RUNNING, num_input_tokens=3)


@pytest.fixture
def in_band():
    name = f"trident-test-{uuid.uuid4()}"
    streams = InBandStreams(name)
    yield streams, name
    streams.close()


def test_the_engines_tensor_becomes_the_increment_that_it_was(in_band, triton):
    sent = TokenIncrement(STATE, [5, 6], options="options")
    request = triton.incoming({"stream_state": ("INT64", sent.to_array())})
    found = in_band[0].read(request, Inputs(request))
    assert (found.state, found.token_ids, found.options) == (STATE, [5, 6], "options")


def test_stop_and_cancel_are_sent_to_the_engine_and_fail_without_one(in_band):
    streams, name = in_band
    assert not streams.stop(STATE) and not streams.cancel(STATE)
    received = queue.Queue()
    listener = ControlListener(name, received.put)
    assert streams.stop(STATE) and streams.cancel(STATE)
    expected = [ControlMessage(verb, 11, 22) for verb in (Verb.STOP, Verb.CANCEL)]
    assert [received.get(timeout=60) for _ in expected] == expected
    listener.close()

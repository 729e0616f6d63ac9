"""The Triton model ``engine`` as a whole: tensors in, a real worker behind it, responses as the server gets them."""

import os
import shutil
import signal
import threading
import time
import uuid

import numpy as np
import pytest

from contract.backend_settings import Settings
from contract.errors import EngineFailed, from_text
from contract.tensors import ENGINE_INPUTS, ENGINE_OUTPUTS
from python_backends.cpu_engine.model import ResponseSink, TritonPythonModel
from python_backends.ensemble.control import ControlMessage, ControlSender, Verb
from python_backends.ensemble.request_tensors import StreamOptions
from python_backends.ensemble.token_increment import StreamEvent, TokenIncrement

DATATYPES = {tensor.name: tensor.datatype for tensor in ENGINE_INPUTS}
EVERY_OUTPUT = [tensor.name for tensor in ENGINE_OUTPUTS]
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def model(triton_types, tiny_engine):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIDENT_ENGINE_DIR", str(tiny_engine))
        patch.setenv("TRIDENT_CONTROL_SOCKET", f"trident-test-{uuid.uuid4()}")
        patch.setenv("TRIDENT_MAX_WAITING", "4")
        triton_types.forget()
        model = TritonPythonModel()
        model.initialize({"model_name": "engine", "model_version": "1"})
        model.control_socket = Settings.from_env().control_socket
        yield model
        model.finalize()
        triton_types.forget()


@pytest.fixture
def send(triton_types, model):
    """``send(**tensors)`` hands one request to the model and returns it with its response sender."""

    def send(request_id="", outputs=EVERY_OUTPUT, timeout_us=0, cancelled=False, parameters=None, **values):
        values = {"input_ids": PROMPT, "input_lengths": 3, "request_output_len": 8} | values
        tensors = {n: (DATATYPES[n], [v if isinstance(v, list) else [v]]) for n, v in values.items() if v is not None}
        request = triton_types.incoming(
            tensors, request_id=request_id, outputs=outputs, timeout_us=timeout_us, parameters=parameters
        )
        request.cancelled = cancelled
        model.execute([request])
        return request.get_response_sender()

    return send


@pytest.fixture
def answers(answer_of):
    """Every response of a sender as tensors by name, once the last has come."""

    def read(sender):
        assert sender.final.wait(60)
        return [answer_of("engine", response) for response in sender.responses]

    return read


@pytest.fixture
def held(model, monkeypatch):
    """Set it to let the engine go on: until then it hears no report beyond the first with ids of a live stream, so that
    however fast the worker and however slow the test, no stream comes to its own end."""
    released = threading.Event()
    engine, on_report = model._engine, model._engine.on_report

    def hear(report):
        on_report(report)
        if any(output.token_ids and output.id in engine._streams for output in report.outputs):
            released.wait()

    monkeypatch.setattr(engine, "on_report", hear)
    yield released
    released.set()


def state(answer):
    return TokenIncrement.from_array(answer["stream_state"]).state


def ids(found):
    return [token for answer in found for token in answer["output_ids"].reshape(-1).tolist()]


def test_a_requests_priority_reaches_the_scheduler(send, model, monkeypatch):
    offered = []
    enqueue = model._engine._scheduler.enqueue
    monkeypatch.setattr(model._engine._scheduler, "enqueue", lambda *given: (offered.append(given[2]), enqueue(*given)))
    for parameters in (None, {"request_priority": 0.9, "x-header": "1"}):
        assert send(parameters=parameters).final.wait(60)
    assert offered == [0.5, 0.9]
    refused = send(parameters={"request_priority": 2})
    assert "request_priority: must be a number" in refused.responses[0].error().message()


@pytest.mark.parametrize(
    ("sent", "bounded"),
    [
        ({"streaming": False, "stream_options": StreamOptions().to_json()}, True),
        ({"streaming": True, "stream_options": StreamOptions(stop=("x",)).to_json()}, True),
        ({"streaming": True, "stream_options": StreamOptions(stream=True).to_json()}, False),
        ({"streaming": False}, True),
        ({"streaming": False, "stream_options": "not ours"}, True),
        ({"streaming": True, "stream_options": "[]"}, False),
    ],
)
def test_an_answer_in_one_piece_has_the_operators_longest_time(send, model, monkeypatch, sent, bounded):
    submitted = []
    monkeypatch.setattr(model._engine, "submit", lambda request, sink: submitted.append(request.timeout_ns))
    monkeypatch.setattr(model, "_whole_answer_timeout_ns", 5_000_000)
    send(**sent)
    send(**sent, timeout_us=1000)
    send(**sent, timeout_us=9000)
    monkeypatch.setattr(model, "_whole_answer_timeout_ns", 0)
    send(**sent)
    assert submitted == ([5_000_000, 1_000_000, 5_000_000, 0] if bounded else [0, 1_000_000, 9_000_000, 0])


def test_a_stream_is_well_formed_from_its_first_response_to_its_last(send, answers):
    found = answers(send(streaming=True, stream_options="{}"))
    states = [state(answer) for answer in found]
    assert len({(one.epoch, one.key) for one in states}) == 1
    assert [one.event.last for one in states] == [False] * (len(states) - 1) + [True]
    assert states[-1].event is StreamEvent.LENGTH and states[-1].num_input_tokens == 3
    assert sum(one.first for one in states) == 1
    increments = [TokenIncrement.from_array(answer["stream_state"]) for answer in found]
    assert [one.options for one in increments] == ["{}"] + [""] * (len(found) - 1)
    assert [token for one in increments for token in one.token_ids] == ids(found)
    for answer in found:
        assert answer["sequence_length"].tolist() == [[answer["output_ids"].shape[2]]]
    assert len(ids(found)) == 8


def test_streamed_and_unary_ids_are_the_same(send, answers):
    unary = answers(send(streaming=False))
    assert ids(unary) == ids(answers(send(streaming=True)))
    # A caller that waits long is probed, also before a whole answer.
    assert {state(answer).event for answer in unary[:-1]} <= {StreamEvent.PROBE}
    assert state(unary[-1]).event is StreamEvent.LENGTH and ids(unary[-1:]) == ids(unary)


def test_what_is_asked_for_besides_ids_comes_with_them(send, answers):
    found = answers(
        send(
            streaming=True,
            return_log_probs=True,
            num_top_log_probs=3,
            return_num_input_tokens=True,
            return_num_output_tokens=True,
            return_perf_metrics=True,
        )
    )
    counts, log_probs = [], []
    for answer in found:
        size = answer["output_ids"].shape[2]
        if not size:  # a probe
            continue
        assert answer["output_log_probs"].shape == (1, 1, size)
        assert answer["top_log_probs"].shape == answer["top_log_probs_ids"].shape == (1, size, 3)
        assert answer["num_input_tokens"].tolist() == [[3]]
        log_probs += answer["output_log_probs"].reshape(-1).tolist()
        counts.append(answer["num_output_tokens"].item())
        np.testing.assert_allclose(answer["cum_log_probs"].item(), sum(log_probs), rtol=1e-5)
    assert counts == sorted(counts) and counts[-1] == 8
    times = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
    instants = [found[-1][name].item() for name in times]
    assert instants == sorted(instants) and instants[0] > 0


def test_nothing_comes_that_was_not_asked_for(send, answers):
    for answer in answers(send(streaming=True, outputs=["output_ids"], return_log_probs=True)):
        assert list(answer) == ["output_ids"]
    for answer in answers(send(streaming=True)):
        assert answer.keys() <= {"output_ids", "sequence_length", "stream_state"}


def test_an_echo_puts_the_prompt_in_front(send, answers):
    plain, echoed = ids(answers(send())), ids(answers(send(exclude_input_in_output=False)))
    assert echoed == PROMPT + plain


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"beam_width": 2}, "beam_width"),
        ({"temperature": float("nan")}, "temperature"),
        ({"input_ids": [1, 2, 331]}, "input_ids"),
        ({"input_lengths": 2}, "input_lengths"),
        ({"request_output_len": 254}, "request_output_len"),
    ],
)
def test_a_bad_request_gets_one_error_that_names_the_tensor(triton_types, send, values, field):
    sender = send(streaming=True, **values)
    [response] = sender.responses
    assert sender.closed and response.error().code() == triton_types.TritonError.INVALID_ARG
    assert from_text(response.error().message()).field == field


def test_a_fault_of_ours_is_a_well_formed_error_and_the_next_request_is_taken(triton_types, model, answers, send):
    class Broken:
        def __init__(self):
            self.sender = triton_types.incoming({}).get_response_sender()

        def get_response_sender(self):
            return self.sender

    broken = Broken()
    model.execute([broken])
    [response] = broken.sender.responses
    assert "EngineFailed: the engine could not read the request: AttributeError" in response.error().message()
    assert len(ids(answers(send()))) == 8


def test_a_request_whose_client_has_gone_already_is_not_run(send):
    sender = send(cancelled=True)
    assert sender.closed and sender.responses == [None]
    before_ns = time.monotonic_ns() - 10**9  # the tokenizer got it a second ago
    sender = send(cancelled=True, tokenizer_time_ns=[before_ns, before_ns])
    assert sender.closed and sender.responses == [None]


def test_the_client_of_a_request_that_came_just_now_is_not_asked_for(send, answers):
    now_ns = time.monotonic_ns()
    assert len(ids(answers(send(cancelled=True, tokenizer_time_ns=[now_ns, now_ns])))) == 8


def test_a_stop_request_ends_the_streams_of_its_id_and_is_answered_once(held, send, answers):
    running = [send(request_id="r", request_output_len=250, streaming=True) for _ in range(2)]
    other = send(request_id="other", request_output_len=60, streaming=True)
    wait_until(lambda: running[0].responses)
    [answer] = answers(send(request_id="r", stop=True))
    assert answer["output_ids"].shape == (1, 1, 0) and answer["sequence_length"].tolist() == [[0]]
    for sender in running:
        found = answers(sender)
        assert state(found[-1]).event is StreamEvent.CANCELLED and len(ids(found)) < 250
    held.set()
    assert len(ids(answers(other))) == 60


def test_a_stop_request_for_nothing_is_answered_all_the_same_and_one_without_an_id_is_refused(send, answers):
    assert len(answers(send(request_id="nobody", stop=True))) == 1
    [response] = send(stop=True).responses
    assert "request_id: must be the id of the request to stop" in response.error().message()


def test_a_cancel_on_the_control_socket_ends_a_stream(model, held, send, answers):
    control = ControlSender(model.control_socket)
    sender = send(request_output_len=250, streaming=True)
    wait_until(lambda: sender.responses)
    first = TokenIncrement.from_array(sender.responses[0].output_tensors()[2].as_numpy()).state
    assert control.send(ControlMessage(Verb.CANCEL, first.epoch, first.key))
    found = answers(sender)
    assert state(found[-1]).event is StreamEvent.CANCELLED and len(ids(found)) < 250
    control.close()


def test_a_deadline_ends_a_stream_in_band_once_it_has_begun(held, send, answers):
    sender = send(request_output_len=250, streaming=True, timeout_us=60_000, temperature=1.0, seed=1)
    assert sender.final.wait(60)
    if sender.responses[-1].has_error():  # it passed before the first token
        assert len(sender.responses) == 1
        return
    last = answers(sender)[-1]
    assert state(last).event is StreamEvent.ERROR
    assert TokenIncrement.from_array(last["stream_state"]).error.startswith(
        "DeadlineExceeded: the deadline passed while it was generating"
    )


def test_too_many_requests_are_refused_at_once_and_retryably(triton_types, held, send, answers):
    senders = [send(request_output_len=250, streaming=True) for _ in range(40)]
    refused = [sender for sender in senders if sender.closed and sender.responses[0].has_error()]
    assert len(refused) >= 32  # the cache has room for four, and four may wait
    held.set()
    for sender in refused:
        error = from_text(sender.responses[0].error().message())
        assert error.retryable and "queue full: 4 of 4 requests wait" in str(error)
        assert sender.responses[0].error().code() == triton_types.TritonError.UNAVAILABLE
    for sender in senders:
        if sender not in refused:
            assert len(ids(answers(sender))) == 250


@pytest.mark.slow  # 200 generations of an engine
def test_200_requests_from_many_threads_all_end(send, answers):
    done = []

    def client(number):
        for _ in range(10):
            sender = send(request_id=str(number), streaming=number % 2 == 0, request_output_len=1 + number // 4)
            assert sender.final.wait(60)
            done.append(sender.responses[-1])

    threads = [threading.Thread(target=client, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 200 and None not in done


def guided(kind, text):
    return {"guided_decoding_guide_type": kind, "guided_decoding_guide": text, "end_id": 256}


@pytest.fixture
def compiler(model, send, answers, monkeypatch):
    """The pid of the process that compiles grammars, suspended."""
    monkeypatch.setattr(model._grammars, "_timeout_s", 60.0)
    assert answers(send(**guided("regex", f"{uuid.uuid4()}")))
    pid = model._grammars._process.pid
    os.kill(pid, signal.SIGSTOP)
    yield pid
    os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_a_deadline_passes_while_the_requests_grammar_waits_to_be_compiled(send, compiler):
    senders = [send(**guided("regex", f"{uuid.uuid4()}"), timeout_us=100_000) for _ in range(2)]
    for sender in senders:
        assert sender.final.wait(60)
        [response] = sender.responses
        problem = "DeadlineExceeded: the deadline passed while its grammar waited to be compiled"
        assert response.error().message().startswith(problem)


@pytest.mark.slow
def test_a_stop_request_reaches_requests_whose_grammar_waits_to_be_compiled(send, answers, compiler):
    guide = guided("regex", f"{uuid.uuid4()}")
    stopped, other = (send(request_id=name, **guide) for name in ("stopped", "other"))
    assert len(answers(send(request_id="stopped", stop=True))) == 1
    [answer] = answers(stopped)
    assert state(answer).event is StreamEvent.CANCELLED and ids([answer]) == []
    os.kill(compiler, signal.SIGCONT)
    assert ids(answers(other))


@pytest.mark.slow
def test_a_defect_at_the_start_of_a_guided_request_ends_no_other(model, send, answers, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(model._engine._scheduler, "offer", lambda key: 1 / 0)
        sender = send(**guided("regex", f"{uuid.uuid4()}"))
        assert sender.final.wait(60)
    assert "EngineFailed: the engine could not start the request: ZeroDivision" in sender.responses[0].error().message()
    assert ids(answers(send(**guided("regex", f"{uuid.uuid4()}"))))


@pytest.mark.slow
@pytest.mark.parametrize("lost", [["refuse"], ["refuse", "close"]])
def test_a_refusal_that_cannot_be_sent_ends_no_other_guided_request(triton_types, send, answers, monkeypatch, lost):
    def fail(*_):
        raise triton_types.TritonModelException("Failed to increase the shared memory pool size")

    with monkeypatch.context() as patch:
        for name in lost:
            patch.setattr(ResponseSink, name, fail)
        sender = send(**guided("regex", f"({uuid.uuid4()}"))
        following = send(**guided("regex", f"{uuid.uuid4()}"))
        assert ids(answers(following))
    assert sender.responses == ([] if "close" in lost else [None])


@pytest.mark.slow
def test_an_engine_folder_that_cannot_be_loaded_fails_at_once_and_says_why(triton, tiny_engine, tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    shutil.copytree(tiny_engine, broken)
    (broken / "openvino_model.bin").unlink()
    monkeypatch.setenv("TRIDENT_ENGINE_DIR", str(broken))
    monkeypatch.setenv("TRIDENT_CONTROL_SOCKET", f"trident-test-{uuid.uuid4()}")
    monkeypatch.setattr("python_backends.cpu_engine.engine._PAUSES_S", (0.0, 0.0))
    with pytest.raises(EngineFailed, match="the engine process does not load .*/broken; see the lines above"):
        TritonPythonModel().initialize({"model_name": "engine", "model_version": "1"})
    reasons = [message for level, message in triton.log if level == "error"]
    assert reasons and all("the engine process ended with code 1: " in reason for reason in reasons)


def wait_until(condition):
    for _ in range(12000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it did not happen in 60 s")

"""An engine that names nothing in band: streams by request id, ends inferred, stops through Triton."""

import dataclasses
import os
import queue
import shutil
import uuid
from collections import OrderedDict

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from contract import manifest as manifests
from contract import packed_delta
from contract.backend_settings import Settings
from contract.errors import EngineFailed, InvalidArgument
from python_backends.detokenizer.model import PackedModel, TritonPythonModel
from python_backends.detokenizer.request_id_streams import DOUBT_NS, AdapterCache, RequestIdTable
from python_backends.ensemble.metadata_channel import MetadataSender, StreamMetadata
from python_backends.ensemble.request_tensors import StreamOptions
from python_backends.ensemble.token_increment import StreamEvent

SECOND = 1_000_000_000


def metadata(request_id="r", max_tokens=5, end_ids=(256,), **options):
    return StreamMetadata(request_id, StreamOptions(**{"stream": True} | options).to_json(), max_tokens, 3, end_ids)


class Clock:
    now_ns = 0

    def __call__(self):
        return self.now_ns


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def streams(clock):
    return RequestIdTable(clock)


def test_options_come_with_the_first_ids_only(streams):
    streams.accept(metadata())
    state, options = streams.advance("r", [1])
    assert (state.first, state.num_input_tokens, options) == (1, 3, metadata().options)
    state, options = streams.advance("r", [2])
    assert (state.first, state.event, options) == (0, StreamEvent.RUNNING, "")


@pytest.mark.parametrize(
    ("ids", "event", "stop_id"),
    [
        ([256], StreamEvent.STOP, 256),
        ([1, 2, 7], StreamEvent.STOP, 7),
        ([1, 2, 3, 4, 5], StreamEvent.LENGTH, -1),
        ([1, 2, 3, 4, 256], StreamEvent.STOP, 256),
        ([], StreamEvent.STOP, -1),
        ([256, 1], StreamEvent.RUNNING, -1),
    ],
)
def test_an_end_is_inferred_from_the_ids(streams, ids, event, stop_id):
    streams.accept(metadata(end_ids=(256, 7)))
    state, _ = streams.advance("r", ids)
    assert (state.event, state.stop_id) == (event, stop_id)


def test_the_token_budget_is_counted_over_all_responses(streams):
    streams.accept(metadata(max_tokens=3))
    events = [streams.advance("r", ids)[0].event for ids in ([1], [2], [3])]
    assert events == [StreamEvent.RUNNING, StreamEvent.RUNNING, StreamEvent.LENGTH]


def test_an_empty_response_after_a_cancel_is_a_cancel(streams):
    streams.accept(metadata())
    assert streams.mark_cancelled("r") and not streams.mark_cancelled("r")
    assert streams.advance("r", [])[0].event is StreamEvent.CANCELLED
    assert not streams.mark_cancelled("r") and not streams.mark_cancelled("nobody")


def test_an_id_is_taken_until_its_stream_ends_and_then_names_another_one(streams):
    assert streams.accept(metadata())
    assert not streams.accept(metadata())
    first, _ = streams.advance("r", [256])
    assert streams.accept(metadata())
    second, _ = streams.advance("r", [256])
    assert first.key != second.key


def test_ids_under_an_id_that_no_stream_has_are_an_error(streams):
    with pytest.raises(EngineFailed, match="for the request id 'x', which no stream has"):
        streams.advance("x", [1])


def test_a_stream_that_shows_no_life_is_forgotten_and_one_that_does_is_not(streams, clock):
    for request_id in ("silent", "alive"):
        streams.accept(metadata(request_id, max_tokens=100))
    for seconds in (300, 599):
        clock.now_ns = seconds * SECOND
        streams.advance("alive", [1])
    assert not streams.accept(metadata("silent"))
    clock.now_ns = 600 * SECOND
    assert not streams.accept(metadata("alive"))
    assert streams.accept(metadata("silent"))


def test_what_never_ended_does_not_pile_up(streams, clock):
    for number in range(3000):
        clock.now_ns += SECOND
        streams.accept(metadata(str(number)))
        assert streams.request_id(number + 1) == str(number)
    assert len(streams._live) == len(streams._request_ids) == 600


def test_the_id_of_a_stream_that_was_taken_is_in_use_until_its_end_however_long_that_takes(streams, clock):
    streams.accept(metadata("r"))
    assert "r" in streams and streams.take("r") == metadata("r") and "r" not in streams
    assert streams.take("r") is None and streams.take("nobody") is None
    clock.now_ns = 10_000 * SECOND
    assert not streams.accept(metadata("r"))
    streams.end("nobody")
    streams.end("r")
    assert streams.accept(metadata("r"))


@given(st.lists(st.tuples(st.sampled_from("accept take advance end".split()), st.sampled_from("ab"), st.booleans())))
def test_a_stream_is_in_one_table_and_an_id_is_free_after_its_end(steps):
    """Against the ids that the backend has: those accepted whose last id did not come."""
    known = {}  # whether detokenizer_packed serves it, by request id
    owner = RequestIdTable(Clock())
    packed = RequestIdTable(Clock(), on_end=owner.end)
    for step, request_id, last in steps:
        if step == "accept":
            assert bool(owner.accept(metadata(request_id, max_tokens=99))) is (request_id not in known)
            known.setdefault(request_id, None)
        elif request_id in known:
            if step == "take" and known[request_id] is None:
                known[request_id] = packed
                packed.accept(owner.take(request_id))
            if step == "advance" and known[request_id] is not None:
                table = known[request_id]
                table.advance(request_id, [256 if last else 1])
                if last:
                    del known[request_id]
        for name, table in known.items():
            assert (name in packed) is (table is packed)
    assert len(owner._taken) == len(packed._live) == sum(table is packed for table in known.values())


def test_the_adapter_of_a_taken_stream_counts_as_used_until_its_end():
    causes = []
    table = RequestIdTable(Clock(), adapter_cache=2, on_adapter=lambda adapter, cause: causes.append((adapter, cause)))
    clock = table._clock_ns

    def accept(request_id, adapter):
        clock.now_ns += SECOND
        assert table.accept(dataclasses.replace(metadata(request_id), adapter=adapter))

    accept("long", 1)
    assert table.take("long").adapter == 1
    accept("other", 2)
    table.advance("other", [256])
    accept("third", 3)
    table.advance("third", [256])
    accept("again", 2)  # one runs, three came: the backend dropped two
    assert causes == [(1, "first"), (2, "first"), (3, "first"), (2, "again")]
    table.end("long")
    accept("held", 1)
    assert causes[-1] == (1, "")


# ---- the whole model ------------------------------------------------------------------------------------------------


@pytest.fixture
def model(triton, tiny_engine, tmp_path, monkeypatch):
    folder = tmp_path / "engine"
    shutil.copytree(tiny_engine, folder)
    dataclasses.replace(manifests.load(tiny_engine), kind="trtllm").save(folder)
    monkeypatch.setenv("TRIDENT_ENGINE_DIR", str(folder))
    monkeypatch.setenv("TRIDENT_CONTROL_SOCKET", f"trident-test-{uuid.uuid4()}")
    model = TritonPythonModel()
    model.initialize({})
    yield model
    model.finalize()


@pytest.fixture
def post(model):
    sender = MetadataSender(Settings.from_env().metadata_socket)
    yield lambda request_id="r", **more: sender.post(metadata(request_id, **more))
    sender.close()


@pytest.fixture
def stops(triton):
    """Request ids that the engine model was asked to stop, in order; ``get`` waits for the next one."""
    heard = queue.Queue()

    def engine(request):
        heard.put(request.request_id())
        yield triton.InferenceResponse([])

    triton.served_models["engine"] = engine
    return heard


@pytest.fixture
def hear(triton, model, answer_of):
    def hear(ids, request_id="r", cancelled=False, padding=0, log_probs=None):
        tensors = {
            "output_ids": ("INT32", [[list(ids) + [0] * padding]]),
            "sequence_length": ("INT32", [[len(ids)]]),
        }
        if log_probs is not None:
            tensors["output_log_probs"] = ("FP32", [[log_probs + [0.0] * padding]])
        request = triton.incoming(tensors, request_id=request_id)
        request.cancelled = cancelled
        model.execute([request])
        sender = request.get_response_sender()
        assert sender.closed
        [response] = sender.responses
        return None if response is None else answer_of("detokenizer", response)

    return hear


@pytest.fixture
def encode(tiny_engine):
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_engine / "tokenizer.json"))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def test_bare_ids_become_text_under_their_request_id(post, hear, encode):
    post("a", max_tokens=10)
    post("b", max_tokens=10)
    pieces = [
        hear(encode(word), request_id) for request_id, word in (("a", "The "), ("b", "A "), ("a", "fox"), ("b", "dog"))
    ]
    assert [piece["text_output"].item() for piece in pieces] == [b"The ", b"A ", b"fox", b"dog"]
    last = hear([256], "a")
    assert (last["finish_reason"].item(), last["stop_reason"].item()) == (b"stop", b"256")
    assert (last["num_input_tokens"].item(), last["num_output_tokens"].item()) == (3, 8)


def test_padding_behind_the_ids_is_not_read(post, hear, encode):
    post()
    piece = hear(encode("ab"), padding=3, log_probs=[-0.5, -0.25])
    assert piece["text_output"].item() == b"ab" and piece["output_log_probs"].tolist() == [[[-0.5, -0.25]]]


def test_a_stop_string_stops_the_request_through_triton(post, hear, encode, stops):
    post(max_tokens=100, stop=("fox",))
    assert hear(encode("The fox"))["text_output"].item() == b"The "
    assert stops.get(timeout=60) == "r"
    hear(encode(" runs"))
    last = hear([])
    assert (last["finish_reason"].item(), last["stop_reason"].item()) == (b"stop", b"fox")


def test_a_client_that_has_gone_stops_the_request_through_triton_once(model, post, hear, encode, stops):
    post(max_tokens=100)
    hear(encode("a"), cancelled=True)
    assert stops.get(timeout=60) == "r"
    model._checked_ns.clear()  # 80 ms later
    hear(encode("b"), cancelled=True)
    assert hear([])["finish_reason"].item() == b"cancelled"
    model._engine._stops.shutdown(wait=True)
    assert stops.empty()


def test_a_stop_that_triton_refuses_is_logged_and_the_stream_goes_on(triton, model, post, hear, encode):
    post(max_tokens=100, stop=("fox",))
    hear(encode("The fox"))  # no model engine is there
    model._engine._stops.shutdown(wait=True)
    assert any("stop request failed: request_id='r'" in message for _, message in triton.log)
    assert hear([])["stop_reason"].item() == b"fox"


def test_ids_without_a_stream_get_a_well_formed_answer(hear):
    assert b"which no stream has" in hear([1], "nobody")["error_message"].item()


def test_an_id_in_use_is_refused_before_the_engine_hears_of_it(post, hear, encode):
    post()
    with pytest.raises(InvalidArgument, match="request_id: must be unique"):
        post()
    hear([256])
    post()


@pytest.fixture
def packed(triton, model, monkeypatch):
    """``packed(ids, request_id)``: the delta that ``detokenizer_packed`` beside ``model`` makes of ids, or None."""
    found = PackedModel()
    with monkeypatch.context() as another:
        another.setattr(os, "getpid", lambda: 1)  # it runs in a process of its own
        found.initialize({})

    def hear(ids, request_id="r", cancelled=False):
        tensors = {"output_ids": ("INT32", [[list(ids)]]), "sequence_length": ("INT32", [[len(ids)]])}
        request = triton.incoming(tensors, request_id=request_id)
        request.cancelled = cancelled
        [answer] = found.execute([request])
        outputs = answer.output_tensors()
        return packed_delta.unpack(outputs[0].as_numpy().tobytes()) if outputs else None

    yield hear
    found.finalize()


def test_the_packed_detokenizer_takes_its_streams_from_the_other_one(post, hear, packed, encode, stops):
    post("a", max_tokens=10)
    post("b", max_tokens=10)
    assert packed(encode("The "), "a").text == "The " and hear(encode("A "), "b")["text_output"].item() == b"A "
    with pytest.raises(InvalidArgument, match="request_id: must be unique"):
        post("a")
    last = packed([256], "a")
    assert (last.finish_reason.value, last.stop_reason, last.usage.input_tokens) == ("stop", "256", 3)
    for _ in range(3):  # the id is free at once
        post("a", max_tokens=1)
        assert packed(encode("x"), "a").finish_reason.value == "length"
    post("a", max_tokens=100)
    packed(encode("x"), "a", cancelled=True)
    assert stops.get(timeout=60) == "a" and packed([], "a").finish_reason.value == "cancelled"
    assert "which no stream has" in packed([1], "nobody").error


# ---- the backend's cache of adapters ---------------------------------------------------------------------------------


MS = 1_000_000


class Backend:
    """Keeps ``capacity`` adapters; running ones stay, of the others the one that ended longest ago goes."""

    def __init__(self, capacity):
        self.capacity, self.running, self.done = capacity, [], OrderedDict()

    def start(self, adapter, has_weights):
        """Whether the request runs; without room it fails as one that is full, not as one that lacks weights."""
        held = {*self.running, *self.done}
        if adapter not in held:
            assert has_weights, f"the backend does not have {adapter}"
            if len(held) >= self.capacity:
                if not self.done:
                    return False
                self.done.popitem(last=False)
        self.done.pop(adapter, None)
        self.running.append(adapter)
        return True

    def end(self, adapter):
        self.running.remove(adapter)
        if adapter not in self.running:
            self.done[adapter] = None


@given(
    capacity=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(("start", "token", "end", "cancel")), st.integers(1, 5)), max_size=60),
)
@example(2, [("start", 2), ("start", 3), ("end", 2), ("start", 1), ("start", 2)])
@example(2, [("start", 2), ("start", 3), ("end", 2), ("start", 1), ("cancel", 3), ("start", 2)])
def test_no_request_lacks_weights_whatever_runs_at_once(capacity, steps):
    cache, backend = AdapterCache(capacity), Backend(capacity)
    for now_ns, (step, adapter) in enumerate(steps, 1):
        if step == "start":
            backend.start(adapter, bool(cache.send_cause(adapter, now_ns, backend.running)))
        elif adapter in backend.running:
            if step != "cancel":
                cache.generated(adapter, now_ns)  # the last token too
            if step != "token":
                backend.end(adapter)
                cache.ended(adapter, now_ns)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=40))
def test_with_room_for_all_each_adapter_is_sent_once(order):
    cache, sent = AdapterCache(4), []
    for now_ns, adapter in enumerate(order, 1):
        if cause := cache.send_cause(adapter, 2 * now_ns):
            assert cause == "first"
            sent.append(adapter)
        cache.generated(adapter, 2 * now_ns + 1)
    assert sorted(sent) == sorted(set(order))


def test_requests_carry_the_weights_until_one_has_a_token():
    cache = AdapterCache(2)
    assert [cache.send_cause(1, n) for n in (1, 2, 3)] == ["first"] * 3
    cache.generated(1, 4)
    assert [cache.send_cause(1, n) for n in (5, 6)] == ["", ""]


def test_a_request_without_a_token_for_long_makes_the_next_ones_carry_the_weights():
    cache = AdapterCache(2)
    cache.send_cause(1, MS)
    cache.generated(1, 2 * MS)
    assert cache.send_cause(1, 10 * MS) == ""  # fails: somebody loaded the backend again
    assert cache.send_cause(1, 10 * MS + DOUBT_NS) == ""
    assert cache.send_cause(1, 11 * MS + DOUBT_NS) == cache.send_cause(1, 12 * MS + DOUBT_NS) == "again"
    cache.generated(1, 13 * MS + DOUBT_NS)
    assert cache.send_cause(1, 14 * MS + DOUBT_NS) == ""


def test_what_else_the_backend_had_before_that_request_is_sent_again_too():
    cache = AdapterCache(3)
    for adapter in (1, 2, 3):
        cache.send_cause(adapter, adapter * MS)
        cache.generated(adapter, (adapter + 1) * MS)
    assert cache.send_cause(1, 10 * MS) == ""  # fails
    cache.generated(3, 11 * MS)
    assert cache.send_cause(1, 11 * MS + DOUBT_NS) == "again"
    assert [cache.send_cause(adapter, 12 * MS + DOUBT_NS) for adapter in (2, 3)] == ["again", ""]

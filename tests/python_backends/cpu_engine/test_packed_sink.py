import numpy as np
import pytest
import tokenizers

from contract import packed_delta
from contract.errors import EngineFailed, Overloaded
from contract.generation import FinishReason
from python_backends.cpu_engine import packed_sink
from python_backends.cpu_engine.packed_sink import CachedAnswer, PackedSink
from python_backends.detokenizer.decoding import Decoding
from python_backends.detokenizer.streams import Streams
from python_backends.ensemble.request_tensors import StreamOptions
from python_backends.ensemble.token_increment import StreamEvent, StreamState, TokenIncrement

OPTIONS = StreamOptions(stream=True, timings=True).to_json()
SECOND = 1_000_000_000


class Rig:
    """A sink, what it sent, and what it asked Triton to keep before."""

    def __init__(self, triton_types, monkeypatch, folder):
        self.now_ns, self.live, self.stops, self.requested = 5 * SECOND, 1, [], []
        monkeypatch.setattr(packed_sink.time, "monotonic_ns", lambda: self.now_ns)
        self.sender = triton_types.incoming({}).get_response_sender()
        self.streams = Streams(Decoding.from_tokenizer(folder), lambda state: not self.stops.append(state.key))
        answer = CachedAnswer(lambda *given: self.requested.append((len(self.sender.responses), given[0])))
        self.decoded = []
        self.sink = PackedSink(self.sender, self.streams, answer, lambda: self.live, self.decoded.append)

    def send(self, *ids, event=StreamEvent.RUNNING, options="", **state):
        self.sink.send(TokenIncrement(StreamState(77, 1, event, **state), list(ids), options=options), None)

    @property
    def sent(self):
        """Each response as (delta or None, stream that is looked for or 0)."""
        found = []
        for response in self.sender.responses:
            by_name = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
            epoch, key, _ = by_name.pop(packed_delta.WATCH)[0].tolist()
            assert epoch == (77 if key else 0)
            packed = by_name.pop(packed_delta.OUTPUT, None)
            assert not by_name
            found.append((None if packed is None else packed_delta.unpack(packed.tobytes()), key))
        return found


@pytest.fixture
def rig(triton_types, monkeypatch, tiny_engine):
    return Rig(triton_types, monkeypatch, tiny_engine)


@pytest.fixture(scope="module")
def encode(tiny_engine):
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_engine / "tokenizer.json"))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def test_only_what_has_text_is_sent_and_the_last_says_all(rig, encode):
    half, other_half = encode("é")
    rig.send(*encode("a"), options=OPTIONS, first=1)
    rig.send(half)
    rig.send(event=StreamEvent.PROBE)
    times = {"arrival_ns": 1, "first_scheduled_ns": 2, "first_token_ns": 3, "last_token_ns": 4, "num_input_tokens": 9}
    rig.send(other_half, event=StreamEvent.LENGTH, **times)
    (first, _), (last, _) = rig.sent
    assert (first.text, first.token_ids) == ("a", tuple(encode("a")))
    assert (last.text, last.token_ids, last.finish_reason) == ("é", (half, other_half), FinishReason.LENGTH)
    assert last.usage.input_tokens == 9 and last.timings.detokenized_ns == rig.now_ns and rig.sender.closed
    assert rig.decoded == [0.0]


def test_a_look_at_the_client_is_a_response_without_text_and_rarer_with_more_streams(rig, encode):
    rig.send(*encode("a"), options=OPTIONS)
    for live, after_ms, looks in ((1, 79, 0), (1, 1, 1), (20, 199, 1), (20, 1, 2), (64, 319, 2), (64, 1, 3)):
        rig.live, rig.now_ns = live, rig.now_ns + after_ms * 1_000_000
        rig.send(*encode("b"))
        assert sum(key for _, key in rig.sent) == looks
    assert all((delta is None) == bool(key) for delta, key in rig.sent)
    rig.now_ns += SECOND
    rig.send(event=StreamEvent.LENGTH)  # nobody needs to know any more
    assert rig.sent[-1][1] == 0


def test_triton_has_the_answer_before_any_text_and_again_every_second(rig, encode):
    rig.send(event=StreamEvent.PROBE, options=OPTIONS)
    assert rig.requested == []
    for passed_ms in (0, 999, 1, 0):
        rig.now_ns += passed_ms * 1_000_000
        rig.sink._looked_ns = rig.now_ns
        rig.send(*encode("a"))
    assert rig.requested == [(0, "client_watch"), (2, "client_watch")]


def test_without_the_answer_no_text_is_sent(rig, encode):
    def refuse(*_):
        raise EngineFailed("client_watch: not ready")

    rig.sink._answer = CachedAnswer(refuse)
    with pytest.raises(EngineFailed):
        rig.send(*encode("a"), options=OPTIONS)
    assert not rig.sender.responses


def test_without_the_answer_a_stream_is_completed_without_a_last_response(rig, encode):
    def refuse(*_):
        raise EngineFailed("client_watch: not ready")

    rig.send(*encode("a"), options=OPTIONS)
    rig.now_ns += SECOND
    rig.sink._answer = CachedAnswer(refuse)
    with pytest.raises(EngineFailed):  # response_senders.py closes the sink
        rig.send(event=StreamEvent.ERROR)
    assert not rig.sender.closed
    with pytest.raises(EngineFailed):
        rig.sink.close()
    assert rig.sender.closed and rig.sender.responses[1:] == [None]


def test_a_stop_string_ends_the_stream_at_the_engine(rig, encode):
    rig.send(*encode("ab"), options=StreamOptions(stream=True, stop=("b",)).to_json())
    assert rig.stops == [1]
    rig.send(event=StreamEvent.STOP)
    last = rig.sent[-1][0]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, "b")


def test_a_stream_that_cannot_be_decoded_ends_with_one_error(rig, encode, monkeypatch):
    rig.send(*encode("a"), options=OPTIONS)
    monkeypatch.setattr(rig.streams, "feed", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # response_senders.py has the engine end the stream
        rig.send(*encode("b"))
    rig.send(*encode("c"))
    rig.send(event=StreamEvent.ERROR)
    (_, _), (last, _) = rig.sent
    assert last.finish_reason is FinishReason.ERROR and "the text could not be made" in last.error


def test_a_stream_whose_last_response_was_lost_is_completed_and_a_refusal_is_an_error(rig):
    rig.sink.close()
    [(delta, _)] = rig.sent
    assert delta.finish_reason is FinishReason.ERROR and rig.sender.closed


def test_a_refusal_is_an_error_of_triton(rig):
    rig.sink.refuse(Overloaded("full"))
    [refusal] = rig.sender.responses
    assert "full" in refusal.error().message() and rig.sender.closed


def test_the_input_for_no_stream_is_what_the_model_takes():
    assert packed_sink._NO_STREAM.shape == (1, 3) and packed_sink._NO_STREAM.dtype == np.int64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.generation import FinishReason
from python_backends.detokenizer.decoding import Decoding
from python_backends.detokenizer.streams import Streams
from python_backends.ensemble.request_tensors import StreamOptions
from python_backends.ensemble.token_increment import StreamEvent, StreamState, TokenIncrement
from tests.fakes import tokenizer_families

FAMILIES = ("byte_level_bpe", "sentencepiece_bpe", "metaspace_first")
TOKENIZERS = {name: tokenizer_families.FAMILIES[name]() for name in FAMILIES}
DECODINGS = {name: Decoding.from_tokenizer(tokenizer) for name, tokenizer in TOKENIZERS.items()}
TEXT = "The quick brown fox jumps over the lazy dog. 我能吞下玻璃 👩‍💻"


class Reader:
    """One stream of ``streams`` from the engine's end to the client's."""

    def __init__(self, family="byte_level_bpe", key=1, epoch=5, streams=None, prompt=0, accepts_stops=True, **options):
        self.tokenizer = TOKENIZERS[family]
        self.stops = []
        self.accepts_stops = accepts_stops
        self.streams = Streams(DECODINGS[family], self._request_stop) if streams is None else streams
        self.key, self.epoch, self.prompt = key, epoch, prompt
        self.options = StreamOptions(**{"stream": True} | options).to_json()
        self.increments = []

    def _request_stop(self, state):
        self.stops.append(state.key)
        return self.accepts_stops

    def feed(self, *ids, event=StreamEvent.RUNNING, stop_id=-1, log_probs=None, top=(), error=""):
        state = StreamState(self.epoch, self.key, event, stop_id, num_input_tokens=self.prompt)
        increment = TokenIncrement(
            state,
            list(ids),
            [-float(n) for n in ids] if log_probs is None else log_probs,
            top,
            options=self.options,
            error=error,
        )
        self.options = ""
        return self.receive(increment)

    def receive(self, increment):
        decoded = self.streams.feed(increment)
        if decoded is None:
            return None
        delta, self.cum_log_prob = decoded
        self.increments.append(delta)
        return delta

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    @property
    def text(self):
        return "".join(text.text for text in self.increments)

    @property
    def ids(self):
        return [token for text in self.increments for token in text.token_ids]

    @property
    def log_probs(self):
        return [value for text in self.increments for value in text.log_probs]


def cut(ids, sizes):
    while ids:
        size = next(sizes, len(ids))
        yield ids[:size]
        ids = ids[size:]


@given(
    st.sampled_from(FAMILIES), st.lists(st.integers(0, 400), max_size=40), st.lists(st.integers(0, 5)), st.booleans()
)
def test_however_a_stream_is_cut_its_increments_are_the_whole_text_and_every_id_comes_once(family, ids, sizes, stream):
    reader = Reader(family, stream=stream)
    for increment in cut(ids, iter(sizes)):
        reader.feed(*increment)
    last = reader.feed(event=StreamEvent.LENGTH)
    assert reader.text == reader.tokenizer.decode(ids, skip_special_tokens=True)
    assert reader.ids == ids and reader.log_probs == [-float(n) for n in ids]
    assert last.finish_reason is FinishReason.LENGTH and last.usage.output_tokens == len(ids)
    assert reader.cum_log_prob == pytest.approx(-float(sum(ids)))
    assert all(text.finish_reason is None for text in reader.increments[:-1])
    assert all(text.text for text in reader.increments[:-1])  # half a character waits with its ids
    assert stream or len(reader.increments) == 1
    assert not len(reader.streams)


def test_special_tokens_are_skipped_or_kept_as_asked():
    end = TOKENIZERS["byte_level_bpe"].token_to_id("</s>")
    for skip, expected in ((True, "fox"), (False, "fox</s>")):
        reader = Reader(skip_special_tokens=skip)
        reader.feed(*reader.encode("fox"), end, event=StreamEvent.STOP, stop_id=end)
        assert reader.text == expected and reader.increments[-1].stop_reason == str(end)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (StreamEvent.STOP, FinishReason.STOP),
        (StreamEvent.LENGTH, FinishReason.LENGTH),
        (StreamEvent.CANCELLED, FinishReason.CANCELLED),
        (StreamEvent.ERROR, FinishReason.ERROR),
    ],
)
def test_an_end_keeps_its_reason_and_the_text_so_far(event, reason):
    reader = Reader()
    reader.feed(*reader.encode("The fox"))
    last = reader.feed(event=event, error="EngineFailed: it broke" if event is StreamEvent.ERROR else "")
    assert (reader.text, last.finish_reason, last.stop_reason) == ("The fox", reason, "")
    assert last.error == ("EngineFailed: it broke" if event is StreamEvent.ERROR else "")


def test_a_probe_gives_the_client_nothing_and_the_options_it_brought_are_kept():
    reader = Reader(stop=("fox",))
    assert reader.feed(event=StreamEvent.PROBE) is None
    reader.feed(*reader.encode("quick fox jumps"))
    assert reader.text == "quick " and reader.stops == [1]


# ---- stop strings ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.sampled_from(FAMILIES), st.lists(st.integers(1, 6)), st.booleans(), st.booleans())
def test_a_stop_string_ends_the_text_wherever_it_is_cut(family, sizes, include_stop, stream):
    reader = Reader(family, stop=("nothing", "jumps over"), include_stop=include_stop, stream=stream)
    ids = reader.encode(TEXT)
    for increment in cut(ids, iter(sizes)):
        reader.feed(*increment)
    last = reader.feed(event=StreamEvent.LENGTH)  # the engine got there before the word reached it
    before, stop, _ = reader.tokenizer.decode(ids).partition("jumps over")
    assert reader.text == before + (stop if include_stop else "")
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, "jumps over")
    count = next(n for n in range(len(ids) + 1) if "jumps over" in reader.tokenizer.decode(ids[:n]))
    assert reader.ids == ids[:count] and reader.log_probs == [-float(n) for n in ids[:count]]
    assert last.usage.output_tokens == count and reader.stops == [1]


def test_an_engine_that_could_not_be_told_is_told_again_with_every_chunk_until_it_hears():
    reader = Reader(stop=("fox",), accepts_stops=False)
    reader.feed(*reader.encode("The fox"))
    for _ in range(3):
        assert reader.feed(5, 6) is None
    assert reader.stops == [1] * 4
    reader.accepts_stops = True
    reader.feed(5)
    reader.feed(5)
    assert reader.stops == [1] * 5
    last = reader.feed(event=StreamEvent.STOP)
    assert (reader.text, last.stop_reason) == ("The ", "fox")


def test_a_stop_string_in_the_last_chunk_needs_no_stop():
    reader = Reader(stop=("fox",))
    last = reader.feed(*reader.encode("The fox runs"), event=StreamEvent.LENGTH)
    assert (last.text, last.finish_reason, last.stop_reason, reader.stops) == ("The ", FinishReason.STOP, "fox", [])


def test_what_was_held_back_for_a_stop_string_comes_with_the_end():
    reader = Reader(stop=("fox trot",))
    reader.feed(*reader.encode("The fox"))
    assert "fox" not in reader.text
    reader.feed(event=StreamEvent.LENGTH)
    assert reader.text == "The fox"


@pytest.mark.parametrize("event", [StreamEvent.ERROR, StreamEvent.CANCELLED])
def test_after_a_stop_string_the_text_is_whole_whatever_happens_to_the_engine(event):
    reader = Reader(stop=("fox",))
    reader.feed(*reader.encode("The fox"))
    last = reader.feed(event=event, error="EngineFailed: killed")
    assert (last.finish_reason, last.stop_reason, last.error) == (FinishReason.STOP, "fox", "")


@pytest.mark.parametrize("sizes", [[1] * 50, [50]])
def test_no_stop_string_counts_before_min_tokens(sizes):
    reader = Reader(min_tokens=3, stop=("ab",))
    ids = [reader.tokenizer.token_to_id(letter) for letter in "ababab"]
    for increment in cut(ids, iter(sizes)):
        reader.feed(*increment)
    last = reader.feed(event=StreamEvent.LENGTH)
    assert (reader.text, last.stop_reason) == ("abab", "ab")  # "ab" of ids 5 and 6: the third id is not looked at
    assert reader.ids == ids


# ---- stop ids -------------------------------------------------------------------------------------------------------


def test_a_stop_id_of_the_callers_ends_the_text_and_is_not_part_of_it_but_an_id_of_the_output():
    reader = Reader(hidden_ids=(7,))
    reader.feed(*reader.encode("fox"), 7, event=StreamEvent.STOP, stop_id=7)
    last = reader.increments[-1]
    assert reader.text == "fox" and reader.ids == [*reader.encode("fox"), 7]
    assert reader.log_probs == [-float(token) for token in reader.ids]
    assert (last.finish_reason, last.stop_reason, last.usage.output_tokens) == (
        FinishReason.STOP,
        "7",
        len(reader.ids),
    )
    assert reader.cum_log_prob == pytest.approx(sum(reader.log_probs))


def test_the_same_id_in_the_middle_is_part_of_the_text():
    reader = Reader(hidden_ids=(7,), min_tokens=2)
    reader.feed(7, 8, event=StreamEvent.LENGTH)
    assert reader.ids == [7, 8]


# ---- echo -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[1] * 99, [99], [7, 2]])
def test_an_echoed_prompt_is_text_but_neither_counted_nor_searched_nor_given_log_probs(sizes):
    reader = Reader(echo=True, stop=("fox",), prompt=len(Reader().encode("The fox says ")))
    prompt, generated = reader.encode("The fox says "), reader.encode("ring fox")
    first, *rest = cut(generated, iter(sizes))
    reader.feed(*prompt, *first, log_probs=[-float(n) for n in first])
    for increment in rest:
        reader.feed(*increment)
    last = reader.feed(event=StreamEvent.LENGTH)
    assert reader.text == reader.tokenizer.decode(prompt + generated)[: -len("fox")]
    assert reader.ids == prompt + generated and reader.log_probs == [-float(n) for n in generated]
    assert last.usage.output_tokens == len(generated) and last.stop_reason == "fox"
    assert [increment.prompt_ids for increment in reader.increments if increment.prompt_ids] == [len(prompt)]
    assert reader.increments[0].prompt_ids


@given(st.lists(st.integers(1, 300), min_size=1, max_size=9), st.lists(st.integers(1, 300), max_size=9), st.booleans())
def test_an_echoed_prompts_own_log_probs_stay_with_its_ids_and_out_of_the_sum(prompt, generated, stream):
    reader = Reader(echo=True, stream=stream, prompt=len(prompt))
    ids = prompt + generated
    reader.feed(*ids[: len(prompt) + 1], top=[([token], [-1.0]) for token in ids[: len(prompt) + 1]])
    last = reader.feed(*ids[len(prompt) + 1 :], event=StreamEvent.LENGTH, top=[([7], [-1.0])] * (len(generated) - 1))
    assert reader.ids == ids and reader.log_probs == [-float(token) for token in ids]
    assert sum(len(text.top_log_probs) for text in reader.increments) == len(ids)
    assert reader.cum_log_prob == pytest.approx(-sum(generated)) and last.usage.output_tokens == len(generated)


def test_an_echo_without_output_has_no_output_tokens():
    reader = Reader(echo=True, prompt=2)
    last = reader.feed(5, 6, event=StreamEvent.CANCELLED, log_probs=[])
    assert (reader.ids, last.usage.output_tokens) == ([5, 6], 0)


# ---- continued streams ----------------------------------------------------------------------------------------------

PIECES = ("The ", "fox", " jumps over", "nothing", " 我能", "👩‍💻", "�", " the ", "é")


@given(
    st.sampled_from(FAMILIES),
    st.lists(st.sampled_from(PIECES), max_size=8).map("".join),
    st.lists(st.integers(0, 300), max_size=6),
    st.data(),
    st.fixed_dictionaries(
        {},
        optional={
            "stop": st.lists(
                st.sampled_from(("jumps over", "fox jumps", "吞", "\U0001f469", "xnot", "o", "é ")), max_size=2
            ),
            "include_stop": st.booleans(),
            "echo": st.booleans(),
            "min_tokens": st.integers(0, 8),
            "skip_special_tokens": st.booleans(),
        },
    ),
)
def test_wherever_a_stream_is_cut_its_two_parts_are_the_whole(family, text, more, data, options):
    whole = Reader(family, prompt=3, **options)
    prompt = whole.encode("A 👩‍💻")[:3] if options.get("echo") else []
    prompt += [7] * (3 - len(prompt)) if prompt else []
    ids = whole.encode(text) + more
    cut_at = data.draw(st.integers(0, len(ids)))

    first = Reader(family, prompt=3, **options)
    for reader in (whole, first):
        reader.feed(*prompt, log_probs=[])
        for token in ids if reader is whole else ids[:cut_at]:
            reader.feed(token)
    last = whole.feed(event=StreamEvent.LENGTH)
    if first.stops or not whole.ids:
        return  # the client of a stream that a stop string has ended knows its end
    received = first.ids[len(prompt) :]
    told = first.text

    rest = Reader(family, prompt=3, **options | {"replayed_ids": [*prompt, *received]})
    for place in range(len(received), len(ids)):
        state = StreamState(5, 1, StreamEvent.RUNNING, num_input_tokens=3)
        so_far = -float(sum(ids[: place + 1]))
        increment = TokenIncrement(state, [ids[place]], [-float(ids[place])], (), so_far, 0, rest.options)
        rest.options = ""
        rest.receive(increment)
    end = rest.feed(event=StreamEvent.LENGTH)
    assert told + rest.text == whole.text
    assert received + rest.ids == whole.ids[len(prompt) :]
    assert (end.finish_reason, end.stop_reason) == (last.finish_reason, last.stop_reason)
    assert end.usage.output_tokens == last.usage.output_tokens
    if rest.ids:
        assert rest.cum_log_prob == pytest.approx(whole.cum_log_prob)


# ---- log probabilities ----------------------------------------------------------------------------------------------


def test_likeliest_ids_stay_with_the_ids_they_belong_to():
    reader = Reader(stop=("fox",))
    ids = reader.encode("The fox runs")
    tops = {token: ([token, 0], [-0.1, -2.0]) for token in ids}
    for token in ids:
        reader.feed(token, top=[tops[token]])
    reader.feed(event=StreamEvent.STOP)
    for text in reader.increments:
        assert text.top_log_probs == tuple(tuple(zip(*tops[token], strict=True)) for token in text.token_ids)
        assert list(text.log_probs) == [-float(token) for token in text.token_ids]


def test_without_log_probs_there_are_none():
    reader = Reader()
    reader.feed(*reader.encode("fox"), log_probs=[], event=StreamEvent.LENGTH)
    assert reader.log_probs == [] and reader.ids


# ---- many streams, and faults ---------------------------------------------------------------------------------------


def test_streams_do_not_mix():
    streams = Streams(DECODINGS["byte_level_bpe"], lambda state: True)
    texts = {key: TEXT[key:] for key in range(1, 8)}
    readers = {key: Reader(key=key, streams=streams) for key in texts}
    waiting = {key: reader.encode(texts[key]) for key, reader in readers.items()}
    while any(waiting.values()):
        for key, ids in waiting.items():
            if ids:
                readers[key].feed(ids.pop(0))
    assert len(streams) == 7
    for key, reader in readers.items():
        reader.feed(event=StreamEvent.LENGTH)
        assert reader.text == texts[key]
    assert not len(streams)


def test_a_failed_stream_says_nothing_more_and_its_key_is_free_after_its_end():
    reader = Reader()
    reader.feed(*reader.encode("fox"))
    failed = StreamState(reader.epoch, reader.key, StreamEvent.RUNNING)
    reader.streams.fail(failed)
    assert reader.feed(5) is None
    assert reader.feed(event=StreamEvent.CANCELLED) is None
    assert not len(reader.streams) and not reader.streams._failed


def test_a_stream_that_failed_with_its_last_chunk_leaves_nothing():
    reader = Reader()
    reader.feed(5)
    reader.streams.fail(StreamState(reader.epoch, reader.key, StreamEvent.LENGTH))
    assert not len(reader.streams) and not reader.streams._failed


def test_a_new_engine_drops_the_streams_of_the_old_one():
    old = Reader(epoch=5)
    old.feed(*old.encode("The fox"))
    new = Reader(epoch=6, streams=old.streams, stop=("dog",))
    new.feed(*new.encode("lazy "))
    assert len(old.streams) == 1
    new.feed(*new.encode("dog"))
    assert new.feed(event=StreamEvent.STOP).stop_reason == "dog" and new.text == "lazy "


def test_a_late_word_of_the_old_engine_does_not_disturb_the_new_ones_streams():
    old = Reader(epoch=5)
    old.feed(*old.encode("The fox"))
    new = Reader(epoch=6, streams=old.streams)
    new.feed(*new.encode("lazy "))
    assert old.feed(*old.encode(" runs")) is None
    last = old.feed(event=StreamEvent.LENGTH)
    assert last.finish_reason is FinishReason.ERROR and last.error == "EngineFailed: the engine was restarted"
    new.feed(*new.encode("dog"), event=StreamEvent.LENGTH)
    assert new.text == "lazy dog"


def test_500_silent_probes_of_a_unary_stream_take_no_memory():
    reader = Reader(stream=False)
    for _ in range(500):
        reader.feed(event=StreamEvent.PROBE)
    [stream] = reader.streams._open.values()
    assert len(stream.held_text) == 0

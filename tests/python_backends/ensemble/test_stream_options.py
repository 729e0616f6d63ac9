from hypothesis import given
from hypothesis import strategies as st

from python_backends.ensemble.stream_options import StreamOptions

options = st.builds(
    StreamOptions,
    stream=st.booleans(),
    echo=st.booleans(),
    stop=st.lists(st.text(max_size=20)).map(tuple),
    include_stop=st.booleans(),
    hidden_ids=st.lists(st.integers(0, 2**31 - 1)).map(tuple),
    skip_special_tokens=st.booleans(),
    min_tokens=st.integers(0, 2**31 - 1),
    timings=st.booleans(),
)


@given(options)
def test_options_survive_their_json(options):
    assert StreamOptions.from_json(options.to_json()) == options


def test_an_engine_asked_directly_sends_no_options_and_gets_the_neutral_ones():
    assert StreamOptions.from_json("") == StreamOptions()

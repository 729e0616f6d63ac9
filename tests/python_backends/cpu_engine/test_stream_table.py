import pytest
from hypothesis import given
from hypothesis import strategies as st

from python_backends.cpu_engine.stream_table import StreamTable
from tests.python_backends.cpu_engine.test_stream import stream


def made(key, request_id):
    one = stream(request_id=request_id)
    one.key = key
    return one


@given(st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.booleans()), max_size=20))
def test_it_finds_live_streams_by_key_and_by_request_id_and_forgets_the_others(changes):
    table, live = StreamTable(), {}
    for key, (request_id, remove_one) in enumerate(changes):
        table.add(made(key, request_id))
        live[key] = request_id
        if remove_one:
            table.remove(table[min(live)])
            del live[min(live)]
        assert {key: table[key].request.request_id for key in table} == live
        for name in ("a", "b"):
            assert sorted(table.keys_of(name)) == [key for key in live if live[key] == name]
        assert table.keys_of("") == [] and set(table._by_request_id) == set(live.values()) - {""}


def test_a_stream_that_is_not_in_the_table_cannot_be_removed():
    with pytest.raises(KeyError):
        StreamTable().remove(made(1, "a"))

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.wire import stream_model
from clients.wire.stream_model import PackedEnsemble, StreamModel
from contract.errors import EngineFailed, InvalidArgument, NotFound, Overloaded, Unavailable

UNLOADED = Unavailable("Request for unknown model: 'ensemble_packed' has no available versions")


@given(named=st.sampled_from(["", "ensemble", "mine"]), stream=st.booleans(), ready=st.booleans())
def test_streams_of_callers_who_name_no_model_go_to_the_packed_ensemble_of_a_server_that_has_it(named, stream, ready):
    server = PackedEnsemble()
    server.ready = ready
    chosen = StreamModel(named, stream).at(server)
    assert chosen == ("ensemble_packed" if ready and stream and not named else named or "ensemble")


@pytest.mark.parametrize("error", [NotFound("unknown model"), UNLOADED])
def test_a_request_for_a_packed_ensemble_that_is_gone_is_sent_again_once_whatever_is_learnt_meanwhile(error):
    server, model = PackedEnsemble(), StreamModel("", True)
    server.ready = True
    assert model.at(server) == "ensemble_packed"
    assert model.refused(error)
    server.ready = True  # the late answer of the server that was replaced
    assert model.at(server) == "ensemble"
    assert not model.refused(error)


@pytest.mark.parametrize("error", [Unavailable("the server is stopping"), Overloaded("full"), EngineFailed("no")])
def test_what_says_nothing_of_the_model_is_no_reason_to_send_a_request_again(error):
    server, model = PackedEnsemble(), StreamModel("", True)
    server.ready = True
    model.at(server)
    assert not model.refused(error)
    assert server.ready is not isinstance(error, Unavailable)


def test_a_server_is_asked_once_a_minute_and_a_second_after_an_error(monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr(stream_model.time, "monotonic", lambda: now_s)
    server = PackedEnsemble()
    assert [server.due(), server.due()] == [True, False]
    server.failed()
    assert not server.due()
    now_s += stream_model.ASK_AFTER_ERROR_S
    assert [server.due(), server.due()] == [True, False]
    now_s += stream_model.ASK_AGAIN_S / 2
    assert not server.due()
    now_s += stream_model.ASK_AGAIN_S / 2
    assert server.due()


def test_an_error_of_a_request_that_was_not_sent_anywhere_is_passed_on():
    assert not StreamModel("", True).refused(NotFound("no replica"))
    assert not StreamModel("mine", True).refused(InvalidArgument("max_tokens", "must be less"))

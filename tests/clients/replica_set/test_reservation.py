import pytest

from clients.replica_set import reservation as reservation_module
from clients.replica_set.costs import Costs
from clients.replica_set.reservation import Reservation, Work
from clients.wire.response_reader import ResponseReader
from contract.generation import FinishReason, GenerationRequest, TokenDelta, Usage

ASKED = GenerationRequest(text_input="x" * 400, max_tokens=50)


async def test_what_is_booked_is_settled_as_it_is_done_and_nothing_stays():
    work, costs = Work(), Costs()
    assert work.idle.is_set()
    first, second = Reservation(work, costs, ASKED), Reservation(work, costs, ASKED)
    each = costs.estimate(400, 50)
    assert (work.outstanding, work.pending_tokens) == (2, 2 * each.total) and not work.idle.is_set()
    first.began()
    assert work.pending_tokens == pytest.approx(2 * each.total - each.prefill)
    first.release()
    second.release()  # before its first token
    assert (work.outstanding, work.pending_tokens) == (0, 0.0) and work.idle.is_set()


async def test_an_answer_teaches_what_a_token_takes():
    work, costs = Work(), Costs()
    reservation, response = Reservation(work, costs, ASKED), ResponseReader(ASKED)
    reservation.release()
    reservation.learn(response)  # nothing came
    assert costs.estimate(400, 50) == Costs().estimate(400, 50)
    response.last = TokenDelta(finish_reason=FinishReason.STOP, usage=Usage(200, 10))
    reservation.learn(response)
    assert costs.estimate(400, 50).prefill == pytest.approx(200 * costs.prefill_weight)


def test_a_response_that_another_program_relayed_teaches_length_and_pace():
    work, known = Work(), Costs()
    for _ in range(16):
        reservation = Reservation(work, known, GenerationRequest("x" * 80, max_tokens=100))
        reservation.release()
        reservation.learn_seen(Usage(10, 5), decode_s=0.4)
    assert work.pace.tokens_per_s(1) == pytest.approx(10.0)
    assert known.estimate(80, 100).decode == pytest.approx(5.0)
    assert known.estimate(80, 100).prefill == pytest.approx(10 * Costs().prefill_weight)


def test_a_replica_that_tells_no_instants_is_measured_by_what_arrives(monkeypatch: pytest.MonkeyPatch):
    work, now_s = Work(), 100.0
    monkeypatch.setattr(reservation_module.time, "monotonic", lambda: now_s)
    for spread_s in [0.4] * 16 + [0.0001]:  # the last one's tokens came together, which says nothing
        reservation, response = Reservation(work, Costs(), ASKED), ResponseReader(ASKED)
        reservation.began()
        now_s += spread_s
        reservation.release()
        response.last = TokenDelta(finish_reason=FinishReason.STOP, usage=Usage(10, 5))
        reservation.learn(response)
    assert work.pace.tokens_per_s(1) == pytest.approx(10.0)

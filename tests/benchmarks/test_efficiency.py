import pytest

from benchmarks.efficiency import (
    ENGINE,
    ENSEMBLE,
    EVERY_TOKEN,
    PACKED,
    RAW,
    Batch,
    ServingPath,
    by_process,
    cpu_bound_ratio,
    described,
    goals,
    ratios,
    ttft_added_s,
)
from benchmarks.lengths import Fixed
from benchmarks.measurement import ServerUnderTest
from benchmarks.prompts import Prompts
from benchmarks.target import EnsembleTarget
from benchmarks.workload import Workload
from contract.errors import EngineFailed, Overloaded
from tests.fakes.replica import Script


def batch(
    path, at=32, round_=0, tokens=4000, wall_s=1.0, ttft_s=0.01, engine_s=1.6, serving_s=0.0, client_s=0.0, **more
):
    serving = {"tritonserver": serving_s / 2, "detokenizer": serving_s / 2}
    return Batch(path, at, round_, tokens, wall_s, [ttft_s] * 3, engine_s, serving, client_s, tokens, **more)


def test_a_ratio_compares_batches_of_one_round():
    batches = [batch(RAW, round_=0, wall_s=1.0), batch(RAW, round_=1, wall_s=2.0)]
    batches += [batch(ENSEMBLE, round_=0, wall_s=2.0), batch(ENSEMBLE, round_=1, wall_s=2.5)]
    assert ratios(batches, ENSEMBLE, 32) == [0.5, 0.8]


def test_the_engine_s_share_when_every_core_is_busy():
    batches = [batch(RAW, engine_s=1.6), batch(ENSEMBLE, engine_s=1.7, serving_s=0.3, client_s=0.1)]
    assert cpu_bound_ratio(batches, ENSEMBLE, 32) == pytest.approx(1.6 / 2.0)


def test_the_time_added_to_the_first_token_is_a_difference_of_medians_at_concurrency_1():
    batches = [batch(RAW, at=1, ttft_s=0.008), batch(ENSEMBLE, at=1, ttft_s=0.011), batch(RAW, ttft_s=9.0)]
    assert ttft_added_s(batches, ENSEMBLE) == pytest.approx(0.003)


@pytest.mark.parametrize("better", [True, False])
def test_every_goal_is_compared_with_its_figure(better):
    fine, coalesced, every = (0.9, 0.1, 0.7) if better else (2.0, 0.9, 1.2)
    batches = [batch(RAW), batch(RAW, at=1, ttft_s=0.008)]
    batches.append(batch(PACKED, wall_s=fine, serving_s=4 * coalesced, coalescing_p99_s=0.02 if better else 0.021))
    batches.append(batch(EVERY_TOKEN, serving_s=every))
    batches.append(batch(PACKED, at=1, ttft_s=0.0119 if better else 0.0121))
    batches.append(batch(EVERY_TOKEN, at=1, serving_s=every))
    found = goals("demo", batches)
    assert [met for *_, met in found] == [better] * 6
    assert {goal for _, _, goal, _ in found} == {0.7, 4.0, 200.0, 100.0, 20.0}
    assert goals("bench-160m", batches)[0][2] == 0.97 and goals("demo", [batch(RAW, at=8), batch(PACKED, at=8)]) == []


def test_the_tables_have_a_row_for_every_path_and_concurrency():
    batches = [batch(path, at) for path in (RAW, ENGINE, ENSEMBLE) for at in (1, 32)] + [batch(EVERY_TOKEN)]
    lines = described("demo", batches).splitlines()
    assert [line.split("  ")[1].strip() for line in lines[3:]] == [RAW, ENGINE, ENSEMBLE] * 2 + [EVERY_TOKEN]
    assert len(by_process(batches).splitlines()) == 2 + 3


@pytest.mark.slow
async def test_a_batch_with_a_failure_is_an_error(replica):
    server = replica(lambda seen: Script(refuse=Overloaded("full")))
    path = ServingPath("ensemble", ServerUnderTest(server.url), EnsembleTarget(server.url), Prompts())
    with pytest.raises(EngineFailed, match="ensemble: 2 requests failed, the first with Overloaded: full"):
        await path.batch(Workload(1, None, Fixed(3), Fixed(2)), 2, 0)
    await path.close()

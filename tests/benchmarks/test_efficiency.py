import pytest

from benchmarks.efficiency import (
    ENGINE,
    ENSEMBLE,
    EVERY_TOKEN,
    RAW,
    Wave,
    Way,
    by_process,
    cpu_bound_ratio,
    described,
    goals,
    ratios,
    ttft_added_s,
)
from benchmarks.lengths import Fixed
from benchmarks.measurement import Where
from benchmarks.prompts import Prompts
from benchmarks.target import Ensemble
from benchmarks.workload import Workload
from contract.errors import EngineFailed, Overloaded
from tests.fakes.replica import Script


def wave(path, at=32, turn=0, tokens=4000, wall_s=1.0, ttft_s=0.01, engine_s=1.6, serving_s=0.0, client_s=0.0, **more):
    serving = {"tritonserver": serving_s / 2, "detokenizer": serving_s / 2}
    return Wave(path, at, turn, tokens, wall_s, [ttft_s] * 3, engine_s, serving, client_s, tokens, **more)


def test_a_ratio_is_of_the_same_turn():
    waves = [wave(RAW, turn=0, wall_s=1.0), wave(RAW, turn=1, wall_s=2.0)]
    waves += [wave(ENSEMBLE, turn=0, wall_s=2.0), wave(ENSEMBLE, turn=1, wall_s=2.5)]
    assert ratios(waves, ENSEMBLE, 32) == [0.5, 0.8]


def test_what_is_left_to_an_engine_that_fills_every_core():
    waves = [wave(RAW, engine_s=1.6), wave(ENSEMBLE, engine_s=1.7, serving_s=0.3, client_s=0.1)]
    assert cpu_bound_ratio(waves, ENSEMBLE, 32) == pytest.approx(1.6 / 2.0)


def test_the_time_added_to_the_first_token_is_a_difference_of_medians_at_concurrency_1():
    waves = [wave(RAW, at=1, ttft_s=0.008), wave(ENSEMBLE, at=1, ttft_s=0.011), wave(RAW, ttft_s=9.0)]
    assert ttft_added_s(waves, ENSEMBLE) == pytest.approx(0.003)


@pytest.mark.parametrize("better", [True, False])
def test_every_goal_is_held_against_its_figure(better):
    fine, coalesced, every = (0.9, 0.1, 0.7) if better else (2.0, 0.9, 1.2)
    waves = [wave(RAW), wave(RAW, at=1, ttft_s=0.008)]
    waves.append(wave(ENSEMBLE, wall_s=fine, serving_s=4 * coalesced, coalescing_p99_s=0.02 if better else 0.021))
    waves.append(wave(EVERY_TOKEN, serving_s=every))
    waves.append(wave(ENSEMBLE, at=1, ttft_s=0.0119 if better else 0.0121))
    waves.append(wave(EVERY_TOKEN, at=1, serving_s=every))
    found = goals("demo", waves)
    assert [met for *_, met in found] == [better] * 6
    assert {goal for _, _, goal, _ in found} == {0.7, 4.0, 200.0, 100.0, 20.0}
    assert goals("bench-160m", waves)[0][2] == 0.95 and goals("demo", [wave(RAW, at=8), wave(ENSEMBLE, at=8)]) == []


def test_the_tables_have_a_row_for_every_path_and_concurrency():
    waves = [wave(path, at) for path in (RAW, ENGINE, ENSEMBLE) for at in (1, 32)] + [wave(EVERY_TOKEN)]
    lines = described("demo", waves).splitlines()
    assert [line.split("  ")[1].strip() for line in lines[3:]] == [RAW, ENGINE, ENSEMBLE] * 2 + [EVERY_TOKEN]
    assert len(by_process(waves).splitlines()) == 2 + 3


@pytest.mark.slow
async def test_a_wave_with_a_failure_is_none(replica):
    server = replica(lambda seen: Script(refuse=Overloaded("full")))
    way = Way("ensemble", Where(server.url), Ensemble(server.url), Prompts())
    with pytest.raises(EngineFailed, match="ensemble: 2 requests failed, the first with Overloaded: full"):
        await way.wave(Workload(1, None, Fixed(3), Fixed(2)), 2, 0)
    await way.close()

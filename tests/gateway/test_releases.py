"""Releases in a running gateway: who gets the candidate, when it is rolled back, and what the file says then."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from datetime import datetime

import aiohttp
import pytest

from contract.errors import EngineFailed, InvalidArgument, Overloaded
from gateway.config import release_file
from gateway.config.release import ReleaseRules, RollbackRules
from gateway.releases import Releases
from gateway.routing.replica_metrics import ReplicaMetrics
from gateway.telemetry.pool_outcomes import PoolOutcomes
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.running import Running, gateway, until

pytestmark = pytest.mark.slow

REQUEST = {"model": "demo", "prompt": "one two", "max_tokens": 4, "temperature": 0}
GOOD = Script((" a", " b"))
BAD = Script((" a", " b"), fail_after=0, error=EngineFailed("broken"))


def table(weight: float, kind: str = "canary", **rollback: object) -> str:
    limits = ", ".join(f"{name} = {str(value).lower()}" for name, value in rollback.items())
    text = f'[releases.r]\nkind = "{kind}"\nstable = "stable"\ncandidate = "next"\nweight = {weight}\n'
    return f"# mine\n{text}rollback = {{ {limits} }}\n"


@contextlib.asynccontextmanager
async def released(text: str, **options: object) -> AsyncIterator[tuple[Running, FakeReplica, FakeReplica]]:
    async with FakeReplica(lambda seen: GOOD) as stable, FakeReplica(lambda seen: GOOD) as candidate:
        where = f"stable={stable.url};next={candidate.url}"
        async with gateway(stable, candidate, replicas=where, config=text, breaker_failures=1000, **options) as running:
            yield running, stable, candidate


async def ask(running: Running, count: int, **headers: str) -> list[int]:
    sent = [running.post("/v1/completions", {**REQUEST, "prompt": f"p {n}"}, **headers) for n in range(count)]
    return [status for status, _, _ in await asyncio.gather(*sent)]


async def changed(running: Running, action: str, **fields: object) -> None:
    configuration = running.service.configuration
    assert configuration.path is not None
    release_file.apply(configuration.path, action, "r", fields)
    await configuration.reload()
    assert not configuration.problem


async def test_weights_move_requests_and_sessions_only_one_way():
    async with released(table(0)) as (running, stable, candidate):
        draw = running.service.replicas.draw
        pools: dict[str, str] = {}
        for weight in (0, 5, 25, 60, 100):
            await changed(running, "shift", to=weight)
            now = {session: draw("", session) for session in map(str, range(400))}
            assert all(now[session] == "next" for session, pool in pools.items() if pool == "next")
            share = sum(pool == "next" for pool in now.values()) / 4
            assert abs(share - weight) <= 10
            pools = now
        assert await ask(running, 20) == [200] * 20 and candidate.counts.started == 20
        await changed(running, "rollback")
        assert await ask(running, 20) == [200] * 20 and stable.counts.started == 20
        assert running.service.releases.status()[0]["state"] == "rolled back"


async def test_what_is_pinned_to_the_stable_pool_takes_part_and_what_is_pinned_elsewhere_does_not():
    async with released(table(100)) as (running, _, _):
        replicas = running.service.replicas
        assert [replicas.draw(pool) for pool in ("stable", "next", "")] == ["next"] * 3
        assert replicas.draw("stable", "", "next") == "stable"  # the candidate lost its replicas under the request
        assert replicas.serves("stable") and "next" in running.service.serving_pools()


async def test_a_response_cached_before_a_release_is_not_taken_for_the_candidates():
    async with released(table(0), metrics_interval_s=60.0) as (running, _, _):
        replicas = running.service.replicas
        for replica in replicas.all():
            replica.metrics = ReplicaMetrics(engine=f"engine of {replica.pool}")
        assert replicas.engine("stable") == "engine of stable"
        await changed(running, "shift", to=50)
        assert replicas.engine("stable") == ""  # of either: no key for a cache


async def test_a_candidate_that_is_down_gets_nothing():
    async with released(table(100)) as (running, stable, candidate):
        replicas = running.service.replicas
        for replica in replicas.ready_in("next"):
            replica.health = type(replica.health)(healthy=False)
        assert replicas.draw("") == "stable" and replicas.serves("")
        assert await ask(running, 5) == [200] * 5


async def test_what_fails_before_its_first_token_is_served_by_the_stable_pool_and_counts_against_the_candidate():
    async with released(table(100)) as (running, stable, candidate):
        candidate.script = lambda seen: Script(status_after=0)
        assert await ask(running, 2) == [200] * 2 and stable.counts.started == 2
        assert (await running.metrics())['trident_gateway_pool_calls_total{pool="next",result="error"}'] == 2


async def test_a_failing_candidate_is_rolled_back_in_memory_in_the_file_and_on_the_metrics_page():
    async with released(table(50)) as (running, stable, candidate):
        candidate.script = lambda seen: BAD
        assert set(await ask(running, 100)) == {200, 500}
        releases, path = running.service.releases, running.service.configuration.path
        releases.check(time.monotonic() + 10)
        assert releases.current["r"].rolled_back
        started = candidate.counts.started
        assert await ask(running, 50) == [200] * 50 and candidate.counts.started == started
        await until(lambda: 'rolled_back = "errors: ' in path.read_text())
        assert path.read_text().startswith("# mine\n[releases.r]")
        page = await running.metrics()
        assert page['trident_gateway_release_weight{release="r"}'] == 0
        assert page['trident_gateway_release_rolled_back{release="r"}'] == 1
        assert page['trident_gateway_pool_calls_total{pool="next",result="error"}'] == started
        # A new start is judged by what happens from then on.
        candidate.script = lambda seen: GOOD
        await changed(running, "start")
        running.service.releases.check(time.monotonic() + 10)
        assert not releases.current["r"].rolled_back and set(await ask(running, 60)) == {200}
        assert candidate.counts.started > started


async def test_where_the_file_cannot_be_written_the_rollback_holds_in_the_gateway(monkeypatch):
    async with released(table(50)) as (running, _, candidate):
        monkeypatch.setattr("gateway.config.release_file._replace", _refused)
        running.service.releases.roll_back("r", "by a test")
        await running.service.configuration.reload()
        assert await ask(running, 20) == [200] * 20 and candidate.counts.started == 0


async def test_an_operators_rollback_is_in_the_file_when_it_is_answered(monkeypatch):
    write = release_file._replace

    def slowly(path, text):
        time.sleep(0.5)
        write(path, text)

    async with released(table(50)) as (running, _, _):
        monkeypatch.setattr("gateway.config.release_file._replace", slowly)
        await running.service.change_release("r", "rollback", {"reason": "odd answers"})
        assert 'rolled_back = "odd answers"' in running.service.configuration.path.read_text()


def _refused(path, text):
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("both", [True, False])
async def test_errors_of_both_pools_and_measuring_only_roll_nothing_back(both):
    async with released(table(50, automatic=both)) as (running, stable, candidate):
        candidate.script = lambda seen: BAD
        stable.script = lambda seen: BAD if both else GOOD
        await ask(running, 100)
        running.service.releases.check(time.monotonic() + 10)
        assert not running.service.releases.current["r"].rolled_back


async def test_a_shadow_serves_nobody_and_is_measured_and_compared():
    async with released(table(100, "shadow")) as (running, stable, candidate):
        candidate.script = lambda seen: Script((" other", " text"))
        assert set(await ask(running, 10)) == {200}
        copies = running.service.metrics.outcomes.window
        await until(lambda: sum(copies("next", 60).copies[result] for result in ("differ", "full")) == 10)
        [status] = running.service.releases.status()
        assert status["candidate"]["output_tokens"] > 0 and status["candidate"]["ttft_p50_s"] > 0
        candidate.script = lambda seen: BAD
        for _ in range(6):
            await ask(running, 8)
        await until(lambda: running.service.metrics.outcomes.window("next", 300).errors >= 20)
        running.service.releases.check(time.monotonic() + 10)
        assert running.service.releases.current["r"].rolled_back and running.service.shadow.rules == {}


async def test_nobody_is_sent_back_to_a_pool_that_is_gone():
    async with released(table(100)) as (running, stable, candidate):
        candidate.script = lambda seen: BAD
        for replica in running.service.replicas.ready_in("stable"):
            replica.health = type(replica.health)(healthy=False)
        await ask(running, 40)
        releases = running.service.releases
        releases.check(time.monotonic() + 10)
        assert releases.judged()[0][2].reason and not releases.current["r"].rolled_back
        for replica in running.service.replicas.all():
            replica.health = type(replica.health)(healthy=True)
        releases.check(time.monotonic() + 20)
        assert releases.current["r"].rolled_back


async def test_refusals_of_a_pool_are_counted_there():
    async with released(table(100)) as (running, stable, candidate):
        candidate.script = lambda seen: Script(refuse=Overloaded("full"))
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{running.base_url}/v1/completions", json=REQUEST) as answer:
                await answer.read()
        page = await running.metrics()
        assert page['trident_gateway_pool_refusals_total{pool="next",reason="Overloaded"}'] >= 1
        refusals = running.service.metrics.outcomes.window("next", 60).refusals
        candidate.script = lambda seen: Script(refuse=InvalidArgument("max_tokens", "is too large"))
        assert await ask(running, 1) == [400]
        assert running.service.metrics.outcomes.window("next", 60).refusals == refusals + 1 >= 2
        running.service.metrics.refused("next", "budget")  # the tenant's, not the pool's
        assert running.service.metrics.outcomes.window("next", 60).refusals == refusals + 1


def test_the_figures_from_before_the_traffic_moved_are_compared_with():
    now, stopped = [1000.0], []
    outcomes = PoolOutcomes(lambda: now[0])
    releases = Releases(outcomes, lambda name, reason, judged: stopped.append(reason))
    rules = {"r": ReleaseRules(stable="a", candidate="b", weight=100, rollback=RollbackRules(long_s=60))}
    releases.change(rules)

    def happen(pool: str, first_s: float) -> None:
        for _ in range(50):
            outcomes.now(pool).requests += 1
            outcomes.now(pool).first.add(first_s)
        releases.check(now[0])

    happen("a", 0.1)
    now[0] += 1000
    happen("b", 0.15)
    assert not stopped
    now[0] += 5
    happen("b", 5.0)
    now[0] += 5
    happen("b", 5.0)
    assert stopped[0].startswith("first_token: 50 of 100")
    releases.change(rules)  # the same start: it stays
    assert releases.current["r"].rolled_back


def test_a_candidate_that_fails_long_after_the_traffic_moved_is_rolled_back():
    now, stopped = [1000.0], []
    outcomes = PoolOutcomes(lambda: now[0])
    releases = Releases(outcomes, lambda name, reason, judged: stopped.append(reason))
    releases.change({"r": ReleaseRules(stable="a", candidate="b", weight=100)})
    for second in range(700):
        now[0] += 1
        counts = outcomes.now("a" if second < 300 else "b")
        counts.requests += 1
        counts.errors += second >= 590 and second % 5 == 0
        releases.check(now[0])
    assert stopped


def test_what_the_candidate_did_before_its_release_is_not_counted():
    stopped: list[str] = []
    outcomes = PoolOutcomes(lambda: 1000.0)
    for pool, errors in (("a", 0), ("b", 60)):
        outcomes.now(pool).requests, outcomes.now(pool).errors = 100, errors
    releases = Releases(outcomes, lambda name, reason, judged: stopped.append(reason))
    releases.change({"r": ReleaseRules(stable="a", candidate="b", weight=50)})
    releases.check(1000.0)
    assert not stopped and outcomes.window("b", 300).requests == 0
    outcomes.now("b").requests, outcomes.now("b").errors = 100, 60
    releases.check(1005.0)
    assert stopped


def test_a_release_of_other_pools_is_not_judged_by_what_the_pools_before_did():
    outcomes = PoolOutcomes(lambda: 1000.0)
    releases = Releases(outcomes, lambda name, reason, judged: None)

    def happen(pool: str) -> None:
        for _ in range(50):
            outcomes.now(pool).requests += 1
            outcomes.now(pool).first.add(0.1)

    def burns(check_s: float, **fields: object) -> dict:
        releases.change({"r": ReleaseRules(**{"stable": "a", "candidate": "b", "weight": 100} | fields)})
        releases.check(check_s)
        return releases.judged()[0][2].burns

    happen("a")
    happen("b")
    assert "first_token" in burns(1000.0)
    assert burns(2000.0, weight=0, started=datetime(2026, 1, 1)) == {}  # nothing of this start yet
    happen("b")
    assert "first_token" in burns(3000.0, started=datetime(2026, 1, 1))  # beside the same stable pool
    assert "first_token" not in burns(4000.0, stable="c")  # of which nothing is known

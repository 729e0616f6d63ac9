"""Replicas that die, lie, stall and come back, as the gateway sees them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import aiohttp
import grpc
import grpc.aio
import pytest

from clients import NO_RETRY, AsyncClient
from clients.replica_set.costs import Costs
from contract.errors import DeadlineExceeded, EngineFailed, InvalidArgument, Unavailable
from gateway.config.tenant import Tenant
from gateway.routing.circuit_breaker import BreakerState, token_digest
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.running import gateway, until

pytestmark = pytest.mark.slow

REQUEST = {"model": "demo", "prompt": "one two", "max_tokens": 2}


async def test_a_request_goes_to_another_replica_when_one_dies_before_its_first_token():
    async with FakeReplica(lambda seen: Script((" a",), status_after=0)) as bad, FakeReplica() as good:
        async with gateway(bad, good, routing="round_robin") as running:
            for _ in range(8):
                status, _, body = await running.post("/v1/completions", REQUEST)
                assert status == 200 and body["choices"][0]["text"] == " one two"
            assert good.counts.finished == 8 and bad.counts.started >= 1
            assert (await running.metrics())["trident_gateway_retries_total"] == bad.counts.started


async def test_a_stream_that_has_begun_is_never_started_again():
    script = Script((" a", " b"), status_after=1)
    async with FakeReplica(lambda seen: script) as one, FakeReplica(lambda seen: script) as two:
        async with gateway(one, two) as running:
            url, body = running.base_url + "/v1/completions", {**REQUEST, "stream": True}
            async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
                message = await answer.text()
            assert '"text":" a"' in message and '"code":"unavailable"' in message and "[DONE]" not in message
            assert one.counts.started + two.counts.started == 1


async def test_the_breaker_keeps_requests_from_a_replica_that_fails_them():
    script = Script((), fail_after=0, error=EngineFailed("broken"))
    async with FakeReplica(lambda seen: script) as replica:
        async with gateway(replica, breaker_failures=3, breaker_open_s=60.0) as running:
            for _ in range(3):
                assert (await running.post("/v1/completions", REQUEST))[0] == 500
            status, headers, _ = await running.post("/v1/completions", REQUEST)
            assert status == 503 and "retry-after" in headers and replica.counts.started == 3
            assert running.service.replicas.all()[0].breaker.state is BreakerState.OPEN
            label = f'{{pool="",replica="{replica.url}"}}'
            found = {key: value for key, value in (await running.metrics()).items() if "breaker_state" in key}
            assert list(found.values()) == [2.0] and label.split('"')[3] in next(iter(found))
            assert (await running.get("/health/ready"))[0] == 503


async def test_a_trial_that_tells_nothing_does_not_open_the_breaker_again(caplog):
    """The next request is a trial at once, so nobody is told that it has opened."""
    broken, wrong = Script((), fail_after=0, error=EngineFailed("broken")), Script(refuse=InvalidArgument("x", "bad"))
    scripts = [broken, wrong, wrong, Script((" a",))]
    async with FakeReplica(lambda seen: scripts.pop(0)) as replica:
        async with gateway(replica, breaker_failures=1, breaker_open_s=0.01) as running:
            [known], told = running.service.replicas.all(), []
            running.service.replicas.on_open = told.append
            for expected in (500, 400, 400, 200):
                await until(lambda: known.ready(time.monotonic()))
                assert (await running.post("/v1/completions", REQUEST))[0] == expected
            assert told == [known.url] and caplog.text.count("the breaker opens") == 1


async def test_a_long_stream_as_the_trial_lets_others_in_at_its_first_token():
    scripts = [
        Script((), fail_after=0, error=EngineFailed("broken")),
        Script((" a", " b"), stall_after=1),
        Script((" c",)),
    ]
    async with FakeReplica(lambda seen: scripts.pop(0)) as replica:
        async with gateway(replica, breaker_failures=1, breaker_open_s=0.01) as running:
            [known], url = running.service.replicas.all(), running.base_url + "/v1/completions"
            assert (await running.post("/v1/completions", REQUEST))[0] == 500
            await until(lambda: known.ready(time.monotonic()))
            async with aiohttp.ClientSession() as session, session.post(url, json=REQUEST | {"stream": True}) as trial:
                await trial.content.readline()
                assert (await running.post("/v1/completions", REQUEST))[0] == 200


async def test_failures_among_successes_take_no_replica_out_unless_probes_fail():
    async with FakeReplica() as replica, gateway(replica, probe_interval_s=60.0) as running:
        [known] = running.service.replicas.all()
        for ok in (True, False):
            known.probed = ok
            for _ in range(3):
                known.ended(None, 0.0)
                known.ended(Unavailable("gone"), 0.0)
            assert known.health.healthy is ok


async def test_a_replica_whose_metrics_cannot_be_read_for_once_stays_what_it_is():
    async with FakeReplica(slots=2, packed=True) as replica:
        page = replica.metrics_page
        info = f'trident_engine_info{{engine="fake",manifest_sha256="{"a" * 64}"}} 1\n'
        replica.metrics_page = lambda: page() + info
        async with gateway(replica) as running:
            replicas = running.service.replicas
            [known] = replicas.all()
            await until(lambda: known.metrics.max_running == 2)
            replicas.costs_of(known)
            replica.metrics_page = lambda: 'nv_trt_llm_request_metrics{request_type="max"} -1\n'
            await until(lambda: not known.metrics.max_running)
            assert replicas.engine() == "a" * 64 and known.metrics.packed
            replicas.costs_of(known)
            assert list(replicas._costs) == ["a" * 64]
            replicas._costs["of an engine before"] = Costs(0.9)
            assert replicas.prompt_weight() == 0.1
            for _ in range(3):
                known.observe(False)
            assert replicas.engine() == "" and not known.metrics.packed


@pytest.mark.parametrize("fails", [False, True])
async def test_a_request_from_before_the_breaker_opened_does_not_decide_for_the_trial(fails: bool):
    gate, error = asyncio.Event(), EngineFailed("broken")
    old = Script((" a", " b"), gate=gate, gate_at=1, fail_after=2 if fails else None, error=error)
    scripts = [old, Script((), fail_after=0, error=error), Script((" a",), stall_after=0)]
    async with FakeReplica(lambda seen: scripts.pop(0)) as replica:
        async with gateway(replica, breaker_failures=1, breaker_open_s=0.01) as running:
            [known] = running.service.replicas.all()
            first = asyncio.ensure_future(running.post("/v1/completions", REQUEST))
            await until(lambda: replica.counts.running == 1)
            assert (await running.post("/v1/completions", REQUEST))[0] == 500
            await until(lambda: known.breaker.allows(time.monotonic()))
            trial = asyncio.ensure_future(running.post("/v1/completions", REQUEST))
            await until(lambda: known.breaker.state is BreakerState.HALF_OPEN)
            gate.set()
            assert (await first)[0] == (500 if fails else 200)
            await until(lambda: known.work.outstanding == 1)
            assert known.breaker.state is BreakerState.HALF_OPEN
            trial.cancel()
            await until(lambda: known.breaker.state is BreakerState.OPEN)


async def test_probes_take_a_replica_out_after_three_failures_and_bring_it_back_after_two_successes():
    async with FakeReplica() as replica, gateway(replica, probe_interval_s=0.03) as running:
        assert (await running.get("/health/ready"))[0] == 200
        before = replica.counts.health_checks
        replica.ready = False
        await until(lambda: not running.service.ready())
        assert replica.counts.health_checks - before >= 3
        replica.ready = True
        await until(running.service.ready)


async def test_a_deep_probe_finds_the_replica_that_makes_another_token():
    digest = token_digest([0])
    silent = Script((), fail_after=0, error=EngineFailed("weights are gone"))
    async with FakeReplica() as good, FakeReplica(lambda seen: silent) as bad:
        async with gateway(good, bad, deep_probes=True, deep_sha256=digest) as running:
            assert [replica.url for replica in running.service.replicas.ready()] == [good.url]
            status, text = await running.get("/health/deep")
            assert status == 200 and digest in text
        async with gateway(good, deep_probes=True, deep_sha256="0" * 64) as running:
            assert (await running.get("/health/ready"))[0] == 503 and (await running.get("/health/deep"))[0] == 503


async def test_a_replica_that_is_not_there_is_said_to_be_so_and_found_when_it_comes():
    async with gateway() as running:
        status, headers, body = await running.post("/v1/completions", REQUEST)
        assert status == 503 and headers["retry-after"] == "1" and "no healthy replica" in body["error"]["message"]


async def test_loads_are_read_from_the_replicas_metrics():
    script = Script((" a",), stall_after=0)
    async with FakeReplica(lambda seen: script, slots=2) as replica, gateway(replica) as running:
        await until(lambda: running.service.replicas.all()[0].metrics.max_running == 2)


@pytest.mark.parametrize("policy", ["scored", "least_outstanding", "token_aware", "session_affinity"])
async def test_a_burst_is_shared_by_slots_and_none_waits_while_there_is_room(policy: str):
    script = Script((" a",), stall_after=0)
    async with FakeReplica(lambda seen: script, slots=8) as small, FakeReplica(lambda seen: script, slots=64) as large:
        async with gateway(small, large, routing=policy) as running:
            replicas = running.service.replicas.all()
            await until(lambda: all(replica.metrics.max_running for replica in replicas))
            calls = [asyncio.ensure_future(running.post("/v1/completions", REQUEST)) for _ in range(60)]
            try:
                await until(lambda: small.counts.started + large.counts.started == 60)
                assert small.counts.running in (6, 7) and large.counts.running in (53, 54)
            finally:
                for call in calls:
                    call.cancel()
                await asyncio.gather(*calls, return_exceptions=True)


async def test_a_pick_is_explained_in_the_debug_log_and_only_there(caplog: pytest.LogCaptureFixture):
    async with FakeReplica(slots=3) as one, FakeReplica(slots=5) as two, gateway(one, two) as running:
        await until(lambda: all(replica.metrics.max_running for replica in running.service.replicas.all()))
        for level, picks in ((logging.INFO, 0), (logging.DEBUG, 1)):
            caplog.set_level(level, "gateway.routing.replicas")
            await running.post("/v1/completions", REQUEST)
            message = [record.fields for record in caplog.records if record.getMessage() == "replica picked"]
            assert len(message) == picks
        assert message[0]["chosen"] in (one.url, two.url) and set(message[0]["scores"]) == {one.url, two.url}
        assert message[0]["loads"][two.url].startswith("0/5 requests")


async def test_a_session_stays_at_one_replica():
    async with FakeReplica() as one, FakeReplica() as two, FakeReplica() as three:
        # A scrape during a request would show its replica busy to the next one, and affinity is bounded by load.
        async with gateway(one, two, three, metrics_interval_s=3600.0) as running:
            for _ in range(6):
                await running.post("/v1/completions", REQUEST, x_session_id="talk")
            assert sorted(replica.counts.started for replica in (one, two, three)) == [0, 0, 6]


async def test_a_pinned_tenant_goes_to_its_own_pool_and_no_other_does():
    class Keys:
        def tenant(self, api_key):
            return Tenant("acme", pool="own") if api_key == "acme" else Tenant("other")

    async with FakeReplica() as shared, FakeReplica() as own:
        pools = {"replicas": f"main={shared.url};own={own.url}", "pool_weights": {"main": "1", "own": "0"}}
        async with gateway(shared, own, keys=Keys(), **pools) as running:
            for _ in range(3):
                await running.post("/v1/completions", REQUEST, authorization="Bearer acme")
                await running.post("/v1/completions", REQUEST, authorization="Bearer x")
            assert own.counts.started == 3 and shared.counts.started == 3
            await own.stop()
            assert (await running.post("/v1/completions", REQUEST, authorization="Bearer acme"))[0] == 503


async def test_a_canary_gets_its_share():
    async with FakeReplica() as stable, FakeReplica() as canary:
        pools = {"replicas": f"stable={stable.url};canary={canary.url}"}
        async with gateway(stable, canary, pool_weights={"stable": "50", "canary": "50"}, **pools) as running:
            for _ in range(30):
                await running.post("/v1/completions", REQUEST)
            assert canary.counts.started > 3 and stable.counts.started > 3


async def test_metrics_that_come_in_pieces_are_read_whole_and_those_without_end_are_not():
    endless = False

    async def metrics(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
            for _ in range(10_000 if endless else 3):
                writer.write(b"# nothing\n" * 1000)
                await writer.drain()
                await asyncio.sleep(0 if endless else 0.02)
            writer.write(b'nv_trt_llm_request_metrics{request_type="max"} 7\n')
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(metrics, "127.0.0.1", 0)
    async with FakeReplica() as replica, server:
        replica.metrics_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/metrics"
        async with gateway(replica) as running:
            [known] = running.service.replicas.all()
            await until(lambda: known.metrics.max_running == 7)
            endless = True
            await until(lambda: known.metrics.max_running == 0, 30.0)


async def test_a_replica_that_answers_probes_with_rubbish_is_out_and_harms_no_other():
    answer = b"\xff\xff"

    async def ready(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return answer

    handler = {"ModelReady": grpc.unary_unary_rpc_method_handler(ready)}
    bad = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    bad.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handler),))
    url = f"127.0.0.1:{bad.add_insecure_port('127.0.0.1:0')}"
    await bad.start()
    try:
        async with FakeReplica() as good:
            async with gateway(good, replicas=f"{good.url},{url}", probe_interval_s=0.02) as running:
                await until(lambda: [one.url for one in running.service.replicas.ready()] == [good.url], 30.0)
                answer = b"\x08\x01"
                await until(lambda: len(running.service.replicas.ready()) == 2, 30.0)
    finally:
        await bad.stop(None)


@pytest.mark.parametrize("begun", [0, 1])
async def test_the_breaker_opens_for_a_replica_that_falls_silent_at_either_protocol(begun: int):
    async with FakeReplica(lambda seen: Script((" a", " b"), stall_after=begun)) as replica:
        async with gateway(replica, idle_timeout_s=0.1, breaker_failures=2, breaker_open_s=60.0) as running:
            [known] = running.service.replicas.all()
            async with aiohttp.ClientSession() as session:
                async with session.post(
                    running.base_url + "/v1/completions", json={**REQUEST, "stream": True}
                ) as message:
                    assert "silent" in await message.text()
            assert known.breaker.state is BreakerState.CLOSED and known.breaker.failures == 1
            async with AsyncClient(running.grpc_url, retry=NO_RETRY) as client:
                with pytest.raises(DeadlineExceeded, match="silent"):
                    async for _ in client.generate("x", max_tokens=2):
                        pass
            assert known.breaker.state is BreakerState.OPEN
            assert (await running.post("/v1/completions", REQUEST))[0] == 503


async def test_a_calibrated_replica_has_a_pace_and_a_weight_before_its_first_request():
    async with FakeReplica(slots=8) as plain, FakeReplica(slots=8) as calibrated:
        page = calibrated.metrics_page
        terms = {"step_s": 0.01, "sequence_s": 0.001, "prefill_token_s": 0.0005}
        lines = "".join(f'trident_engine_step_seconds{{term="{name}"}} {s}\n' for name, s in terms.items())
        engine = f'trident_engine_info{{engine="fake",manifest_sha256="{"a" * 64}"}} 1\n'
        calibrated.metrics_page = lambda: page() + engine + lines
        async with gateway(plain, calibrated) as running:
            replicas = running.service.replicas
            found = {replica.url: replica for replica in replicas.all()}
            known = found[calibrated.url]
            await until(lambda: known.metrics.step is not None)
            assert known.tokens_per_s(8) == pytest.approx(8 / 0.018) and found[plain.url].tokens_per_s(8) == 0
            assert replicas.costs_of(known).prefill_weight == pytest.approx(0.0005 * 8 / 0.018)
            assert replicas.costs_of(found[plain.url]).prefill_weight == 0.1
            name = f'trident_gateway_replica_tokens_per_second{{pool="",replica="{known.url}"}}'
            assert (await running.metrics())[name] == pytest.approx(8 / 0.018)


async def test_a_replica_that_lost_the_packed_ensemble_serves_the_stream_through_the_other_one():
    class Replaced(FakeReplica):
        models = ("ensemble", "engine")  # its metrics are those of the server before

    async with Replaced(packed=True) as replica, gateway(replica) as running:
        await until(lambda: running.service.replicas.ready()[0].metrics.packed)
        async with aiohttp.ClientSession() as session:
            for _ in range(2):
                body = REQUEST | {"stream": True}
                async with session.post(running.base_url + "/v1/completions", json=body) as answer:
                    assert '"text":" two"' in await answer.text()
        assert [seen.model for seen in replica.seen].count("ensemble") == 2 == replica.counts.started


async def test_a_stream_takes_the_packed_ensemble_where_the_replica_says_that_it_has_it():
    async with FakeReplica() as plain, FakeReplica(packed=True) as packed:
        async with gateway(plain, packed) as running:
            found = {replica.url: replica for replica in running.service.replicas.all()}
            await until(lambda: found[packed.url].metrics.packed)
            url = running.base_url + "/v1/completions"
            async with aiohttp.ClientSession() as session:
                while not (plain.seen and packed.seen):
                    async with session.post(url, json=REQUEST | {"stream": True}) as answer:
                        assert "[DONE]" in await answer.text()
            assert {seen.model for seen in plain.seen} == {"ensemble"}
            assert {seen.model for seen in packed.seen} == {"ensemble_packed"}
            plain.seen.clear()
            packed.seen.clear()
            async with AsyncClient(running.grpc_url, retry=NO_RETRY) as client:
                assert [delta async for delta in client.generate("x", max_tokens=2)]
            assert [seen.model for seen in plain.seen + packed.seen] == ["ensemble"]

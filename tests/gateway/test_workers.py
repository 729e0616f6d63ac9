"""A gateway of several processes, as its callers and its operator meet it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import aiohttp
import grpc
import grpc.aio
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gateway import workers
from gateway.config.configuration import Configuration
from gateway.config.pools import Pools
from gateway.config.settings import Settings
from gateway.usage.store import UsageStore
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.running import until
from tests.gateway.test_main import process

pytestmark = pytest.mark.slow
TOKEN = "operators-token-of-a-test-0123456789"
QUIET = {"LOG_LEVEL": "error"}


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


async def post(url: str, path: str = "/v1/completions", **body) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session:  # a connection of its own, which the kernel gives to any worker
        async with session.post(url + path, json={"model": "demo", "prompt": "x", "max_tokens": 8, **body}) as answer:
            return answer.status, await answer.text()


async def get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, await answer.text()


async def all_equal(count: int, get, fits) -> bool:
    return all([fits(await get()) for _ in range(count)])


async def eventually(condition, patience_s: float = 60.0) -> None:
    deadline_s = asyncio.get_running_loop().time() + patience_s
    while not await condition():
        assert asyncio.get_running_loop().time() < deadline_s, "it did not come to hold"
        await asyncio.sleep(0.02)


async def monitoring_url(gateway: asyncio.subprocess.Process) -> str:
    while not (found := re.search(rb"http://\S+(?=/metrics)", await gateway.stdout.readline())):
        pass
    return found[0].decode()


async def test_workers_share_ports_caps_metrics_and_stored_responses_and_one_that_dies_is_replaced(tmp_path: Path):
    config = tmp_path / "gateway.toml"
    config.write_text("[admission]\nmax_running = 3\n")
    script = Script((" a",) * 8, gap_s=0.02)
    async with FakeReplica(lambda seen: script) as replica:
        async with process(replica, WORKERS="3", CONFIG=str(config), **QUIET) as (gateway, url):
            monitoring, workers = await monitoring_url(gateway), children(gateway.pid)
            assert len(workers) == 3 and (await get(f"{monitoring}/health/live"))[0] == 200
            while (await get(f"{monitoring}/health/ready"))[0] != 200:
                await asyncio.sleep(0.05)
            ends = await asyncio.gather(*(post(url, stream=True) for _ in range(24)))
            assert all(status == 200 and text.count('" a"') == 8 for status, text in ends)
            assert replica.counts.most_running <= 3
            status, text = await post(url, "/v1/responses", input="x", prompt=None, max_tokens=None)
            assert status == 200, text
            name = re.search(r'"id":"(resp_[^"]+)"', text)[1]
            assert {(await get(f"{url}/v1/responses/{name}"))[0] for _ in range(12)} == {200}
            counted = 'requests_total{code="200",operation="text_completion",protocol="http"} 24.0'

            async def shown() -> bool:
                page = await metrics(monitoring)
                return counted in page and 'trident_gateway_pool_slots{pool=""} 3.0' in page

            await eventually(shown)  # a caller may have the end before it is counted
            os.kill(workers[2], signal.SIGSTOP)
            try:
                began_s = time.monotonic()
                up = re.findall(r"^trident_gateway_worker_up.* (\S+)$", await metrics(monitoring), re.MULTILINE)
                assert sorted(up) == ["0.0", "1.0", "1.0"]
                assert time.monotonic() - began_s < 20  # 0.8 s in fact; the worker stands still for ever
            finally:
                os.kill(workers[2], signal.SIGCONT)
            for worker in workers[:2]:
                os.kill(worker, signal.SIGKILL)
            while len(set(children(gateway.pid)) - set(workers)) < 2:
                await asyncio.sleep(0.05)
            ends = await asyncio.gather(*(post(url, stream=True) for _ in range(6)))
            assert [status for status, _ in ends] == [200] * 6
            total = re.search(
                r'requests_total{code="200",operation="text_completion".*} (\S+)', await metrics(monitoring)
            )
            assert 6 < float(total[1]) <= 30  # what was counted after the last reading went with the killed workers
            gateway.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(gateway.wait(), 60) == 0
            assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


async def test_sighup_makes_every_worker_read_the_file_again(tmp_path: Path):
    config = tmp_path / "gateway.toml"
    config.write_text("[admission]\nmax_running = 3\n")
    async with FakeReplica(lambda seen: Script()) as replica:
        async with process(replica, WORKERS="2", CONFIG=str(config)) as (gateway, _):
            gateway.send_signal(signal.SIGHUP)
            reads = 0
            while reads < 3:  # the parent's too
                reads += b"the configuration was read again" in await asyncio.wait_for(gateway.stderr.readline(), 60)


async def test_only_a_worker_that_served_is_killed_for_its_silence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "SILENT_S", 0.05)
    monkeypatch.setattr(workers, "READ_EVERY_S", 0.01)
    parent = workers.Workers(Settings(workers=1), Configuration(None, {}, Pools({})), 0, 0)
    own, end = socket.socketpair()
    await parent._hub.attach(0, own)
    worker = parent._processes[0] = await asyncio.create_subprocess_exec("sleep", "600")
    parent._started.set()  # it served before it was restarted
    watching = asyncio.create_task(parent._watch())
    try:
        await asyncio.sleep(0.5)
        assert worker.returncode is None
        parent._ready(0)
        assert await asyncio.wait_for(worker.wait(), 60) == -signal.SIGKILL
    finally:
        watching.cancel()
        await parent.close()
        end.close()


async def test_budgets_in_redis_leave_the_usage_database_to_others(tmp_path: Path):
    settings = Settings(workers=1, usage_db=tmp_path / "usage")
    config = tmp_path / "gateway.toml"
    config.write_text('[budgets]\nredis = "redis://localhost:1/0"\n')
    lock = UsageStore(settings).lock()
    parent = workers.Workers(settings, Configuration(config, {}, Pools({})), 0, 0)
    await parent.close()
    os.close(lock)


async def metrics(monitoring: str) -> str:
    return (await get(f"{monitoring}/metrics"))[1]


async def test_streams_end_before_the_workers_do_and_no_worker_outlives_its_parent():
    script = Script((" a",) * 40, gap_s=0.02)
    async with FakeReplica(lambda seen: script) as replica:
        async with process(replica, WORKERS="2", **QUIET) as (gateway, url):
            streams = [asyncio.create_task(post(url, stream=True, max_tokens=40)) for _ in range(6)]
            await until(lambda: replica.counts.running == 6)
            gateway.send_signal(signal.SIGTERM)
            ends = await asyncio.gather(*streams)
            assert all(text.count('" a"') == 40 and text.endswith("data: [DONE]\n\n") for _, text in ends)
            assert await asyncio.wait_for(gateway.wait(), 60) == 0
        async with process(replica, WORKERS="2", **QUIET) as (gateway, url):
            workers = children(gateway.pid)
            gateway.kill()
            await until(lambda: not any(_runs(worker) for worker in workers))
            await gateway.communicate()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_ctrl_c_which_reaches_every_process_cuts_no_stream():
    async with FakeReplica(lambda seen: Script((" a",) * 40, gap_s=0.05)) as replica:
        async with process(replica, WORKERS="2", **QUIET) as (gateway, url):
            streams = [asyncio.create_task(post(url, stream=True, max_tokens=40)) for _ in range(4)]
            await until(lambda: replica.counts.running == 4)
            for pid in (gateway.pid, *children(gateway.pid)):
                os.kill(pid, signal.SIGINT)
            ends = await asyncio.gather(*streams)
            assert all(text.count('" a"') == 40 for _, text in ends)
            assert await asyncio.wait_for(gateway.wait(), 60) == 0


async def test_every_worker_serves_grpc():
    async with FakeReplica(lambda seen: Script((" a",))) as replica:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        async with process(replica, WORKERS="2", GRPC_PORT=str(port), **QUIET):
            for _ in range(8):  # each over a connection of its own
                options = [("grpc.use_local_subchannel_pool", 1)]
                async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
                    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                    assert (await stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=30)).live


async def test_a_port_that_another_gateways_workers_have_is_named():
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:
        async with FakeReplica(lambda seen: Script((" a",))) as replica:
            port = str(taken.getsockname()[1])
            async with process(replica, WORKERS="2", HTTP_PORT=port) as (gateway, _):
                assert await asyncio.wait_for(gateway.wait(), 60) == 2
                error = (await gateway.stderr.read()).decode()
    assert f"TRIDENT_GATEWAY_HTTP_PORT: cannot listen at 127.0.0.1:{port}" in error


async def test_a_replica_that_registers_at_one_worker_is_known_to_all_and_so_is_its_withdrawal(tmp_path: Path):
    token = tmp_path / "token"
    token.write_text("operators-token-of-a-test-0123456789\n")
    headers = {"authorization": f"Bearer {token.read_text().strip()}"}

    async def admin(url: str, method: str, path: str, **options) -> dict:
        async with aiohttp.ClientSession(headers=headers) as session:
            async with session.request(method, f"{url}/admin/{path}", **options) as answer:
                assert answer.status == 200, await answer.text()
                return await answer.json()

    async with FakeReplica(lambda seen: Script((" a",))) as replica:
        settings = {"ADMIN_TOKEN_FILE": str(token), "REPLICAS": "file:///dev/null", "PROBE_INTERVAL_S": "0.1"}
        async with process(replica, WORKERS="3", **settings, **QUIET) as (gateway, url):
            beat = {"address": replica.url, "lease_s": 60}
            await admin(url, "PUT", "replicas/one", json=beat)

            def registered(names: list[str]):
                """Whether every worker says so; each request has a connection of its own."""
                fits = lambda found: [entry["name"] for entry in found["replicas"]] == names  # noqa: E731
                return all_equal(12, lambda: admin(url, "GET", "replicas"), fits)

            await eventually(lambda: registered(["one"]))
            assert [status for status, _ in await asyncio.gather(*(post(url) for _ in range(9)))] == [200] * 9
            await admin(url, "DELETE", "replicas/one")
            await eventually(lambda: registered([]))


async def test_a_worker_that_was_started_again_knows_registered_replicas_and_rollbacks(tmp_path: Path):
    token, config = tmp_path / "token", tmp_path / "gateway.toml"
    token.write_text(TOKEN)
    config.write_text('[releases.r]\nstable = "stable"\ncandidate = "next"\nweight = 100\n')
    (tmp_path / f".{config.name}.{socket.gethostname()}").mkdir()  # so that no rollback can be written into the file

    async def admin(url: str, method: str, path: str, body: dict) -> None:
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {TOKEN}"}) as session:
            async with session.request(method, f"{url}/admin/{path}", json=body) as answer:
                assert answer.status == 200, await answer.text()

    async with FakeReplica(lambda seen: Script((" a",))) as stable, FakeReplica(lambda seen: Script((" a",))) as other:
        pools = {"stable": stable, "next": other}
        where = ";".join(f"{pool}=registered" for pool in pools)
        settings = {"ADMIN_TOKEN_FILE": str(token), "CONFIG": str(config), "REPLICAS": where}
        async with process(stable, WORKERS="2", **settings, **QUIET) as (gateway, url):
            monitoring = await monitoring_url(gateway)
            for pool, replica in pools.items():
                await admin(url, "PUT", f"replicas/{pool}", {"address": replica.url, "pool": pool, "lease_s": 60})
            await admin(url, "POST", "releases/r", {"action": "rollback"})
            await eventually(lambda: all_equal(8, lambda: post(url), lambda answer: answer[0] == 200))
            killed, before = children(gateway.pid)[0], other.counts.started
            os.kill(killed, signal.SIGKILL)

            async def replaced() -> bool:
                up = re.findall(r"^trident_gateway_worker_up.* (\S+)$", await metrics(monitoring), re.MULTILINE)
                return up == ["1.0", "1.0"] and killed not in children(gateway.pid)

            await eventually(replaced)
            assert {(await post(url))[0] for _ in range(40)} == {200}  # half of them at the new one
            assert other.counts.started == before


class NeverAnswers(grpc.GenericRpcHandler):
    """A replica that takes calls. calls: so many."""

    calls = 0

    def service(self, handler_call_details):
        async def wait(request, context):
            self.calls += 1
            await asyncio.Event().wait()

        return grpc.unary_unary_rpc_method_handler(wait)


async def test_a_worker_that_starts_again_gets_no_connection_before_it_serves(tmp_path: Path):
    listed, hung, server = tmp_path / "replicas", NeverAnswers(), grpc.aio.server()
    server.add_generic_rpc_handlers((hung,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with FakeReplica(lambda seen: Script((" a",))) as replica:
        listed.write_text(replica.url)
        settings = {"REPLICAS": f"file://{listed}", "PROBE_TIMEOUT_S": "20", "WORKERS": "2"}
        async with process(replica, **settings, **QUIET) as (gateway, url):
            (tmp_path / "new").write_text(f"{replica.url}\n127.0.0.1:{port}\n")
            (tmp_path / "new").rename(listed)
            await until(lambda: hung.calls == 2, 60.0)
            os.kill(children(gateway.pid)[0], signal.SIGKILL)
            await until(lambda: hung.calls == 3, 60.0)  # the new one waits for its first probes
            ends = await asyncio.wait_for(asyncio.gather(*(post(url) for _ in range(20))), 10)
            assert [status for status, _ in ends] == [200] * 20
    await server.stop(None)


async def test_a_key_holds_and_ends_in_every_worker(tmp_path: Path):
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "gateway.toml").write_text("[orgs.acme.teams.research]\nweight = 2.0\n")
    files = {"ADMIN_TOKEN_FILE": "token", "CONFIG": "gateway.toml", "KEY_STORE": "keys.sqlite"}

    async def send(url: str, token: str, path: str, body: dict) -> tuple[int, dict]:
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {token}"}) as session:
            async with session.post(url + path, json=body) as answer:
                return answer.status, await answer.json()

    async with FakeReplica(lambda seen: Script((" a",))) as replica:
        settings = {name: str(tmp_path / file) for name, file in files.items()}
        async with process(replica, WORKERS="2", **settings, **QUIET) as (gateway, url):
            made = (await send(url, TOKEN, "/admin/keys", {"name": "acme/research/alice"}))[1]

            async def statuses() -> set[int]:
                body = {"model": "demo", "prompt": "x", "max_tokens": 1}
                return {(await send(url, made["key"], "/v1/completions", body))[0] for _ in range(12)}

            async def all_say(status: int) -> bool:
                return await statuses() == {status}

            await eventually(lambda: all_say(200))
            await send(url, TOKEN, "/admin/keys/acme/research/alice", {"action": "revoke"})
            await eventually(lambda: all_say(401))


async def test_a_release_is_measured_over_all_workers_and_rolled_back_in_all_of_them(tmp_path: Path):
    token, config = tmp_path / "token", tmp_path / "gateway.toml"
    token.write_text("operators-token-of-a-test-0123456789\n")
    config.write_text('[releases.r]\nstable = "stable"\ncandidate = "next"\nweight = 50\n')
    headers = {"authorization": f"Bearer {token.read_text().strip()}"}

    async def releases(url: str, **change: str) -> dict:
        async with aiohttp.ClientSession(headers=headers) as session:
            method, path = ("POST", "/admin/releases/r") if change else ("GET", "/admin/releases")
            async with session.request(method, url + path, json=change or None) as answer:
                return (await answer.json())["releases"][0]

    async with FakeReplica(lambda seen: Script((" a",))) as stable, FakeReplica(lambda seen: Script((" a",))) as other:
        where = f"stable={stable.url};next={other.url}"
        audit = tmp_path / "audit.jsonl"
        settings = {"ADMIN_TOKEN_FILE": str(token), "CONFIG": str(config), "REPLICAS": where, "AUDIT_LOG": str(audit)}
        async with process(stable, WORKERS="3", **settings, **QUIET) as (_, url):
            assert [status for status, _ in await asyncio.gather(*(post(url) for _ in range(40)))] == [200] * 40
            for _ in range(6):  # each over a connection of its own
                while True:
                    seen = await releases(url)
                    if seen["stable"]["requests"] + seen["candidate"]["requests"] == 40:
                        break
                    await asyncio.sleep(0.1)
            await releases(url, action="rollback", reason="a test")
            # The other workers are told over the parent, soon after the answer.
            await eventually(
                lambda: all_equal(9, lambda: releases(url), lambda found: found["rolled_back"] == "a test")
            )
            before = other.counts.started
            await asyncio.gather(*(post(url) for _ in range(20)))
            assert other.counts.started == before
            assert 'rolled_back = "a test"' in config.read_text()
            recorded = [one for one in map(json.loads, audit.read_text().splitlines()) if "release" in one["action"]]
            assert [(one["action"], one["reason"]) for one in recorded] == [("release.rollback", "a test")]


async def test_a_gateway_that_is_stopped_while_its_workers_start_ends_without_a_complaint():
    settings = {"REPLICAS": "127.0.0.1:1", "HTTP_PORT": "0", "GRPC_PORT": "0", "MONITORING_PORT": "0", "WORKERS": "2"}
    environ = os.environ | {f"TRIDENT_GATEWAY_{name}": value for name, value in (settings | QUIET).items()}
    gateway = await asyncio.create_subprocess_exec(sys.executable, "-m", "gateway", env=environ, stdout=-1, stderr=-1)
    await until(lambda: len(children(gateway.pid)) == 2)
    gateway.send_signal(signal.SIGTERM)
    _, stderr = await asyncio.wait_for(gateway.communicate(), 60)
    assert stderr == b""

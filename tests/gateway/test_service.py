"""The service: which models a tenant may use, admission while draining, and the rules it applies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contract.errors import InvalidArgument, NotFound, Overloaded, Unauthenticated, Unavailable
from gateway.choices import together
from gateway.config import pools
from gateway.config.configuration import Configuration
from gateway.config.settings import Settings
from gateway.config.tenant import Tenant
from gateway.routing.replica_metrics import ReplicaMetrics
from gateway.service import Service
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.generation_runtime import CONTEXT, grpc_context, requests
from tests.gateway.running import until


@contextlib.asynccontextmanager
async def service(replica: FakeReplica, tmp_path: Path, text: str = "", **options: Any) -> AsyncIterator[Service]:
    path = tmp_path / "gateway.toml"
    path.write_text(text)
    settings = Settings(replicas=replica.url, metrics_port=0, deep_probes=False, config=path, **options)
    made = Service(settings, Configuration(path, {}, pools.of(settings)))
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def test_an_admitted_request_is_generated_and_given_back(tmp_path: Path):
    async with FakeReplica() as replica, service(replica, tmp_path) as here:
        choices = await here.choices(requests(2), CONTEXT)
        assert [one.text for one in await together(choices, "r")] == [" one two one"] * 2
        choices.close()
        assert not here.live and here.admission.running == 0 and here.ready()


async def test_a_draining_gateway_refuses_and_is_not_ready(tmp_path: Path):
    async with FakeReplica() as replica, service(replica, tmp_path) as here:
        assert await here.drain(0.0) == 0
        with pytest.raises(Unavailable, match="stopping"):
            await here.choices(requests(), CONTEXT)
        assert here.draining and not here.ready()
        refused = here.metrics.registry.get_sample_value("trident_gateway_rejections_total", {"reason": "Unavailable"})
        assert refused == 1


async def test_a_request_that_waits_when_the_drain_ends_is_refused_and_charged_nothing(tmp_path: Path):
    rules = "[admission]\nmax_running = 1"
    async with FakeReplica(lambda seen: Script((" a",), stall_after=0)) as replica:
        async with service(replica, tmp_path, rules) as here:
            running = await here.choices(requests(), CONTEXT)
            waiting = asyncio.create_task(here.choices(requests(), CONTEXT))
            await until(lambda: here.admission.waiting == 1)
            assert await here.drain(0.01) == 1
            running.close()
            with pytest.raises(Unavailable):
                await waiting
            assert here.admission.running == here.admission.waiting == 0


async def test_a_caller_that_leaves_the_queue_is_counted_and_has_its_line_in_the_log(tmp_path: Path, caplog):
    async with FakeReplica(lambda seen: Script((" a",), stall_after=0)) as replica:
        async with service(replica, tmp_path, "[admission]\nmax_running = 1") as here:
            running = await here.choices(requests(), CONTEXT)
            waiting = asyncio.create_task(here.choices(requests(), CONTEXT))
            await until(lambda: here.admission.waiting == 1)
            with caplog.at_level(logging.INFO, "gateway.request"):
                waiting.cancel()
                await asyncio.wait({waiting})
            [line] = [record.fields for record in caplog.records if record.name == "gateway.request"]
            assert (line["request_id"], line["error_type"]) == (CONTEXT.request_id, "Cancelled")
            value = here.metrics.registry.get_sample_value
            assert value("trident_gateway_rejections_total", {"reason": "Cancelled"}) == 1
            assert waiting.cancelled() and here.admission.waiting == 0
            running.close()


async def test_models_are_checked_by_name_and_by_tenant(tmp_path: Path):
    async with FakeReplica() as replica, service(replica, tmp_path, model="public") as here:
        for known in ("public", "ensemble"):
            for tenant in (Tenant(), Tenant(models=("public",))):
                context = await here.routed(known, requests(), replace(CONTEXT, tenant=tenant))
                assert (context.model.name, context.tenant) == ("public", tenant)
        for name, tenant in (("other", Tenant()), ("public", Tenant(models=("another",)))):
            with pytest.raises(NotFound, match=f"the model '{name}' does not exist"):
                await here.routed(name, requests(), replace(CONTEXT, tenant=tenant))


async def test_adapters_that_replicas_report_are_models_and_may_be_all_that_a_tenant_may_use(tmp_path: Path):
    async with FakeReplica() as replica, service(replica, tmp_path, model="public") as here:
        assert [one.name for one in here.models.of(Tenant())] == ["public"]
        here.replicas.ready()[0].metrics = ReplicaMetrics(adapters=("poet", "lawyer"))
        assert [one.name for one in here.models.of(Tenant())] == ["public", "public:lawyer", "public:poet"]
        for name in ("public:poet", "ensemble:poet"):
            assert here.models.find(name, Tenant()).adapter == "poet"
            assert here.models.find(name, Tenant(models=("public:poet",))).adapter == "poet"
        for name in ("public", "public:lawyer"):
            with pytest.raises(NotFound, match="there is public:poet"):
                here.models.find(name, Tenant(models=("public:poet",)))


async def test_keys_decide_who_may_call_and_whether_cache_hits_are_reported(tmp_path: Path):
    salt, hashed = "00" * 16, "ab" * 32
    rules = f'salt = "{salt}"\n[orgs.acme.teams.r.keys.k]\nhash = "{hashed}"'
    async with FakeReplica() as replica, service(replica, tmp_path, rules) as here:
        with pytest.raises(Unauthenticated):
            await here.tenant({"authorization": "Bearer wrong"})
        assert not here.reports_cached_tokens
    async with FakeReplica() as replica, service(replica, tmp_path) as here:
        assert await here.tenant({}) == Tenant() and here.reports_cached_tokens


async def test_without_keys_one_tenant_may_use_all_slots_and_the_whole_queue(tmp_path: Path):
    """Of each class: what waits in one takes no room of a more urgent one."""
    rules = "[admission]\nmax_running = 4\nmax_waiting_per_class = 7\nmax_waiting_per_tenant = 1"
    async with FakeReplica() as replica, service(replica, tmp_path, rules) as here:
        applied = here.admission.slots("").rules
        assert (applied.tenant_share, applied.short_reserve, applied.max_waiting_per_tenant) == (1.0, 0.0, 70)


async def test_a_pool_whose_team_has_tokens_only_serves(tmp_path: Path):
    rules = '[identity.issuers.corp]\nissuer = "https://corp.example"\naudience = "a"\nteam = { claim = "team" }\n'
    rules += f'jwks_file = "{tmp_path}/jwks.json"\n[orgs.acme.teams.research]\npool = "own"\n'
    async with FakeReplica() as replica:
        own = f'[pools]\nown = {{ weight = 0, replicas = "{replica.url}" }}\n'
        own += 'public = { weight = 1, replicas = "127.0.0.1:1" }\n'
        async with service(replica, tmp_path, rules + own) as here:
            assert sorted(here.serving_pools()) == ["own", "public"]
            await until(here.ready)
        async with service(replica, tmp_path, own) as here:
            assert here.serving_pools() == ["public"] and not here.ready()


async def test_a_reason_that_the_file_cannot_hold_rolls_nothing_back(tmp_path: Path):
    rules = '[pools]\nstable = { replicas = "127.0.0.1:1" }\nnext = { replicas = "127.0.0.1:2" }\n'
    rules += '[releases.r]\nstable = "stable"\ncandidate = "next"\nweight = 5\n'
    async with FakeReplica() as replica, service(replica, tmp_path, rules) as here:
        for reason in ("x" * 501, 5, ["x"]):
            with pytest.raises(InvalidArgument, match="must be a text of at most 500 characters, got") as refused:
                await here.change_release("r", "rollback", {"reason": reason})
            assert refused.value.field == "reason" and not here.releases.current["r"].rolled_back
        await here.change_release("r", "rollback", {"reason": "x" * 500})
        assert "x" * 500 in (tmp_path / "gateway.toml").read_text()
        await until(lambda: len(here._background) == 2)  # what has been written is forgotten


async def test_kserve_requests_overflow_to_pools_only(tmp_path: Path):
    rules = '[overflow.far]\nurl = "http://127.0.0.1:1/v1"\nmodel = "m"\n[degradation]\noverflow = "far"'
    async with FakeReplica() as replica, service(replica, tmp_path, rules) as here:
        assert here.overflow.accepting(CONTEXT)("far", requests())
        assert not here.overflow.accepting(grpc_context())("far", requests())


async def test_pressure_refuses_with_a_reason(tmp_path: Path):
    rules = "[degradation]\nshorter_at = 0.001\noverflow_at = 0.001\nrefuse_at = 0.001"
    async with FakeReplica() as replica, service(replica, tmp_path, rules, max_in_flight=2) as here:
        held = await here.choices(requests(), CONTEXT)
        with pytest.raises(Overloaded) as caught:
            await here.choices(requests(), CONTEXT)
        held.close()
        assert caught.value.reason == "pressure"

"""Personas: how many come when, what their requests have in common, whose keys they have."""

from __future__ import annotations

import pytest

from contract.errors import InvalidArgument
from simulator.people import People
from tests.simulator.test_run import CHAT, POOL, simulated

KEYS = 'salt = "9f3c0d5e2a71b8446c1fd0a3e97b5a28"\n[orgs.acme.teams.web]\nweight = 2.0\n'


def test_the_day_thins_the_arrivals():
    day = [0.0] * 9 + [1.0] + [0.25] * 14
    people = {"chat": CHAT | {"arrivals": "poisson:2", "output": "5", "day": day}}
    for start_hour, share in ((0.0, 0.0), (9.0, 1.0), (10.0, 0.25)):
        result = simulated(1, personas=people, start_hour=start_hour, duration_s=60.0)
        assert len(result.everyone) == pytest.approx(120 * share, abs=45 * share)


def test_people_come_and_go():
    result = simulated(personas={"chat": CHAT | {"from_s": 4.0, "until_s": 8.0}})
    came = [record.intended_s - 1002.0 for record in result.everyone]
    assert came and 4.0 <= min(came) and max(came) < 8.0


def test_a_prompt_that_is_not_longer_than_its_prefix_has_one_token_more():
    found = simulated(duration_s=3.0, personas={"chat": CHAT | {"prefix_tokens": 100, "input": "50"}})
    assert found.everyone and {record.input_tokens for record in found.everyone} == {101}


def test_a_shared_prefix_is_cached_and_keeps_its_replica():
    alike = CHAT | {"prefix_tokens": 400, "prefix_groups": 2, "input": "450"}
    apart = CHAT | {"input": "450"}
    pools = {"main": POOL | {"replicas": 2}}
    first, other = (simulated(pools=pools, personas={"chat": one}) for one in (alike, apart))
    cached, plain = (sum(record.ttft_s or 0.0 for record in one.everyone) for one in (first, other))
    assert cached < 0.8 * plain


def test_retries_move_no_other_request_to_another_gateway(monkeypatch):
    first: dict[int, int] = {}
    attempt = People._attempt

    async def noted(self, number, record, *more):
        first.setdefault(record.nth, number)
        await attempt(self, number, record, *more)

    monkeypatch.setattr(People, "_attempt", noted)
    placed, refused = [], []
    for most in ("1", "1000"):
        gateway = {"count": 3, "settings": {"max_in_flight": most}}
        told = simulated(gateway=gateway, personas={"chat": CHAT | {"retries": 3}})
        placed.append(dict(first))
        refused.append(told.counts["refused: concurrency"])
        first.clear()
    assert refused[0] > 10 and not refused[1]
    assert placed[0] == placed[1] and set(placed[0].values()) == {0, 1, 2}


def test_the_people_of_a_policy_with_keys_need_one(tmp_path):
    (tmp_path / "gateway.toml").write_text(KEYS)
    with pytest.raises(InvalidArgument, match="personas.other.key: must be org/team/key"):
        people = {"chat": CHAT | {"key": "acme/web/a"}, "other": CHAT}
        simulated(folder=tmp_path, gateway={"policy": "gateway.toml"}, personas=people)


def test_short_keys_without_a_policy_are_of_different_tenants():
    people = {name: CHAT | {"key": name} for name in ("o/t/k", "a-b/c/d", "a/b-c/d")}
    result = simulated(duration_s=4.0, personas=people)
    assert len(result.everyone) > 20 and all(record.ok for record in result.everyone)


def test_classes_are_those_of_the_policy(tmp_path):
    (tmp_path / "gateway.toml").write_text("[classes.slow]\npriority = 7\nmax_tokens = 5\n")
    people = {"chat": CHAT | {"class": "slow", "output": "40"}}
    result = simulated(folder=tmp_path, gateway={"policy": "gateway.toml"}, personas=people)
    assert {record.tokens for record in result.everyone} == {5} and not result.violations


QUOTAS = """
salt = "9f3c0d5e2a71b8446c1fd0a3e97b5a28"
[orgs.acme]
tokens_per_day = 2000
money_per_day = 9.0
[models.small]
pools = ["main"]
price = { input = 0.5, cached = 0.1, output = 1.5 }
"""


def test_days_and_money_are_charged_exactly_to_personas_of_one_key(tmp_path):
    (tmp_path / "gateway.toml").write_text(QUOTAS)
    people = {name: CHAT | {"key": "acme/web/a"} for name in ("one", "two")}
    told = simulated(folder=tmp_path, gateway={"policy": "gateway.toml"}, personas=people, duration_s=6.0)
    assert told.counts["refused: quota"] > 5 and not told.violations
    assert 1000 < sum(record.input_tokens + record.tokens for record in told.everyone) <= 2000


def test_the_quota_of_a_day_is_new_at_the_simulations_midnight(tmp_path):
    (tmp_path / "gateway.toml").write_text(QUOTAS)
    people = {"chat": CHAT | {"key": "acme/web/a"}}
    told = simulated(folder=tmp_path, gateway={"policy": "gateway.toml"}, personas=people, start_hour=23.998)
    answered = [record.intended_s - 1002.0 for record in told.everyone if record.ok]
    assert min(answered) < 4 and max(answered) > 7.2 and told.counts["refused: quota"] > 5 and not told.violations


def test_cached_tokens_that_callers_are_not_told_are_charged_at_their_price(tmp_path):
    (tmp_path / "gateway.toml").write_text(QUOTAS.replace("2000", "20000") + "[orgs.other]\n")
    people = {"chat": CHAT | {"key": "acme/web/a", "prefix_tokens": 50}}
    told = simulated(folder=tmp_path, gateway={"policy": "gateway.toml"}, personas=people)
    assert all(record.ok for record in told.everyone) and not told.violations


def test_a_prompt_may_have_more_tokens_than_the_budget_took_it_for(tmp_path):
    limits = "[orgs.acme]\ntokens_per_minute = 300\nburst_tokens = 300\n"
    (tmp_path / "gateway.toml").write_text(KEYS.partition("[orgs")[0] + limits)
    people = {"chat": CHAT | {"key": "acme/web/a", "input": "600", "retries": 3}}
    told = simulated(folder=tmp_path, gateway={"policy": "gateway.toml"}, personas=people, duration_s=60.0)
    assert any(record.ok for record in told.everyone) and not told.violations


@pytest.mark.parametrize("persona", [{"key": "acme/web/a"}, {"day": [0.0] * 24}], ids=("refused", "away"))
def test_a_user_who_does_not_think_pauses_when_refused_or_away(tmp_path, persona):
    (tmp_path / "gateway.toml").write_text(QUOTAS.replace("2000", "200"))
    gateway = {"policy": "gateway.toml"} if "key" in persona else {}
    users = {"users": 2, "think_s": 0.0, "model": "small" if gateway else "", **persona}
    told = simulated(folder=tmp_path, gateway=gateway, personas={"chat": users}, duration_s=30.0)
    assert len(told.everyone) == pytest.approx(60 if gateway else 0, abs=4)


def test_who_would_come_again_after_the_run_is_refused(tmp_path):
    (tmp_path / "gateway.toml").write_text(QUOTAS)
    people = {"chat": CHAT | {"key": "acme/web/a", "retries": 1}}
    told = simulated(folder=tmp_path, gateway={"policy": "gateway.toml"}, personas=people)
    refused = [record for record in told.everyone if not record.ok]
    assert len(refused) > 5 and {record.error_type for record in refused} == {"quota"} and not told.violations


def test_a_wrong_policy_is_told_by_its_own_name_and_nothing_outside_is_used(tmp_path):
    (tmp_path / "gateway.toml").write_text("[orgs.acme]\ntokens = 1\n")
    with pytest.raises(InvalidArgument, match=rf"{tmp_path}/gateway.toml: orgs.acme.tokens: is not known"):
        simulated(folder=tmp_path, gateway={"policy": "gateway.toml"})
    with pytest.raises(InvalidArgument, match=r"gateway.settings.redis: must be left out in a simulation"):
        simulated(gateway={"settings": {"redis": "redis://127.0.0.1:1/0"}})

"""Keys, their hierarchy, what a wrong file says, and files that change while the gateway runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from contract.errors import InvalidArgument, Unauthenticated
from gateway.budgets import Level, Limits
from gateway.tenants import API_KEYS, KeyTable, TenantKeys, digest, new_key

SALT = "00112233445566778899aabbccddeeff"
ALICE, BOB = "tri-alice-alice-alice-alice", "tri-bob-bob-bob-bob-bob-bob"


def _hash(api_key: str) -> str:
    return digest(bytes.fromhex(SALT), api_key).hex()


FILE = f"""
salt = "{SALT}"
[orgs.acme]
tokens_per_minute = 6000
[orgs.acme.teams.research]
weight = 2
priority = 0
models = ["demo"]
pool = "gpu"
requests_per_minute = 60
burst_requests = 10
[orgs.acme.teams.research.keys.alice]
hash = "{_hash(ALICE)}"
max_in_flight = 2
[orgs.acme.teams.research.keys.bob]
hash = "{_hash(BOB)}"
"""


def _keys(tmp_path: Path, clock: Any, text: str = FILE, environment: str = "") -> TenantKeys:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    return TenantKeys(path, {API_KEYS: environment}, clock)


def test_a_key_leads_to_its_tenant_with_the_limits_of_every_level(tmp_path: Path, clock: Any) -> None:
    tenant = _keys(tmp_path, clock).tenant(ALICE)
    assert (tenant.name, tenant.weight, tenant.priority) == ("acme/research", 2.0, 0)
    assert (tenant.models, tenant.pool) == (("demo",), "gpu")
    assert tenant.levels == (
        Level("acme", Limits(tokens_per_minute=6000)),
        Level("acme/research", Limits(requests_per_minute=60, burst_requests=10)),
        Level("acme/research/alice", Limits(max_in_flight=2)),
    )


def test_keys_of_a_team_are_one_tenant(tmp_path: Path, clock: Any) -> None:
    keys = _keys(tmp_path, clock)
    assert keys.tenant(ALICE).name == keys.tenant(BOB).name
    assert keys.tenant(ALICE).levels[-1] != keys.tenant(BOB).levels[-1]


@pytest.mark.parametrize(
    "api_key", ["tri-mallory-mallory-mallory", ALICE[:-1], ALICE + " ", _hash(ALICE), "\udcff" * 3]
)
def test_an_unknown_key_is_told_nothing(tmp_path: Path, clock: Any, api_key: str) -> None:
    with pytest.raises(Unauthenticated) as refused:
        _keys(tmp_path, clock).tenant(api_key)
    assert str(refused.value) == "this API key is not known here"


def test_no_key_is_told_how_to_send_one(tmp_path: Path, clock: Any) -> None:
    with pytest.raises(Unauthenticated, match="no API key was sent"):
        _keys(tmp_path, clock).tenant("")


def test_a_hash_that_shares_its_beginning_is_not_taken_for_the_other(tmp_path: Path, clock: Any) -> None:
    right = digest(b"salt", ALICE)
    near = right[:8] + bytes(24)
    tenant = _keys(tmp_path, clock).tenant(ALICE)
    assert KeyTable(((b"salt", {near[:8]: (near, tenant)}),)).find(ALICE) is None
    assert KeyTable(((b"salt", {right[:8]: (right, tenant)}),)).find(ALICE) is tenant


def test_no_key_is_kept_in_the_clear(tmp_path: Path, clock: Any) -> None:
    keys = _keys(tmp_path, clock, environment=f"other/team/key={new_key()}")
    secret = keys._environment.partition("=")[2]
    assert secret not in repr(vars(keys)["_table"]) and ALICE not in repr(vars(keys)["_table"])


def test_keys_come_from_the_environment_too_and_share_the_files_limits(tmp_path: Path, clock: Any) -> None:
    carol = new_key()
    keys = _keys(tmp_path, clock, environment=f"acme/research/carol={carol}, new/team/dave={'d' * 20}")
    assert keys.tenant(carol).levels[0] == Level("acme", Limits(tokens_per_minute=6000))
    assert keys.tenant(carol).pool == "gpu"
    assert keys.tenant("d" * 20).levels == (Level("new"), Level("new/team"), Level("new/team/dave"))
    assert keys.tenant(ALICE).name == "acme/research"
    assert TenantKeys(None, {API_KEYS: f"a/b/c={carol}"}, clock).tenant(carol).name == "a/b"


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ("acme/alice=" + "k" * 30, "entry 1: allowed is ORG/TEAM/KEY="),
        ("a/b/c=short", "a/b/c: the API key is shorter than 20"),
        (f"a/b/c={'k' * 20},a/b/d={'k' * 20}", "a/b/d: the same API key stands there twice"),
    ],
)
def test_a_wrong_environment_is_named_without_the_key(clock: Any, environment: str, said: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        TenantKeys(None, {API_KEYS: environment}, clock)
    assert said in str(refused.value) and API_KEYS in str(refused.value)
    assert "kkkk" not in str(refused.value) and "short," not in str(refused.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("salt", "sal", "tenants.toml: sal: is not known; allowed are salt, orgs"),
        (SALT, "0011", "tenants.toml: salt: allowed are 16 bytes"),
        (SALT, "zz" * 16, "tenants.toml: salt: allowed are 16 bytes"),
        ("6000", "0", "orgs.acme.tokens_per_minute: got 0; allowed is an integer from 1"),
        ("6000", "true", "orgs.acme.tokens_per_minute: got True"),
        ("tokens_per_minute", "burst_tokens", "acme.burst_tokens: is allowed only together with tokens_per_minute"),
        ("weight = 2", "weight = nan", "orgs.acme.teams.research.weight: got nan"),
        ("weight = 2", 'wieght = "2"', "orgs.acme.teams.research.wieght: is not known"),
        ("priority = 0", "priority = 10", "research.priority: got 10; allowed is an integer from 0 to 9"),
        ('["demo"]', '"demo"', "orgs.acme.teams.research.models: got 'demo'; allowed is a list"),
        ('"gpu"', "3", "orgs.acme.teams.research.pool: got 3"),
        (_hash(ALICE), ALICE, "keys.alice.hash: allowed is an HMAC-SHA256"),
        (_hash(BOB), _hash(ALICE), "keys.bob.hash: is that of acme/research/alice too"),
        ("max_in_flight = 2", "max = 2", "keys.alice.max: is not known"),
        ("[orgs.acme]", '[orgs."a c"]\n[orgs.acme]', "orgs.a c: allowed in a name are letters"),
        ("[orgs.acme]", "[orgs]\nb = 1\n[orgs.acme]", "orgs.b: is not a table"),
        ("salt =", "salt", "cannot be read as TOML"),
    ],
)
def test_a_wrong_file_is_named_with_the_place(tmp_path: Path, clock: Any, old: str, new: str, said: str) -> None:
    assert old in FILE
    with pytest.raises(InvalidArgument) as refused:
        _keys(tmp_path, clock, FILE.replace(old, new, 1))
    assert said in str(refused.value) and "tenants.toml" in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path, clock: Any) -> None:
    with pytest.raises(InvalidArgument, match="nowhere.toml"):
        TenantKeys(tmp_path / "nowhere.toml", {}, clock)


def test_a_changed_file_is_read_again_within_its_interval(tmp_path: Path, clock: Any) -> None:
    keys = _keys(tmp_path, clock)
    (tmp_path / "tenants.toml").write_text(FILE.replace(_hash(BOB), _hash("tri-carol-carol-carol-carol")))
    assert keys.tenant(BOB)  # not looked at yet
    clock.advance(1)
    assert keys.tenant("tri-carol-carol-carol-carol").name == "acme/research"
    with pytest.raises(Unauthenticated):
        keys.tenant(BOB)


def test_a_file_that_became_wrong_changes_nothing_until_it_is_right_again(
    tmp_path: Path, clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    keys = _keys(tmp_path, clock)
    path = tmp_path / "tenants.toml"
    path.write_text("broken")
    clock.advance(1)
    assert keys.tenant(ALICE) and "cannot be read as TOML" in keys.problem
    path.unlink()
    clock.advance(1)
    assert keys.tenant(ALICE) and "tenants.toml" in keys.problem
    clock.advance(1)
    assert keys.tenant(ALICE)
    assert len([record for record in caplog.records if "stay as they were" in record.message]) == 2
    fresh = tmp_path / "fresh.toml"
    fresh.write_text(FILE.replace("6000", "7000"))
    os.replace(fresh, path)
    clock.advance(1)
    assert keys.tenant(ALICE).levels[0].limits.tokens_per_minute == 7000 and keys.problem == ""


def test_the_command_prints_a_key_that_its_hash_lets_in(tmp_path: Path, clock: Any) -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "gateway.tenants", SALT]
    printed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    salt, api_key, hashed = (line.split()[-1].strip('"') for line in printed.splitlines())
    keys = _keys(tmp_path, clock, FILE.replace(_hash(ALICE), hashed))
    assert salt == SALT and keys.tenant(api_key).levels[-1].name == "acme/research/alice"
    wrong = subprocess.run([*command[:-1], "xyz"], cwd=root, capture_output=True, text=True)
    assert wrong.returncode == 2 and "not hexadecimal" in wrong.stderr

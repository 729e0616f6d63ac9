"""The configuration file: what it says, what it says wrong, and a change under a running gateway."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from contract.errors import InvalidArgument, Unauthenticated
from gateway.config import configuration
from gateway.config.configuration import Configuration
from gateway.config.policy import DegradationRules
from gateway.config.pools import Pools
from gateway.config.tenant import Tenant
from gateway.config.tenants import API_KEYS, digest
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.running import gateway, until

ROOT = Path(__file__).resolve().parents[3]
SALT = "00112233445566778899aabbccddeeff"
ALICE, BOB = "tri-alice-alice-alice-alice", "tri-bob-bob-bob-bob-bob-bob"
POOLS = Pools({"stable": "", "draft": ""})


def keys(*api_keys: str, limits: str = "") -> str:
    """A file in which each key is one of a team of its own."""
    text = f'salt = "{SALT}"\n'
    for number, api_key in enumerate(api_keys):
        text += f"[orgs.o{number}]\n{limits}\n[orgs.o{number}.teams.t.keys.k]\n"
        text += f'hash = "{digest(bytes.fromhex(SALT), api_key).hex()}"\n'
    return text


def read(tmp_path: Path, text: str, environ: dict[str, str] | None = None) -> configuration.Reading:
    path = tmp_path / "gateway.toml"
    path.write_text(text)
    return configuration.read(path, environ or {}, POOLS)


def test_without_a_file_and_keys_everybody_is_one_tenant() -> None:
    found = Configuration(None, {}, Pools({}))
    assert found.keyless and found.tenant("") == found.tenant("anything") == Tenant()
    assert found.named("anonymous", "") == Tenant() and found.named("anonymous", "a/b/c") is None


def test_rules_are_read_and_names_with_a_dollar_come_from_the_environment(tmp_path: Path) -> None:
    text = """
    [admission]
    max_running = 12
    max_in_flight_of_class = { 2 = 5 }
    [degradation]
    max_tokens = 9
    overflow = "there"
    [overflow.there]
    url = "http://x/v1"
    model = "m"
    api_key = "$SECRET"
    [shadow]
    pool = "draft"
    fraction = 0.5
    """
    policy = read(tmp_path, text, {"SECRET": "hush"}).policy
    assert policy.admission.max_running == 12 and policy.admission.max_in_flight_of_class == {2: 5}
    assert policy.degradation == DegradationRules(max_tokens=9, overflow=("there",))
    assert policy.overflow["there"].api_key == "hush" and "hush" not in repr(policy)


@pytest.mark.parametrize(
    ("text", "text_shown"),
    [
        ("[admision]", "gateway.toml: admision: is not known: must be one of salt, orgs, admission"),
        ("[admission]\nmax_runing = 1", "admission.max_runing: is not known: must be one of max_running, tenant_share"),
        ("[admission]\nmax_running = -1", "admission.max_running: must be greater than or equal to 0"),
        ("[admission]\nmax_running = '4'", "admission.max_running: must be a valid integer"),
        ("[admission]\ntenant_share = 1.5", "admission.tenant_share: must be less than or equal to 1"),
        ("[admission]\nmax_wait_s = nan", "admission.max_wait_s: must be"),
        ("[admission.max_in_flight_of_class]\n11 = 1", "max_in_flight_of_class.11: must be less than"),
        ("admission = 3", "admission: must be"),
        ("[degradation]\nshorter_at = 0.9", "degradation: must rise"),
        ("[degradation]\noverflow = 'x'", "degradation.overflow: must be one of the targets none"),
        (
            "[degradation]\noverflow = ['a', 'b']\n[overflow.a]\npool = 'draft'",
            "degradation.overflow: must be one of the targets a, got 'b'",
        ),
        ("[degradation]\noverflow = 3", "degradation.overflow: must be a list"),
        ("[overflow.x]\nurl = 'http://x'", "overflow.x: must have either pool, or model together"),
        ("[overflow.x]\nurl = 'ftp://x'\nmodel = 'm'", "overflow.x.url: must match pattern"),
        (
            "[orgs.acme.teams.ai]\npool = 'nope'",
            "orgs.acme.teams.ai.pool: must be one of the pools stable, draft, got 'nope'",
        ),
        ("[overflow.x]\npool = 'nowhere'", "overflow.x.pool: must be one of the pools stable, draft, got 'nowhere'"),
        (
            "[overflow.x]\nurl = 'http://x'\nmodel = 'm'\napi_key = '$GONE'",
            "x.api_key: the environment has no",
        ),
        ("[budgets]\nredis = 'localhost'", "budgets.redis: must be a URL such as redis://HOST:PORT/0"),
        ("[budgets]\nredis = 'redis://h:99999'", "budgets.redis: must be a URL such as redis://HOST:PORT/0"),
        ("[shadow]\nfraction = 0.1", "shadow.pool: must be set"),
        ("[prices]\nreplica_hour = true", "prices.replica_hour: must be a valid number"),
        ("[reuse", "must be TOML"),
    ],
)
def test_a_wrong_rule_is_named_with_the_place_and_what_is_allowed(tmp_path: Path, text: str, text_shown: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        read(tmp_path, text)
    assert text_shown in str(refused.value) and "gateway.toml" in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="nowhere.toml"):
        Configuration(tmp_path / "nowhere.toml", {}, Pools({}))


async def test_a_file_that_became_wrong_changes_nothing_until_it_is_right_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text(keys(ALICE, limits="tokens_per_minute = 6000"))
    changes: list[int] = []
    found = Configuration(path, {}, POOLS)
    found.changed = lambda: changes.append(1)
    for broken in ("broken", keys(ALICE) + "[admission]\nmax_running = -1", "[admission]\nmax_running = 3"):
        path.write_text(broken)
        await found.poll()
        assert found.tenant(ALICE).levels[0].limits.tokens_per_minute == 6000 and found.problem
    assert "has no keys and issuers any more" in found.problem  # it would have been open to everybody
    path.unlink()
    await found.poll()
    await found.poll()
    assert found.tenant(ALICE) and "must be" in found.problem
    assert len([record for record in caplog.records if "stays as it was" in record.message]) == 4
    fresh = tmp_path / "fresh.toml"
    fresh.write_text(keys(BOB, limits="tokens_per_minute = 7000"))
    os.replace(fresh, path)
    await found.poll()
    assert found.tenant(BOB).levels[0].limits.tokens_per_minute == 7000 and found.problem == ""
    assert len(changes) == 1
    with pytest.raises(Unauthenticated):
        found.tenant(ALICE)


async def test_what_holds_until_the_next_start_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text("")
    found = Configuration(path, {}, POOLS)
    path.write_text("[reuse]\ncoalesce = false")
    await found.poll()
    assert any("[reuse] changed and holds from the next start on" in record.message for record in caplog.records)


@pytest.mark.slow
async def test_a_running_gateway_takes_over_a_changed_file() -> None:
    request_body = {"model": "demo", "prompt": "x", "max_tokens": 50}
    ladder = "[degradation]\nshorter_at = 0.001\noverflow_at = 0.9\nmax_tokens = 3\n"
    async with FakeReplica() as replica, gateway(replica, config=keys(ALICE), max_in_flight=4) as running:
        path = running.service.settings.config
        alice, bob = ({"authorization": f"Bearer {key}"} for key in (ALICE, BOB))
        assert (await running.post("/v1/completions", request_body, **alice))[0] == 200
        assert (await running.post("/v1/completions", request_body, **bob))[0] == 401
        path.write_text(keys(ALICE, BOB) + ladder)
        # Looked at once a second by itself.
        await until(lambda: len(running.service.configuration._reading.keys) == 2)
        replica.script = lambda seen: Script((" a",), stall_after=0)
        held = asyncio.ensure_future(running.post("/v1/completions", request_body, **alice))
        await until(lambda: replica.counts.running == 1)
        replica.script = lambda seen: Script(tuple(" a" for _ in range(seen.value("max_tokens"))))
        status, headers, body = await running.post("/v1/completions", request_body, **bob)
        assert status == 200 and headers["x-trident-degraded"] == "max_tokens=3"
        assert body["usage"]["completion_tokens"] == 3
        held.cancel()


def command(
    *arguments: str, environ: dict[str, str] | None = None, text_shown: str = ""
) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "gateway", *arguments],
        cwd=ROOT,
        env={**os.environ, **(environ or {})},
        input=text_shown,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_the_commands_make_keys_that_the_gateway_lets_in_and_say_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text(keys(ALICE))
    made = dict(line.split(maxsplit=1) for line in command("new-key", "--config", str(path)).stdout.splitlines())
    assert set(made) == {"key", "hash"}
    hashed = command("hash-key", environ={"TRIDENT_GATEWAY_CONFIG": str(path)}, text_shown=made["key"] + "\n").stdout
    assert hashed.strip() == f"hash {made['hash']}"
    path.write_text(f"{keys(ALICE)}[orgs.new.teams.t.keys.k]\nhash {made['hash']}\n")
    assert Configuration(path, {}, Pools({})).tenant(made["key"]).name == "new/t"
    fresh = command("new-key").stdout.splitlines()
    assert [line.split()[0] for line in fresh] == ["salt", "key", "hash"]
    good = command("check", environ={"TRIDENT_GATEWAY_CONFIG": str(path), API_KEYS: f"a/b/c={'k' * 20}"})
    assert good.returncode == 0 and "valid; 3 keys" in good.stdout
    path.write_text("[admission]\nmax_running = -1")
    wrong = command("check", environ={"TRIDENT_GATEWAY_CONFIG": str(path)})
    assert wrong.returncode == 2 and "admission.max_running" in wrong.stderr and "Traceback" not in wrong.stderr
    served = command(environ={"TRIDENT_GATEWAY_CONFIG": str(path)})
    assert served.returncode == 2 and json.dumps(served.stderr) == json.dumps(wrong.stderr)


@pytest.mark.slow
def test_the_first_key_comes_before_the_file_and_the_words_on_the_way_are_commands_that_work(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    first = command("new-key", "--config", str(path))
    assert first.returncode == 0 and f"{path} does not exist yet" in first.stderr and "Errno" not in first.stderr
    [key] = [line.split()[1] for line in first.stdout.splitlines() if line.startswith("key")]
    # The lines that it says to save are the file.
    path.write_text(first.stderr.partition(f"as {path}:\n")[2].partition("then serve")[0])
    assert Configuration(path, {}, Pools({})).tenant(key).name == "acme/research"
    assert key not in path.read_text()
    second = command("new-key", "--config", str(path))
    assert [line.split()[0] for line in second.stdout.splitlines()] == ["key", "hash"]
    assert f"Add to {path}" in second.stderr
    path.write_text("[admission]\n")
    third = command("new-key", "--config", str(path))
    assert "has no salt yet" in third.stderr and third.stdout.startswith("salt = ")
    misspelt = command("check", environ={"TRIDENT_GATEWAY_CONFIG": str(path), "TRIDENT_GATEWAY_HTP_PORT": "9000"})
    assert misspelt.returncode == 0 and "did you mean TRIDENT_GATEWAY_HTTP_PORT?" in misspelt.stderr


def test_a_file_that_is_not_there_is_not_called_bad_toml(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="must be a file that can be read: No such file or directory"):
        Configuration(tmp_path / "nowhere.toml", {}, Pools({}))


async def test_secrets_in_files_are_read_again_when_they_are_replaced(tmp_path: Path) -> None:
    upstream, keys_file = tmp_path / "upstream", tmp_path / "keys"
    upstream.write_text("one\n")
    keys_file.write_text(f"acme/research/alice={ALICE}\n")
    path = tmp_path / "gateway.toml"
    path.write_text(f'[overflow.far]\nurl = "http://h/v1"\nmodel = "m"\napi_key = "$file:{upstream}"\n')
    found = Configuration(path, {"TRIDENT_GATEWAY_API_KEYS_FILE": str(keys_file)}, POOLS)
    await found.poll()
    assert found.policy.overflow["far"].api_key == "one" and found.tenant(ALICE).name == "acme/research"
    upstream.write_text("two, longer")
    await found.poll()
    assert found.policy.overflow["far"].api_key == "two, longer"
    keys_file.write_text(f"acme/research/bob={BOB}")
    await found.poll()
    assert found.tenant(BOB) and not found.problem
    with pytest.raises(Unauthenticated):
        found.tenant(ALICE)
    upstream.unlink()
    await found.poll()
    assert "overflow.far.api_key: must be a file that can be read" in found.problem
    assert found.policy.overflow["far"].api_key == "two, longer"


async def test_a_secret_that_appears_after_the_file_that_names_it_is_taken(tmp_path: Path) -> None:
    path, upstream = tmp_path / "gateway.toml", tmp_path / "upstream"
    path.write_text("")
    found = Configuration(path, {}, POOLS)
    path.write_text(f'[overflow.far]\nurl = "http://h/v1"\nmodel = "m"\napi_key = "$file:{upstream}"\n')
    await found.poll()
    assert "overflow.far.api_key: must be a file that can be read" in found.problem
    upstream.write_text("hush")
    await found.poll()
    assert found.policy.overflow["far"].api_key == "hush" and not found.problem


async def test_a_file_of_keys_below_the_home_folder_is_read_again_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "keys").write_text(f"acme/research/alice={ALICE}")
    found = Configuration(None, {"TRIDENT_GATEWAY_API_KEYS_FILE": "~/keys"}, Pools({}))
    (tmp_path / "keys").write_text(f"acme/research/bob={BOB}")
    await found.poll()
    assert found.tenant(BOB)


async def test_an_error_that_was_not_foreseen_ends_no_watching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(configuration, "POLL_S", 0.001)
    path = tmp_path / "gateway.toml"
    path.write_text("")
    found = Configuration(path, {}, POOLS)

    def fail(*arguments: object) -> None:
        raise ZeroDivisionError("unforeseen")

    found.prepare = fail
    watching = asyncio.create_task(found.watch())
    path.write_text("[admission]\nmax_running = 3")
    await until(lambda: found.problem == "ZeroDivisionError: unforeseen")
    assert found.policy.admission.max_running == 0
    found.prepare, found.changed = lambda policy: None, fail
    path.write_text("[admission]\nmax_running = 44")
    await until(lambda: "was not taken over completely" in caplog.text)
    found.changed = lambda: None
    path.write_text("[admission]\nmax_running = 555")
    await until(lambda: found.policy.admission.max_running == 555)
    assert not watching.done() and not found.problem
    watching.cancel()


ISSUER = '[identity.issuers.corp]\nissuer = "https://corp.example"\naudience = "a"\nteam = { claim = "team" }\n'
KEY_STORE = {"TRIDENT_GATEWAY_KEY_STORE": "keys.sqlite"}


@pytest.mark.parametrize(("issuer", "environ"), [(ISSUER, {}), ("", KEY_STORE)])
def test_teams_without_keys_in_the_file_may_have_callers_where_there_are_issuers_or_stored_keys(
    tmp_path: Path, issuer: str, environ: dict[str, str]
) -> None:
    team = '[orgs.acme.teams.research]\nsamples = true\npool = "draft"\n'
    for name in ("acme", "acme/research", "acme/research/corp:alice"):
        text = f'{issuer}{team}[tracing]\ncontent = ["{name}"]\n'
        assert read(tmp_path, text, environ).policy.tracing.content == (name,)
        with pytest.raises(InvalidArgument, match="tracing.content: must be organisations, teams or keys of the file"):
            read(tmp_path, text.replace(issuer, ""))
    for name in ("anonymous", "other", "acme/sales"):
        with pytest.raises(InvalidArgument, match="tracing.content: must be organisations, teams or keys of the file"):
            read(tmp_path, f'{issuer}{team}[tracing]\ncontent = ["{name}"]\n', environ)
    path = tmp_path / "gateway.toml"
    path.write_text(issuer + team)
    found = Configuration(path, environ, POOLS)
    found.stored_keys = bool(environ)
    assert found.sampled() == {"acme/research"} and found.pinned_pools() == {"draft"}
    path.write_text(team)
    alone = Configuration(path, {}, POOLS)
    assert not alone.sampled() and not alone.pinned_pools()  # nobody can be of the team


def test_teams_that_are_as_the_default_team_are_sampled_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text(f'{ISSUER}[identity]\ndefault_team = "acme/guests"\n[orgs.acme.teams.guests]\nsamples = true\n')
    assert Configuration(path, {}, POOLS).sampled() == {"acme/guests", "teams that are not in the file"}


async def test_keys_in_a_file_need_no_configuration_file(tmp_path: Path) -> None:
    keys_file = tmp_path / "keys"
    keys_file.write_text(f"acme/research/alice={ALICE}")
    found = Configuration(None, {"TRIDENT_GATEWAY_API_KEYS_FILE": str(keys_file)}, Pools({}))
    keys_file.write_text(f"acme/research/bob={BOB}, a/b/c={'k' * 20}")
    await found.poll()
    assert found.tenant(BOB)
    with pytest.raises(Unauthenticated):
        found.tenant(ALICE)


def test_tenants_that_hooks_name_must_exist(tmp_path: Path):
    hook = '[hooks.a]\nuse = "x"\ntenants = ["{name}"]\n'
    for name in ("o0", "o0/t", "o0/t/k", "o0/t/made-later"):
        assert read(tmp_path, keys(ALICE) + hook.format(name=name)).policy.hooks["a"].tenants == (name,)
    assert read(tmp_path, '[tracing]\ncontent = ["anonymous"]').policy.tracing.content == ("anonymous",)
    for text in (keys(ALICE) + hook.format(name="o1"), keys(ALICE) + hook.format(name="o0/s"), hook.format(name="o0")):
        with pytest.raises(InvalidArgument, match="hooks.a.tenants: must be organisations, teams or keys of the file"):
            read(tmp_path, text)

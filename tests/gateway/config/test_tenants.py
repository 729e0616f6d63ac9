"""Keys, their hierarchy, what a wrong file says, and files that change while the gateway runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract.errors import InvalidArgument, Unauthenticated
from gateway.config import configuration
from gateway.config.pools import Pools
from gateway.config.tenant import Level, Limits, Quota
from gateway.config.tenants import API_KEYS, KeyTable, digest, new_key

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


def _keys(tmp_path: Path, text: str = FILE, environment: str = "") -> KeyTable:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    return configuration.read(path, {API_KEYS: environment}, Pools({"": "", "gpu": ""})).keys


def test_a_key_leads_to_its_tenant_with_the_limits_of_every_level(tmp_path: Path) -> None:
    tenant = _keys(tmp_path).tenant(ALICE)
    assert (tenant.name, tenant.weight, tenant.priority) == ("acme/research", 2.0, 0)
    assert (tenant.models, tenant.pool) == (("demo",), "gpu")
    assert tenant.levels == (
        Level("acme", Limits(tokens_per_minute=6000)),
        Level("acme/research", Limits(requests_per_minute=60, burst_requests=10)),
        Level("acme/research/alice", Limits(max_in_flight=2)),
    )


@pytest.mark.parametrize(("given", "managed"), [("", ""), ("team", "acme/research"), ("org", "acme")])
def test_a_key_may_manage_its_team_or_organisation(tmp_path: Path, given: str, managed: str) -> None:
    keys = _keys(tmp_path, f'{FILE}administers = "{given}"')
    assert keys.tenant(BOB).administers == managed and any(one.administers for one in keys.tenants()) == bool(given)
    with pytest.raises(InvalidArgument, match="keys.bob.administers: must be '', 'team' or 'org'"):
        _keys(tmp_path, f'{FILE}administers = "all"')


def test_keys_of_a_team_are_one_tenant(tmp_path: Path) -> None:
    keys = _keys(tmp_path)
    assert keys.tenant(ALICE).name == keys.tenant(BOB).name
    assert keys.tenant(ALICE).levels[-1] != keys.tenant(BOB).levels[-1]


@pytest.mark.parametrize(
    "api_key", ["tri-mallory-mallory-mallory", ALICE[:-1], ALICE + " ", _hash(ALICE), "\udcff" * 3]
)
def test_an_unknown_key_is_told_nothing(tmp_path: Path, api_key: str) -> None:
    with pytest.raises(Unauthenticated) as refused:
        _keys(tmp_path).tenant(api_key)
    assert str(refused.value) == "this API key is not known here"


def test_no_key_is_told_how_to_send_one(tmp_path: Path) -> None:
    with pytest.raises(Unauthenticated, match="no API key was sent"):
        _keys(tmp_path).tenant("")


def test_a_hash_that_shares_its_beginning_is_not_taken_for_the_other(tmp_path: Path) -> None:
    right = digest(b"salt", ALICE)
    near = right[:8] + bytes(24)
    tenant = _keys(tmp_path).tenant(ALICE)
    with pytest.raises(Unauthenticated):
        KeyTable(((b"salt", {near[:8]: (near, tenant)}),)).tenant(ALICE)
    assert KeyTable(((b"salt", {right[:8]: (right, tenant)}),)).tenant(ALICE) is tenant


def test_no_key_is_kept_in_the_clear(tmp_path: Path) -> None:
    secret = new_key()
    keys = _keys(tmp_path, environment=f"other/team/key={secret}")
    assert len(keys) == 3 and secret not in repr(keys) and ALICE not in repr(keys)


def test_keys_come_from_the_environment_too_and_share_the_files_limits(tmp_path: Path) -> None:
    carol = new_key()
    keys = _keys(tmp_path, environment=f"acme/research/carol={carol}, new/team/dave={'d' * 20}")
    assert keys.tenant(carol).levels[0] == Level("acme", Limits(tokens_per_minute=6000))
    assert keys.tenant(carol).pool == "gpu"
    assert keys.tenant("d" * 20).levels == (Level("new"), Level("new/team"), Level("new/team/dave"))
    assert keys.tenant(ALICE).name == "acme/research"
    alone = configuration.read(None, {API_KEYS: f"a/b/c={carol}"}, Pools({})).keys
    assert alone.tenant(carol).name == "a/b" and alone.named("a/b/c").levels[-1].name == "a/b/c"
    assert alone.named("a/b/d") is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ("acme/alice=" + "k" * 30, "entry 1: must be ORG/TEAM/KEY="),
        ("a/b/c=short", "a/b/c: the API key is shorter than 20"),
        (f"a/b/c={'k' * 20},a/b/d={'k' * 20}", "a/b/d: the same API key stands there twice"),
    ],
)
def test_a_wrong_environment_is_named_without_the_key(environment: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        configuration.read(None, {API_KEYS: environment}, Pools({}))
    assert message in str(refused.value) and API_KEYS in str(refused.value)
    assert "kkkk" not in str(refused.value) and "short," not in str(refused.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("salt", "sal", "tenants.toml: sal: is not known: must be one of salt, orgs, admission"),
        (SALT, "0011", "tenants.toml: salt: must be 16 bytes"),
        (SALT, "zz" * 16, "tenants.toml: salt: must be 16 bytes"),
        ("6000", "0", "orgs.acme.tokens_per_minute: must be greater than or equal to 1"),
        ("6000", "true", "orgs.acme.tokens_per_minute: must be a valid integer"),
        ("tokens_per_minute", "burst_tokens", "acme.burst_tokens: is allowed only together with tokens_per_minute"),
        ("weight = 2", "weight = nan", "teams.research.weight: must be less than or equal to 1000"),
        (
            "weight = 2",
            f"weight = 1{'0' * 400}",
            "teams.research.weight: must be a valid number",
        ),
        ("weight = 2", 'wieght = "2"', "orgs.acme.teams.research.wieght: is not known"),
        ("priority = 0", "priority = 10", "research.priority: must be less than or equal to 9"),
        ('["demo"]', '"demo"', "orgs.acme.teams.research.models: must be a list"),
        ('"gpu"', "3", "orgs.acme.teams.research.pool: must be a valid string"),
        (_hash(ALICE), ALICE, "keys.alice.hash: must be an HMAC-SHA256"),
        (_hash(BOB), _hash(ALICE), "keys.bob.hash: is that of acme/research/alice too"),
        ("max_in_flight = 2", "max = 2", "keys.alice.max: is not known"),
        ("[orgs.acme]", '[orgs."a c"]\n[orgs.acme]', "orgs.a c: must match pattern '^[A-Za-z0-9]"),
        ("[orgs.acme]", "[orgs]\nb = 1\n[orgs.acme]", "orgs.b: must be a table"),
        ("salt =", "salt", "must be TOML"),
        ("6000", "6" * 5000, "must be TOML"),
        ("6000", "[" * 20_000, "must be TOML"),
    ],
)
def test_a_wrong_file_is_named_with_the_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in FILE
    with pytest.raises(InvalidArgument) as refused:
        _keys(tmp_path, FILE.replace(old, new, 1))
    assert message in str(refused.value) and "tenants.toml" in str(refused.value)


def test_a_key_in_place_of_its_table_is_not_shown(tmp_path: Path) -> None:
    text = f'[orgs.acme.teams.research.keys]\nalice = "{ALICE}"\n'
    with pytest.raises(InvalidArgument, match="orgs.acme.teams.research.keys.alice: must be a table$"):
        _keys(tmp_path, text)


def _with_acme(tmp_path: Path, text: str, environ: dict[str, str] | None = None) -> KeyTable:
    path = tmp_path / "quotas.toml"
    key = f'[orgs.acme.teams.research.keys.alice]\nhash = "{_hash(ALICE)}"\n'
    path.write_text(f'salt = "{SALT}"\n[budgets]\ntime_zone = "Asia/Tokyo"\n[orgs.acme]\n{text}\n{key}')
    environ = environ if environ is not None else {"TRIDENT_GATEWAY_USAGE_DB": "/db"}
    return configuration.read(path, environ, Pools({"": "127.0.0.1:1"})).keys


def test_days_and_months_have_the_zone_of_their_level_or_of_the_one_above(tmp_path: Path) -> None:
    text = """money_per_month = 12.345678
soft_tokens_per_day = 7
warn_at = 0.5
[[orgs.acme.limits]]
model = "large"
money_per_day = 3
time_zone = "UTC"
[orgs.acme.teams.research]
time_zone = "Europe/Berlin"
tokens_per_month = 9
"""
    org, team, key = _with_acme(tmp_path, text).tenant(ALICE).levels
    assert org.limits.quotas == (
        Quota("day", False, 7, True, "Asia/Tokyo", 0.5),
        Quota("month", True, 12_345_678, False, "Asia/Tokyo", 0.5),
    )
    (scope,) = org.scopes
    assert scope.model == "large" and scope.limits.quotas == (Quota("day", True, 3_000_000, False, "UTC", 0.5),)
    assert team.limits.quotas == (Quota("month", False, 9, False, "Europe/Berlin", 0.5),) and not key.quotas


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "money_per_day = 0.0000001",
            "acme.money_per_day: must be a sum above 0, 1000000000 at most, with at most 6",
        ),
        ("money_per_day = -1", "orgs.acme.money_per_day: must be a sum above 0"),
        ("money_per_day = nan", "orgs.acme.money_per_day: must be a sum above 0"),
        ('money_per_day = "5"', "orgs.acme.money_per_day: must be a sum above 0"),
        ("tokens_per_day = 1.5", "orgs.acme.tokens_per_day: must be a valid integer"),
        ("tokens_per_month = true", "orgs.acme.tokens_per_month: must be a valid integer"),
        ('time_zone = "Mars"', "orgs.acme.time_zone: must be an IANA time zone such as Europe/Berlin, got 'Mars'"),
        ("warn_at = 1.5", "orgs.acme.warn_at: must be less than or equal to 1"),
        ("[[orgs.acme.limits]]\ntokens_per_day = 1", "orgs.acme.limits.0: must have model or endpoint, or both"),
        ('[[orgs.acme.limits]]\nendpoint = "talk"', "limits.0.endpoint: must be 'chat', 'responses'"),
        ('[[orgs.acme.limits]]\nmodel = "m"\nmax_in_flight = 1', "limits.0.max_in_flight: is not known"),
        (
            '[[orgs.acme.limits]]\nmodel = "m"\n[[orgs.acme.limits]]\nmodel = "m"',
            "must have one table for model=m",
        ),
        ("limits = 3", "orgs.acme.limits: must be a list"),
        ("tokens_per_year = 1", "orgs.acme.tokens_per_year: is not known: must be one of tokens_per_minute"),
    ],
)
def test_a_wrong_budget_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        _with_acme(tmp_path, text)
    assert message in str(refused.value)


def test_days_and_months_need_a_place_that_outlives_a_restart(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"orgs.acme: days and months need TRIDENT_GATEWAY_USAGE_DB, or \[bud"):
        _with_acme(tmp_path, "soft_tokens_per_day = 1", {})


def test_money_for_models_without_a_price_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    models = '[models.a]\npools = [""]\nprice = {}\n'
    for text, told in (
        ("tokens_per_day = 1", None),
        ("money_per_day = 1", "all models have no price"),
        ('money_per_day = 1\n[models.b]\npools = [""]', "b have no price"),
        (f"money_per_day = 1\n{models}", None),
    ):
        caplog.clear()
        path = tmp_path / "priced.toml"
        path.write_text(f'salt = "{SALT}"\n[orgs.acme]\n{text}\n[orgs.acme.teams.r.keys.a]\nhash = "{_hash(ALICE)}"\n')
        configuration.read(path, {"TRIDENT_GATEWAY_USAGE_DB": "/db"}, Pools({"": "127.0.0.1:1"}))
        assert [told in record.getMessage() for record in caplog.records] == ([True] if told else []), caplog.records


def test_a_limit_of_a_model_that_there_is_not_is_named(tmp_path: Path) -> None:
    text = '[[orgs.acme.limits]]\nmodel = "{}"\ntokens_per_day = 1\n[models.a]\npools = [""]\naliases = ["b"]'
    for model in ("a", "a:sql"):
        assert _with_acme(tmp_path, text.format(model)).quotas["orgs.acme"].scopes[0].model == model
    with pytest.raises(InvalidArgument, match=r"orgs.acme.limits.model: must be one of the models a, got 'b'"):
        _with_acme(tmp_path, text.format("b"))

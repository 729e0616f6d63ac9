"""Settings from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract.errors import InvalidArgument
from gateway.config.settings import Settings, unknown, variable


def test_values_come_from_the_environment_and_overrides_win():
    found = Settings.from_environment(
        {
            variable("http_port"): "1234",
            variable("replicas"): "stable=a:1,b:2; canary=dns:///c:3",
            variable("pool_weights"): "stable=95,canary=5",
            variable("deep_probes"): "false",
            variable("metrics_urls"): "a:1=http://x/m",
            variable("heartbeat_s"): "2.5",
        },
        model="mine",
    )
    assert (found.http_port, found.model, found.deep_probes, found.heartbeat_s) == (1234, "mine", False, 2.5)
    assert found.pools == {"stable": "a:1,b:2", "canary": "dns:///c:3"}
    assert found.weights == {"stable": 95.0, "canary": 5.0}
    assert found.metrics_url("a:1") == "http://x/m" and found.metrics_url("b:2") == "http://b:8002/metrics"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("http_port", "many"),
        ("http_port", "70000"),
        ("heartbeat_s", "nan"),
        ("heartbeat_s", "-1"),
        ("deep_probes", "perhaps"),
        ("max_in_flight", "0"),
        ("routing", "by_moon"),
        ("log_level", "loud"),
        ("tokenizer", "/nowhere/tokenizer.json"),
        ("tls_cert", "/nowhere/cert.pem"),
        ("pool_weights", "canary=5"),
        ("pool_weights", "canary"),
        ("replicas", "a=x:1;a=y:2"),
        ("replicas", "http://x:1"),
        ("replicas", "a=x:1;b=y:70000"),
        ("otlp_endpoint", "localhost:4318"),
        ("metrics_urls", "a:1=b:2"),
        ("deep_sha256", "e0ccc"),
        ("replica_ca", __file__),
        ("tls_client_ca", __file__),
        ("semantic_exclude", "("),
        ("semantic_exclude", "a{99999999999999999999}"),
        ("semantic_exclude", "(" * 3000 + ")" * 3000),
    ],
)
def test_what_is_not_allowed_is_refused_with_the_variables_name(name: str, value: str):
    with pytest.raises(InvalidArgument, match="TRIDENT_GATEWAY_"):
        Settings.from_environment({variable(name): value})


def test_a_setting_given_in_code_is_refused_with_the_variables_name_too():
    with pytest.raises(InvalidArgument, match="^TRIDENT_GATEWAY_HTTP_PORT: must be an integer from 0 to 65535, got -1"):
        Settings(http_port=-1)


def test_a_secret_is_not_repeated():
    with pytest.raises(InvalidArgument) as caught:
        Settings(semantic_api_key=["hush"])
    assert caught.value.field == "TRIDENT_GATEWAY_SEMANTIC_API_KEY" and "hush" not in str(caught.value)


@pytest.mark.parametrize("url", ["redis://hush:abc", "redis://:hush@h:99999", "redis://[::hush", "redis://:hu/sh@h:1"])
def test_a_redis_url_that_cannot_be_read_is_refused_and_not_repeated(url: str):
    with pytest.raises(InvalidArgument, match="^TRIDENT_GATEWAY_REDIS: must be a URL such as redis://") as caught:
        Settings.from_environment({"TRIDENT_GATEWAY_REDIS": url})
    assert "hu" not in str(caught.value)


def test_a_home_of_no_user_is_no_path():
    with pytest.raises(InvalidArgument, match="^TRIDENT_GATEWAY_KEY_STORE: must be a path, or redis, got '~no-user/k'"):
        Settings.from_environment({"TRIDENT_GATEWAY_KEY_STORE": "~no-user/k"})
    assert Settings.from_environment({"TRIDENT_TOKENIZER": "~no-user/tokenizer.json"}).tokenizer is None


def test_a_certificate_that_is_none_is_refused_before_anything_starts():
    for cert, key in (("tls_cert", "tls_key"), ("replica_cert", "replica_key")):
        own = {cert: Path(__file__), key: Path(__file__)}
        with pytest.raises(InvalidArgument, match=f"{variable(cert)}: .*in PEM and without a password|REPLICA_CA"):
            Settings(**own)


@pytest.mark.parametrize(
    ("name", "value", "near"),
    [
        ("HTP_PORT", "9000", "HTTP_PORT"),
        ("REPLICA", "x:1", "REPLICAS"),
        ("METRIC_PORT", "0", "METRICS_PORT"),
        ("MAX_BODY_BYTE", "1", "MAX_BODY_BYTES"),
        ("API_KEY", "secret", "API_KEYS"),
        ("http_port", "1", "HTTP_PORT"),
        ("COMPLETELY_ELSE", "1", ""),
    ],
)
def test_a_misspelt_variable_is_named_with_the_nearest(name: str, value: str, near: str):
    [message] = unknown({f"TRIDENT_GATEWAY_{name}": value, "HOME": "/"})
    assert message.startswith(f"TRIDENT_GATEWAY_{name}: is not known")
    assert (f"did you mean TRIDENT_GATEWAY_{near}?" in message) == bool(near) and "secret" not in message


def test_what_is_ours_and_what_kubernetes_sets_is_not_complained_about():
    ours = {variable(name): "1" for name in Settings.model_fields}
    links = {
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "9000",
        "SERVICE_PORT_HTTP": "9000",
        "PORT": "tcp://10.0.0.1:9000",
        "PORT_9000_TCP": "tcp://10.0.0.1:9000",
        "PORT_9000_TCP_PROTO": "tcp",
        "PORT_9000_TCP_PORT": "9000",
        "PORT_9000_TCP_ADDR": "10.0.0.1",
        "ADMIN_SERVICE_HOST": "10.0.0.2",
        "ADMIN_PORT": "tcp://10.0.0.2:9002",
    }
    environ = {**ours, **{f"TRIDENT_GATEWAY_{name}": value for name, value in links.items()}}
    assert unknown(environ) == []


def test_the_tokenizer_of_the_server_that_started_it_is_used_where_there_is_one(tmp_path: Path):
    served, own = tmp_path / "tokenizer.json", tmp_path / "own.json"
    assert Settings.from_environment({"TRIDENT_TOKENIZER": str(served)}).tokenizer is None
    served.touch()
    own.touch()
    assert Settings.from_environment({"TRIDENT_TOKENIZER": str(served)}).tokenizer == served
    both = {"TRIDENT_TOKENIZER": str(served), "TRIDENT_GATEWAY_TOKENIZER": str(own)}
    assert Settings.from_environment(both).tokenizer == own


def test_secrets_come_from_files_that_may_be_replaced(tmp_path):
    path = tmp_path / "secret"
    path.write_text("first\n")
    settings = Settings.from_environment({"TRIDENT_GATEWAY_SEMANTIC_API_KEY_FILE": str(path)})
    assert settings.semantic_api_key == settings.secret("semantic_api_key") == "first"
    path.write_text("second")
    assert settings.secret("semantic_api_key") == "second" and settings.secret("batch_webhook_secret") == ""
    path.unlink()
    with pytest.raises(InvalidArgument, match="TRIDENT_GATEWAY_SEMANTIC_API_KEY_FILE: must be a file that can be read"):
        settings.secret("semantic_api_key")
    path.write_text("not a url")
    for environ, problem in (
        ({"REDIS_FILE": str(path)}, "REDIS: must be a URL such as redis://HOST:PORT/0, got one that cannot be read"),
        ({"REDIS_FILE": str(path), "REDIS": "redis://h"}, "REDIS_FILE: is allowed only without TRIDENT_GATEWAY_REDIS"),
        ({"REDIS_FILE": str(tmp_path / "none")}, "REDIS_FILE: must be a file"),
    ):
        with pytest.raises(InvalidArgument, match=f"TRIDENT_GATEWAY_{problem}") as caught:
            Settings.from_environment({f"TRIDENT_GATEWAY_{name}": value for name, value in environ.items()})
        assert "not a url" not in str(caught.value)

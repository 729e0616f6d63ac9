"""Settings: read from TRIDENT_*, refused by name."""

from pathlib import Path

import pytest

from contract.errors import InvalidArgument
from server.settings import ROOT, Settings


def test_nothing_set_means_the_defaults():
    settings = Settings.from_environment({})
    assert settings.ports == {"TRIDENT_GRPC_PORT": 8001, "TRIDENT_HTTP_PORT": 8000, "TRIDENT_METRICS_PORT": 8002}
    assert (settings.host, settings.engine, settings.drain_s) == ("127.0.0.1", "demo", 20.0)
    assert settings.model_repository == ROOT / "model_repository"


def test_variables_are_read_and_an_empty_one_counts_as_unset():
    environ = {"TRIDENT_GRPC_PORT": "9001", "TRIDENT_DRAIN_S": "0.5", "TRIDENT_HOST": "", "TRIDENT_ENGINES_DIR": "made"}
    settings = Settings.from_environment(environ)
    assert (settings.grpc_port, settings.drain_s, settings.host) == (9001, 0.5, "127.0.0.1")
    assert settings.engines_dir == Path.cwd() / "made"


def test_an_override_wins_over_its_variable_and_none_is_no_override():
    settings = Settings.from_environment({"TRIDENT_GRPC_PORT": "9001"}, grpc_port=9002, host=None)
    assert (settings.grpc_port, settings.host) == (9002, "127.0.0.1")


@pytest.mark.parametrize(
    "variable, value, allowed",
    [
        ("TRIDENT_GRPC_PORT", "eighty", "an integer from 1 to 65535"),
        ("TRIDENT_GRPC_PORT", "0", "1 to 65535"),
        ("TRIDENT_HTTP_PORT", "65536", "1 to 65535"),
        ("TRIDENT_HOST", "::1", "an IPv4 address"),
        ("TRIDENT_HOST", "localhost", "an IPv4 address"),
        ("TRIDENT_ENGINE", "../secret", "letters, digits"),
        ("TRIDENT_DRAIN_S", "-1", "a number from 0 to 86400"),
        ("TRIDENT_DRAIN_S", "nan", "a number from 0 to 86400"),
        ("TRIDENT_CANARY_INTERVAL_S", "0", "0.1 to 86400"),
        ("TRIDENT_STALL_S", "2", "3 to 86400"),
        ("TRIDENT_STEP_LIMIT_S", "inf", "3 to 86400"),
        ("TRIDENT_LOG_LEVEL", "debug", "error, warning, info or verbose"),
        ("TRIDENT_ADMIN_KEY", "a key", "letters, digits"),
        ("TRIDENT_OTLP_ENDPOINT", "127.0.0.1:4318", "http(s) URL"),
        ("TRIDENT_TRACE_EVERY", "0", "1 to"),
    ],
)
def test_a_bad_value_is_refused_with_its_variable_and_what_is_allowed(variable, value, allowed):
    with pytest.raises(InvalidArgument) as refusal:
        Settings.from_environment({variable: value})
    assert refusal.value.field == variable and allowed in str(refusal.value)


def test_tls_needs_both_files_and_both_must_exist(tmp_path):
    cert = tmp_path / "cert.pem"
    cert.touch()
    with pytest.raises(InvalidArgument, match="TRIDENT_TLS_KEY: must be set together with TRIDENT_TLS_CERT"):
        Settings.from_environment({"TRIDENT_TLS_CERT": str(cert)})
    with pytest.raises(InvalidArgument, match="TRIDENT_REGISTER_CA: must be a certificate in PEM, got"):
        Settings.from_environment({"TRIDENT_REGISTER_CA": str(cert)})
    with pytest.raises(InvalidArgument, match=r"TRIDENT_TLS_KEY: must be a PEM file, got .*key\.pem"):
        Settings.from_environment({"TRIDENT_TLS_CERT": str(cert), "TRIDENT_TLS_KEY": str(tmp_path / "key.pem")})


def test_a_key_of_another_certificate_is_refused_before_triton_says_that_its_port_is_taken():
    folder = Path(__file__).parents[1] / "clients" / "certificates"
    pair = {"TRIDENT_TLS_CERT": str(folder / "server.pem"), "TRIDENT_TLS_KEY": str(folder / "server.key")}
    assert Settings.from_environment(pair).tls_cert == folder / "server.pem"
    with pytest.raises(InvalidArgument, match="TRIDENT_TLS_CERT: must be a certificate with its key"):
        Settings.from_environment({**pair, "TRIDENT_TLS_CERT": str(folder / "ca.pem")})
    with pytest.raises(InvalidArgument, match="TRIDENT_TLS_CA: must be a certificate in PEM"):
        Settings.from_environment({**pair, "TRIDENT_TLS_CA": pair["TRIDENT_TLS_KEY"]})


def test_every_run_has_a_key_of_its_own_that_does_not_show():
    first, second = Settings(), Settings()
    assert first.admin_key != second.admin_key and first.admin_key not in repr(first)


def test_a_wildcard_address_is_reached_over_loopback():
    settings = Settings(host="0.0.0.0", grpc_port=9001)
    assert settings.grpc_url == "127.0.0.1:9001" and settings.host == "0.0.0.0"


def test_the_environment_is_read_only_when_it_is_passed(monkeypatch):
    monkeypatch.setenv("TRIDENT_GRPC_PORT", "9001")
    assert Settings().grpc_port == 8001


def test_an_unknown_override_is_refused_by_name():
    with pytest.raises(InvalidArgument) as refusal:
        Settings.from_environment({}, port=8001)
    assert refusal.value.field == "port"


def test_a_refused_key_is_not_shown():
    with pytest.raises(InvalidArgument) as refusal:
        Settings(admin_key="my secret")
    assert "my secret" not in str(refusal.value)


@pytest.mark.parametrize("part", ["file", "file/x"])
def test_a_state_folder_that_cannot_be_made_is_refused_by_its_variable(tmp_path, part):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="TRIDENT_STATE_DIR: must be a folder that can be made and written, got"):
        Settings.from_environment({"TRIDENT_STATE_DIR": str(tmp_path / part)}).make_state_dir()
    made = Settings.from_environment({"TRIDENT_STATE_DIR": str(tmp_path / "a" / "b")})
    made.make_state_dir()
    assert made.state_dir.is_dir() and not list(made.state_dir.iterdir())

"""The command line and environment of tritonserver."""

import dataclasses
import sys
from pathlib import Path

from server import installation, triton_command
from server.settings import ROOT, Settings

INSTALLATION = installation.Installation(
    Path("/wheel/bin/tritonserver"), Path("/wheel/python"), Path("/wheel/stub"), Path("/wheel/caches"), "/python/lib"
)


def flags(**settings):
    built = triton_command.arguments(
        Settings(admin_key="key", **settings), INSTALLATION, Path("/state/backends"), "trident_8001_7_"
    )
    assert built[0] == "/wheel/bin/tritonserver"
    return [flag.removeprefix("--") for flag in built[1:]]


def test_only_the_ensemble_is_loaded_and_only_with_the_key():
    found = flags(engine="h100")
    assert "model-control-mode=explicit" in found and "load-model=ensemble" in found
    assert "model-config-name=h100" in found
    for kind in ("grpc-restricted-protocol", "http-restricted-api"):
        assert f"{kind}=model-repository,shared-memory,trace,logging:trident-admin-key=key" in found


def test_every_endpoint_listens_on_the_configured_host():
    found = flags(host="0.0.0.0", grpc_port=1, http_port=2, metrics_port=3)
    for endpoint, port in (("grpc", 1), ("http", 2), ("metrics", 3)):
        assert f"{endpoint}-address=0.0.0.0" in found and f"{endpoint}-port={port}" in found


def test_a_server_that_has_triton_s_local_cache_gets_one_and_another_does_not(tmp_path):
    assert not [flag for flag in flags() if "cache-config" in flag]
    (tmp_path / "local").mkdir()
    found = dataclasses.replace(INSTALLATION, caches=tmp_path)
    command = triton_command.arguments(Settings(), found, Path("/state/backends"), "trident_8001_7_")
    assert "--cache-config=local,size=1048576" in command


def test_a_vanished_peer_is_pinged_and_clients_may_ping_as_often():
    found = flags(keepalive_s=4)
    assert "grpc-keepalive-time=4000" in found and "grpc-keepalive-timeout=2000" in found
    assert "grpc-http2-min-recv-ping-interval-without-data=2000" in found


def test_tls_traces_and_log_levels_are_set_only_if_configured():
    assert not [flag for flag in flags() if "ssl" in flag or "trace-config" in flag]
    cert, key = (ROOT / "tests" / "clients" / "certificates" / name for name in ("server.pem", "server.key"))
    found = flags(tls_cert=cert, tls_key=key, otlp_endpoint="http://collector:4318/v1/traces", trace_every=10)
    assert "grpc-use-ssl=true" in found and f"grpc-server-cert={cert}" in found and f"grpc-server-key={key}" in found
    assert "trace-config=opentelemetry,url=http://collector:4318/v1/traces" in found
    assert "trace-config=rate=10" in found
    assert "log-verbose=1" in flags(log_level="verbose")
    assert {"log-info=false", "log-warning=false"} <= set(flags(log_level="error"))


def test_stubs_get_this_environment_the_source_folder_the_engine_and_the_control_socket():
    environ = {"PATH": "/usr/bin", "PYTHONPATH": "/other", "HOME": "/root"}
    found = triton_command.environment(Settings(), INSTALLATION, Path("/engines/demo"), "trident_8001_7_", environ)
    assert found["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
    assert found["PYTHONPATH"] == f"{ROOT}:/other" and found["LD_LIBRARY_PATH"] == "/python/lib"
    assert found["TRIDENT_HTTP_PORT"] == "8000" and found["TRIDENT_DRAIN_FILE"] == str(Settings().drain_file)
    assert found["TRIDENT_ENGINE_DIR"] == "/engines/demo" and found["HOME"] == "/root"
    assert (
        found["TRIDENT_CONTROL_SOCKET"]
        == triton_command.control_socket("trident_8001_7_")
        == "trident-trident_8001_7_-engine"
    )

"""Several engines on one machine: their ports, their commands, and what a gateway in front of them is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from contract.errors import InvalidArgument, NotFound
from server import server_chain
from server.__main__ import split_command
from server.settings import Settings
from tests.fakes import manifests


def first(**values: object) -> Settings:
    return Settings.from_environment({}, engine="a", engines_dir=Path("/e"), **values)


def test_every_server_has_ports_of_its_own_behind_those_before():
    servers = server_chain.settings_of(["a", "b", "c"], first(), free_ports=False)
    assert [(one.engine, one.grpc_port, one.http_port, one.metrics_port) for one in servers] == [
        ("a", 8001, 8000, 8002),
        ("b", 8011, 8010, 8012),
        ("c", 8021, 8020, 8022),
    ]
    free = server_chain.settings_of(["a", "b"], first(grpc_port=50001), free_ports=True)
    assert len({free[1].grpc_port, free[1].http_port, free[1].metrics_port}) == 3


def test_each_server_is_the_command_of_the_one_before_and_the_command_that_of_the_last():
    servers = server_chain.settings_of(["a", "b", "c"], first(), free_ports=False)
    words = server_chain.command_of(servers, ["run", "--", "it"])
    for engine, port in (("b", "8011"), ("c", "8021")):
        assert words[:3] == [sys.executable, "-m", "server"]
        options, words = split_command(words[3:])
        assert options[:2] == ["--engine", engine] and options[options.index("--grpc-port") + 1] == port
    assert words == ["run", "--", "it"]
    assert server_chain.command_of(servers, [])[-1] == "8022"  # nothing runs beside the last


def test_a_command_may_drain_for_as_long_as_all_that_it_starts_one_after_the_other():
    assert server_chain.drain_s_of(["gateway"], 20.0) == 20.0
    servers = server_chain.settings_of(["a", "b", "c"], first(), free_ports=False)
    stop_s = server_chain.STOP_S
    assert server_chain.drain_s_of(server_chain.command_of(servers, ["gateway"]), 20.0) == 20.0 + 2 * (20.0 + stop_s)
    assert server_chain.drain_s_of(server_chain.command_of(servers[1:], []), 5.0) == 5.0 + 5.0 + stop_s


def test_a_gateway_gets_a_model_a_pool_and_a_tokenizer_for_each_engine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_chain.manifest, "load", lambda folder: manifests.manifest(kind="cpu"))
    servers = server_chain.settings_of(["a", "b"], first(host="0.0.0.0"), free_ports=False)
    assert server_chain.gateway_environment(servers) == {
        "TRIDENT_GATEWAY_ENCODERS": "",
        "TRIDENT_GATEWAY_MODEL": "a",
        "TRIDENT_GATEWAY_REPLICAS": "a=127.0.0.1:8001;b=127.0.0.1:8011",
        "TRIDENT_GATEWAY_METRICS_URLS": "127.0.0.1:8001=http://127.0.0.1:8002/metrics,"
        "127.0.0.1:8011=http://127.0.0.1:8012/metrics",
        "TRIDENT_GATEWAY_MODELS": "a=/e/a/tokenizer.json,b=/e/b/tokenizer.json",
    }


def test_a_gateway_is_told_which_engines_are_encoders(monkeypatch: pytest.MonkeyPatch):
    kinds = {"a": "cpu", "b": "embedding", "c": "rerank"}
    monkeypatch.setattr(server_chain.manifest, "load", lambda folder: manifests.manifest(kind=kinds[folder.name]))
    servers = server_chain.settings_of(["a", "b", "c"], first(), free_ports=False)
    assert server_chain.gateway_environment(servers)["TRIDENT_GATEWAY_ENCODERS"] == "b,c"


def test_an_engine_that_is_not_there_is_told_before_another_one_is_loaded(tmp_path: Path):
    (tmp_path / "a").mkdir()
    manifests.manifest(kind="cpu").save(tmp_path / "a")
    servers = server_chain.settings_of(
        ["a", "b"], first().model_copy(update={"engines_dir": tmp_path}), free_ports=True
    )
    with pytest.raises(NotFound, match=f"there is no engine at {tmp_path / 'b'}"):
        server_chain.gateway_environment(servers)


@pytest.mark.parametrize(("engines", "ports"), [(["a", "a"], {}), (["a", "b"], {"grpc_port": 65535}), (["a", ""], {})])
def test_what_cannot_be_is_refused_before_anything_starts(engines: list[str], ports: dict[str, int]):
    with pytest.raises(InvalidArgument):
        server_chain.settings_of(engines, first(**ports), free_ports=False)

"""The command line."""

import os

import pytest

from server import server_chain
from server.__main__ import main, split_command
from server.settings import Settings


def test_the_arguments_after_the_first_double_dash_are_the_command():
    assert split_command(["--engine", "demo", "--", "sh", "-c", "x", "--", "y"]) == (
        ["--engine", "demo"],
        ["sh", "-c", "x", "--", "y"],
    )
    assert split_command(["status"]) == (["status"], [])


def test_a_bad_setting_is_one_line_and_code_1(monkeypatch, capsys):
    monkeypatch.setenv("TRIDENT_HTTP_PORT", "http")
    assert main([]) == 1
    assert capsys.readouterr().err == "error: TRIDENT_HTTP_PORT: must be an integer from 1 to 65535, got 'http'\n"


def test_an_engine_that_was_not_built_is_refused_with_the_command_that_builds_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TRIDENT_ENGINES_DIR", str(tmp_path))
    assert main(["--engine", "nosuch"]) == 1
    assert "make build-engine ENGINE=nosuch" in capsys.readouterr().err


@pytest.mark.parametrize(("told", "encoders"), [(None, "small"), ("other", "other")])
def test_a_gateway_beside_an_encoder_is_told_so_unless_it_is_one_of_several(monkeypatch, tmp_path, told, encoders):
    monkeypatch.setattr(server_chain, "is_encoder", lambda settings: True)
    monkeypatch.setenv("TRIDENT_ENGINES_DIR", str(tmp_path))
    for name in server_chain.gateway_environment([Settings()]):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv(server_chain.ENCODERS)
    if told is not None:
        monkeypatch.setenv(server_chain.ENCODERS, told)
    assert main(["--engine", "small"]) == 1  # there is no such engine
    assert os.environ[server_chain.ENCODERS] == encoders


def test_status_without_a_server_exits_with_code_1(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TRIDENT_STATE_DIR", str(tmp_path))
    assert main(["status"]) == 1 and capsys.readouterr().out == "no server found\n"


def test_status_needs_only_the_state_folder(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TRIDENT_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("TRIDENT_ENGINE", "demo,demo-int8")
    assert main(["status"]) == 1 and capsys.readouterr().out == "no server found\n"


def test_an_unknown_verb_is_refused():
    with pytest.raises(SystemExit) as refusal:
        main(["restart"])
    assert refusal.value.code == 2

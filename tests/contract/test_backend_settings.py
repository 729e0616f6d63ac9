import os
from pathlib import Path

import pytest

from contract.backend_settings import Settings
from contract.errors import InvalidArgument


@pytest.fixture(autouse=True)
def engine_dir(monkeypatch):
    for name in [name for name in os.environ if name.startswith("TRIDENT_")]:  # make exports some of them
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRIDENT_ENGINE_DIR", "/engines/demo")


def test_only_the_engine_folder_has_no_default(monkeypatch):
    settings = Settings.from_env()
    assert settings.engine_dir == Path("/engines/demo")
    assert settings == Settings(Path("/engines/demo"), "trident-engine")
    monkeypatch.delenv("TRIDENT_ENGINE_DIR")
    with pytest.raises(InvalidArgument, match="TRIDENT_ENGINE_DIR: must be set"):
        Settings.from_env()


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("TRIDENT_CONTROL_SOCKET", "other", "control_socket", "other"),
        ("TRIDENT_HTTP_PORT", "8000", "http_port", 8000),
        ("TRIDENT_WHOLE_ANSWER_TIMEOUT_S", "60", "whole_answer_timeout_s", 60),
        ("TRIDENT_WHOLE_ANSWER_TIMEOUT_S", "0", "whole_answer_timeout_s", 0),
        ("TRIDENT_DRAIN_FILE", "/state/draining", "drain_file", Path("/state/draining")),
        ("TRIDENT_MAX_WAITING", "7", "max_waiting", 7),
        ("TRIDENT_SENDER_THREADS", "2", "sender_threads", 2),
        ("TRIDENT_MAX_COALESCE_MS", "20", "max_coalesce_s", 0.02),
        ("TRIDENT_MAX_COALESCE_MS", "0", "max_coalesce_s", 0.0),
        ("TRIDENT_GRAMMAR_TIMEOUT_MS", "1500", "grammar_timeout_s", 1.5),
        ("TRIDENT_GRAMMAR_STALL_MS", "100", "grammar_stall_s", 0.1),
        ("TRIDENT_MAX_PROMPT_BYTES", "1000", "max_prompt_bytes", 1000),
        ("TRIDENT_STALL_S", "20.5", "stall_s", 20.5),
        ("TRIDENT_STEP_LIMIT_S", "300", "step_limit_s", 300.0),
    ],
)
def test_every_setting_comes_from_its_variable(monkeypatch, variable, text, field, value):
    monkeypatch.setenv(variable, text)
    assert getattr(Settings.from_env(), field) == value


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", " 3"])
def test_a_count_that_is_none_is_refused_by_the_variables_name(monkeypatch, text):
    monkeypatch.setenv("TRIDENT_SENDER_THREADS", text)
    with pytest.raises(InvalidArgument, match="TRIDENT_SENDER_THREADS: must be a whole number from 1, got"):
        Settings.from_env()


def test_a_count_of_too_many_digits_is_refused_by_the_variables_name(monkeypatch):
    monkeypatch.setenv("TRIDENT_GRAMMAR_STALL_MS", "9" * 400)
    with pytest.raises(InvalidArgument, match="TRIDENT_GRAMMAR_STALL_MS: must have at most 12 digits, got 400"):
        Settings.from_env()


def test_an_empty_variable_is_an_unset_one(monkeypatch):
    for name in ("TRIDENT_SENDER_THREADS", "TRIDENT_CONTROL_SOCKET", "TRIDENT_STALL_S", "TRIDENT_DRAIN_FILE"):
        monkeypatch.setenv(name, "")
    assert Settings.from_env() == Settings(Path("/engines/demo"), "trident-engine")


@pytest.mark.parametrize("text", ["2", "nan", "inf", "soon"])
def test_a_time_outside_its_range_is_refused_by_the_variables_name(monkeypatch, text):
    monkeypatch.setenv("TRIDENT_STALL_S", text)
    with pytest.raises(InvalidArgument, match="TRIDENT_STALL_S: must be a number of seconds from 3 to 86400, got"):
        Settings.from_env()


def test_the_metadata_socket_is_named_after_the_control_socket():
    assert Settings(Path("x"), "a").metadata_socket != Settings(Path("x"), "b").metadata_socket

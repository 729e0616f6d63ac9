"""What the gateway says to a person at its start."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gateway import banner
from gateway.config.settings import Settings


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", "127.0.0.1:1"),
        ("0.0.0.0", "127.0.0.1:1"),
        ("::", "[::1]:1"),
        ("::1", "[::1]:1"),
        ("10.0.0.1", "10.0.0.1:1"),
    ],
)
def test_addresses_are_those_that_a_client_can_use(host: str, expected: str):
    assert banner.reachable(host, 1) == expected


@pytest.mark.parametrize("keyless", [True, False])
def test_what_it_offers_is_shell_and_python(keyless: bool, tmp_path: Path):
    banner_text = banner.text(Settings(), "127.0.0.1:9000", "127.0.0.1:9001", "127.0.0.1:9002", keyless=keyless)
    commands = banner_text.partition("\nTry\n")[2].rpartition("Ctrl-C")[0]
    assert ("$KEY" in commands) != keyless and "http://127.0.0.1:9002/metrics" in banner_text
    subprocess.run(["bash", "-nc", commands], check=True, timeout=60)
    compile(commands.partition("-c '")[2].rpartition("'")[0], "banner", "exec")


@pytest.mark.parametrize(
    ("models", "of_file", "served", "example"),
    [
        ({}, (), "the model mine", "mine"),
        ({"a": "a.json", "mine": "b.json"}, (), "the model a and the model mine", "mine"),
        ({"a": "a.json", "mine": "b.json"}, ("small", "large"), "the model small and the model large", "small"),
        ({}, ("large", "mine"), "the model large and the model mine", "mine"),
    ],
)
def test_the_models_are_those_that_are_served(models, of_file, served, example):
    settings = Settings(model="mine", models=models, replicas="a=h:1;mine=h:2")
    banner_text = banner.text(settings, "h:1", "h:2", "h:3", keyless=True, models=of_file)
    assert f"serves {served}." in banner_text
    assert f'{{"model": "{example}", ' in banner_text and f'create(model="{example}", ' in banner_text

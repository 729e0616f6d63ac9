"""GPUs, driver and libraries of a machine."""

import json
import subprocess
import sys

import gpu_machine
import pytest

from server import machine
from server.settings import ROOT


def test_the_script_prints_json_and_needs_only_the_standard_library():
    command = [sys.executable, "-I", "-S", ROOT / "server" / "machine.py"]
    printed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert printed.keys() == {"gpus", "driver", "tensorrt", "tensorrt_llm", "cuda"}


def test_gpus_and_driver_are_read_from_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.inspect().gpus == () and machine.inspect().driver is None
    gpu_machine.driver(tmp_path, [("NVIDIA L40S", "8.9", 46068), ("NVIDIA L40S", "8.9", 46068)], "580.1")
    found = machine.inspect()
    assert found.gpus == (machine.Gpu("NVIDIA L40S", 89, 46068 * 1024**2, 23034 * 1024**2),) * 2
    assert found.driver == "580.1"
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    assert machine.inspect().gpus == ()


def test_packages_of_the_images_environment_are_found(tmp_path, monkeypatch):
    assert machine.inspect().tensorrt_llm is None
    monkeypatch.setattr(machine, "IMAGE_ENVIRONMENT", tmp_path)
    for name, version in (("tensorrt_llm", "1.2.1"), ("tensorrt_cu13", "10.14.1.48")):
        folder = tmp_path / "lib" / "python3.12" / "site-packages" / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    found = machine.inspect()
    assert (found.tensorrt_llm, found.tensorrt) == ("1.2.1", "10.14.1.48")


@pytest.mark.parametrize(("number", "version"), [(101401, "10.14.1"), (100300, "10.3.0"), (8601, "8.6.1")])
def test_libnvinfers_version_number_is_converted(number, version):
    assert machine.tensorrt_version(number) == version

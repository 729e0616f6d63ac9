"""The installation: found here, and refused with a hint where it cannot run."""

import os
import sys

import gpu_machine
import pytest

from contract.errors import InvalidArgument, Unavailable
from server import installation, triton_command
from server.settings import Settings

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def test_the_wheel_of_this_environment_is_found():
    found = installation.find()
    assert os.access(found.tritonserver, os.X_OK) and os.access(found.stub, os.X_OK)
    assert f"/{sys.version_info.major}.{sys.version_info.minor}/" in str(found.stub)


def test_in_an_image_its_own_server_is_taken_with_its_own_backends(monkeypatch, tmp_path):
    image = gpu_machine.triton(tmp_path / "opt" / "tritonserver", HERE)
    monkeypatch.setattr(installation, "IN_IMAGES", image)
    found = installation.find()
    assert found.tritonserver == image / "bin" / "tritonserver" and found.libraries == ""
    backends = found.link_backends(tmp_path / "state")
    assert (backends / "tensorrtllm" / "libtriton_tensorrtllm.so").is_file() and not (tmp_path / "state").exists()
    flags = triton_command.arguments(Settings(engine="h100"), found, backends, "prefix")
    assert flags[0] == str(image / "bin" / "tritonserver") and f"--backend-directory={image}/backends" in flags
    assert f"--cache-directory={image}/caches" in flags


def test_another_server_can_be_named(monkeypatch, tmp_path):
    mine = gpu_machine.triton(tmp_path / "mine", HERE)
    monkeypatch.setattr(installation, "IN_IMAGES", gpu_machine.triton(tmp_path / "image", HERE))
    settings = Settings.from_environment({"TRIDENT_TRITONSERVER": str(mine)})
    assert installation.find(settings.tritonserver).stub.is_relative_to(mine)
    with pytest.raises(
        InvalidArgument, match=r"^TRIDENT_TRITONSERVER: must be a folder with bin/tritonserver, got .*elsewhere$"
    ):
        installation.find(tmp_path / "elsewhere")


def test_an_image_with_another_python_is_refused_with_the_command_to_run(tmp_path):
    image = gpu_machine.triton(tmp_path / "image", "3.99")
    hint = f"runs Python 3.99 models, and this is Python {HERE}: .*`make setup PYTHON=python3.99`"
    with pytest.raises(Unavailable, match=hint):
        installation.find(image)
    (image / "backends" / "python" / installation.STUB).unlink()
    with pytest.raises(Unavailable, match=r"image is incomplete: .*triton_python_backend_stub is missing"):
        installation.find(image)


def test_a_stub_names_the_python_it_embeds(tmp_path):
    assert installation.embedded_python(installation.find().stub) == HERE
    (tmp_path / "stub").write_bytes(b"static")
    assert installation.embedded_python(tmp_path / "stub") is None


def test_backends_are_links_that_are_corrected_if_they_point_elsewhere(tmp_path):
    found = installation.find()
    backends = found.link_backends(tmp_path)
    links = {link.name: link.readlink() for link in (backends / "python").iterdir()}
    assert links["triton_python_backend_stub"] == found.stub and "libtriton_python.so" in links
    stub = backends / "python" / found.stub.name
    stub.unlink()
    stub.symlink_to("/nowhere")
    found.link_backends(tmp_path)
    assert {link.name: link.readlink() for link in (backends / "python").iterdir()} == links


def test_a_python_without_a_stub_is_refused(monkeypatch):
    monkeypatch.setattr(installation.sys, "version_info", (3, 13, 0))
    with pytest.raises(Unavailable, match="needs Python 3.10, 3.11 or 3.12.*got 3.13"):
        installation.find()


def test_numpy_2_is_refused_because_it_corrupts_tensors():
    with pytest.raises(Unavailable, match="numpy 2.1.0 corrupts tensors.*numpy < 2"):
        installation.check_numpy("2.1.0")
    with pytest.raises(Unavailable, match="numpy is not installed"):
        installation.check_numpy(None)
    installation.check_numpy("1.26.4")


def test_an_old_or_foreign_c_library_is_refused():
    with pytest.raises(Unavailable, match="glibc 2.35 or newer .*this system has 2.31"):
        installation.check_glibc("glibc", "2.31")
    with pytest.raises(Unavailable, match="this system has another C library"):
        installation.check_glibc("", "")
    installation.check_glibc("glibc", "2.35")


def test_a_missing_libpython_is_refused_with_two_remedies():
    with pytest.raises(Unavailable, match=r"libpython3\.99\.so\.1\.0 is missing.*--enable-shared"):
        installation.find_libpython("3.99")


def test_a_missing_wheel_is_refused(monkeypatch):
    monkeypatch.setattr(installation.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="tritonserver is not installed.*make setup"):
        installation.find()


def test_a_wheel_without_its_stub_is_refused(monkeypatch, tmp_path):
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr(installation.importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(Unavailable, match="the nvidia-pytriton wheel is incomplete: .*tritonserver is missing"):
        installation.find()

"""Finds tritonserver: in NVIDIA's image, or in the nvidia-pytriton wheel of this environment.

Triton runs each instance of a Python model in a stub process, which embeds one version of Python. The wheel has a stub
for each version and silently corrupts tensors with numpy 2. An image has one stub, and C++ backends (``tensorrtllm``)
that the wheel lacks, so an image's server takes precedence.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import platform
import re
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from contract.errors import InvalidArgument, Unavailable
from server import python_version
from server.machine import package

GLIBC = (2, 35)
IN_IMAGES = Path("/opt/tritonserver")  # in NVIDIA's images
STUB = "triton_python_backend_stub"


@dataclass(frozen=True)
class Installation:
    """Files of a tritonserver that can run here. libraries: folder of libpython, "" if the loader finds it."""

    tritonserver: Path
    backend_files: Path
    stub: Path
    caches: Path
    libraries: str

    def link_backends(self, state_dir: Path) -> Path:
        """Return the folder for --backend-directory: an image's own, or one in ``state_dir`` with links into the wheel.

        Links, because the wheel's libraries find each other relative to their real paths.
        """
        if self.stub.parent == self.backend_files:
            return self.backend_files.parent
        python = state_dir / "backends" / "python"
        python.mkdir(parents=True, exist_ok=True)
        for source in (*sorted(self.backend_files.iterdir()), self.stub):
            _link(source, python / source.name)
        return python.parent


def find(folder: Path | None = None) -> Installation:
    """Find the installation in ``folder``, else in NVIDIA's image, else in the wheel.

    folder: contains bin/tritonserver.
    Raises InvalidArgument: ``folder`` contains no server.
    Raises Unavailable: a file or package is missing; the message tells how to install it.
    """
    if folder is not None and not (folder / "bin" / "tritonserver").is_file():
        raise InvalidArgument("TRIDENT_TRITONSERVER", f"must be a folder with bin/tritonserver, got {folder}")
    if folder is not None or (IN_IMAGES / "bin" / "tritonserver").is_file():
        return _in_image(folder or IN_IMAGES)
    return _in_wheel()


def _in_image(root: Path) -> Installation:
    backend = root / "backends" / "python"
    found = Installation(root / "bin" / "tritonserver", backend, backend / STUB, root / "caches", "")
    _check_files(found, str(root), "tokenizer and detokenizer are Python models")
    here, embedded = _this_python(), embedded_python(found.stub)
    if embedded is not None and embedded != here:
        raise Unavailable(
            f"the server in {root} runs Python {embedded} models, and this is Python {here}: make the environment with "
            f"`make setup PYTHON=python{embedded}`"
        )
    check_numpy(package("numpy"), newest=None)
    return found


def embedded_python(stub: Path) -> str | None:
    """Return the version of the libpython that ``stub`` loads, such as ``3.12``; None if it names none."""
    named = re.search(rb"libpython(\d\.\d+)\.so", stub.read_bytes())
    return named.group(1).decode() if named else None


def _in_wheel() -> Installation:
    if problem := python_version.problem(sys.version_info[:2]):
        raise Unavailable(problem)
    check_glibc(*platform.libc_ver())
    check_numpy(package("numpy"))
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise Unavailable(f"tritonserver is not installed for {sys.executable}: `make setup` installs nvidia-pytriton")
    wheel = Path(spec.submodule_search_locations[0]) / "tritonserver"
    version = _this_python()
    found = Installation(
        tritonserver=wheel / "bin" / "tritonserver",
        backend_files=wheel / "backends" / "python",
        stub=wheel / "python_backend_stubs" / version / STUB,
        caches=wheel / "caches",
        libraries=find_libpython(version),
    )
    _check_files(found, "the nvidia-pytriton wheel", "`make setup` installs it again")
    return found


def _this_python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _check_files(found: Installation, where: str, why: str) -> None:
    for path in (found.tritonserver, found.backend_files, found.stub):
        if not path.exists():
            raise Unavailable(f"{where} is incomplete: {path} is missing; {why}")


def check_glibc(library: str, version: str) -> None:
    """library, version: as ``platform.libc_ver`` returns them."""
    if library != "glibc" or tuple(map(int, version.split(".")[:2])) < GLIBC:
        here = version if library == "glibc" else "another C library"
        raise Unavailable(f"tritonserver needs glibc 2.35 or newer (Debian 12, Ubuntu 22.04); this system has {here}")


def check_numpy(version: str | None, newest: int | None = 1) -> None:
    """version: None if numpy is not installed. newest: major version, None for any."""
    if version is None:
        raise Unavailable(f"numpy is not installed for {sys.executable}: `make setup` installs it")
    if newest is not None and int(version.split(".")[0]) > newest:
        raise Unavailable(
            f"numpy {version} corrupts tensors inside Triton's Python backend: install numpy < 2 (`make setup`)"
        )


def find_libpython(version: str) -> str:
    """Return the folder of this interpreter's libpython; "" if only the dynamic loader's exists."""
    name = f"libpython{version}.so.1.0"
    own = sysconfig.get_config_var("LIBDIR") or ""
    if (Path(own) / name).exists():
        return own
    if ctypes.util.find_library(f"python{version}"):
        return ""
    raise Unavailable(
        f"{name} is missing: Triton's Python backend embeds it. Install it (Debian: apt install libpython{version}) "
        "or use a Python built with --enable-shared"
    )


def _link(source: Path, link: Path) -> None:
    if link.is_symlink() and link.readlink() == source:
        return
    # Replaced atomically: a second supervisor that starts now never finds it missing.
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(source)
    fresh.replace(link)

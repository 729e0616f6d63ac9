"""Where tritonserver comes from: the nvidia-pytriton wheel in this Python's environment, checked and laid out.

Triton 2.51 of the wheel runs its Python models in a stub process per instance. The stub is chosen by Python
version, embeds the ``libpython`` the loader finds, and silently corrupts tensors when it meets numpy 2.
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from contract.errors import Unavailable

PYTHONS = ((3, 10), (3, 11), (3, 12))
GLIBC = (2, 35)


@dataclass(frozen=True)
class Installation:
    """A wheel that can run here. ``libraries`` is the folder of libpython, or "" if the loader knows it."""

    tritonserver: Path
    backend_files: Path
    stub: Path
    caches: Path
    libraries: str

    def link_backends(self, state_dir: Path) -> Path:
        """Makes ``state_dir/backends/python`` and returns ``state_dir/backends``.

        Links, not copies: the wheel's libraries find each other relative to their real paths, and
        the environment stays untouched.
        """
        python = state_dir / "backends" / "python"
        python.mkdir(parents=True, exist_ok=True)
        for source in (*sorted(self.backend_files.iterdir()), self.stub):
            _link(source, python / source.name)
        return python.parent


def find() -> Installation:
    """The installation of the running interpreter, or Unavailable that says what is missing and what to do."""
    check_python(sys.version_info[:2])
    check_glibc(_glibc())
    check_numpy(_version("numpy"))
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise Unavailable(f"tritonserver is not installed for {sys.executable}: `make setup` installs nvidia-pytriton")
    wheel = Path(spec.submodule_search_locations[0]) / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = Installation(
        tritonserver=wheel / "bin" / "tritonserver",
        backend_files=wheel / "backends" / "python",
        stub=wheel / "python_backend_stubs" / version / "triton_python_backend_stub",
        caches=wheel / "caches",
        libraries=find_libpython(version),
    )
    for path in (found.tritonserver, found.backend_files, found.stub):
        if not path.exists():
            raise Unavailable(
                f"the nvidia-pytriton wheel is incomplete: {path} is missing; `make setup` installs it again"
            )
    return found


def check_python(version: tuple[int, int]) -> None:
    if version not in PYTHONS:
        raise Unavailable(
            f"Python {version[0]}.{version[1]} cannot run Triton's Python models: 3.10, 3.11 or 3.12 can "
            "(their backend needs numpy < 2, which has no build for others)"
        )


def check_glibc(version: tuple[int, int] | None) -> None:
    """``version`` is None where the C library is not glibc."""
    if version is None:
        raise Unavailable("tritonserver needs glibc 2.35 or newer; this system's C library is another one")
    if version < GLIBC:
        raise Unavailable(
            f"tritonserver needs glibc 2.35 or newer (Debian 12, Ubuntu 22.04); here it is {version[0]}.{version[1]}"
        )


def check_numpy(version: str | None) -> None:
    """``version`` is None where numpy is not installed."""
    if version is None:
        raise Unavailable(f"numpy is not installed for {sys.executable}: `make setup` installs it")
    if int(version.split(".")[0]) >= 2:
        raise Unavailable(
            f"numpy {version} corrupts tensors inside Triton's Python backend: install numpy < 2 (`make setup`)"
        )


def find_libpython(version: str) -> str:
    """The folder of the libpython that belongs to this interpreter; "" if only the loader's own one exists."""
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


def _glibc() -> tuple[int, int] | None:
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except ValueError:
        return None
    return tuple(int(part) for part in version.split(".")[:2]) if name == "glibc" else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _link(source: Path, link: Path) -> None:
    if link.is_symlink() and link.readlink() == source:
        return
    # Made beside and moved over: a second supervisor starting now never finds it missing.
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(source)
    fresh.replace(link)

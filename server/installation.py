"""Where tritonserver comes from: NVIDIA's image, where we run in one, or the nvidia-pytriton wheel of this environment.

Triton runs its Python models in a stub process per instance, and a stub embeds one version of Python. The wheel has a
stub for each and silently corrupts tensors when it meets numpy 2; an image has one, and C++ backends (``tensorrtllm``)
that the wheel lacks. So where an image brings its own server, that one is taken.
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import os
import re
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from contract.errors import InvalidArgument, Unavailable

PYTHONS = ((3, 10), (3, 11), (3, 12))
GLIBC = (2, 35)
IN_IMAGES = Path("/opt/tritonserver")  # where NVIDIA's images keep it
STUB = "triton_python_backend_stub"


@dataclass(frozen=True)
class Installation:
    """A server that can run here. ``libraries`` is the folder of libpython, or "" if the loader knows it."""

    tritonserver: Path
    backend_files: Path
    stub: Path
    caches: Path
    libraries: str

    def link_backends(self, state_dir: Path) -> Path:
        """The folder for --backend-directory: an image's own, or ``state_dir/backends``, made of links into the wheel.

        Links, not copies: the wheel's libraries find each other relative to their real paths, and
        the environment stays untouched.
        """
        if self.stub.parent == self.backend_files:
            return self.backend_files.parent
        python = state_dir / "backends" / "python"
        python.mkdir(parents=True, exist_ok=True)
        for source in (*sorted(self.backend_files.iterdir()), self.stub):
            _link(source, python / source.name)
        return python.parent


def find(folder: Path | None = None) -> Installation:
    """The installation in ``folder``, else in NVIDIA's image, else the wheel's.

    folder: one with bin/tritonserver. Raises Unavailable that says what is missing and what to do, InvalidArgument for
    a folder that holds no server.
    """
    if folder is not None and not (folder / "bin" / "tritonserver").is_file():
        raise InvalidArgument("TRIDENT_TRITONSERVER", f"{folder} holds no bin/tritonserver")
    if folder is not None or (IN_IMAGES / "bin" / "tritonserver").is_file():
        return _in_image(folder or IN_IMAGES)
    return _in_wheel()


def _in_image(root: Path) -> Installation:
    backend = root / "backends" / "python"
    found = Installation(root / "bin" / "tritonserver", backend, backend / STUB, root / "caches", "")
    for path in (found.backend_files, found.stub):
        if not path.exists():
            raise Unavailable(
                f"{root} is incomplete: {path} is missing, and tokenizer and detokenizer are Python models"
            )
    here, embedded = f"{sys.version_info.major}.{sys.version_info.minor}", embedded_python(found.stub)
    if embedded is not None and embedded != here:
        raise Unavailable(
            f"the server in {root} runs Python {embedded} models, and this is Python {here}: make the environment with "
            f"`make setup PYTHON=python{embedded}`"
        )
    if _version("numpy") is None:
        raise Unavailable(f"numpy is not installed for {sys.executable}: `make setup` installs it")
    return found


def embedded_python(stub: Path) -> str | None:
    """``3.12``: the Python whose library a stub loads, as the stub names it; None where it names none."""
    named = re.search(rb"libpython(\d\.\d+)\.so", stub.read_bytes())
    return named.group(1).decode() if named else None


def _in_wheel() -> Installation:
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
        stub=wheel / "python_backend_stubs" / version / STUB,
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

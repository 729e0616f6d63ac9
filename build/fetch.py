"""From what a recipe calls its model to a local folder: a folder as it is, a hub id downloaded, only what is needed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import layout
from contract.errors import InvalidArgument

# Of the repository's top folder only; `original/` and `consolidated*` hold the same weights a second time.
PATTERNS = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
)
IGNORED = ("*/*", "consolidated*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def fetch(model: str, revision: str | None = None) -> Path:
    """The folder of a checkpoint.

    model: a folder (absolute, relative to the repository or to here, ``~`` allowed) or a Hugging Face hub id.
    Downloads go to the hub's own cache and honour HF_TOKEN, HF_HOME and HF_HUB_OFFLINE.
    Raises InvalidArgument ``model`` with one sentence when there is no such folder or the hub does not give it.
    """
    if (folder := local_folder(model)) is not None:
        return folder
    if not _HUB_ID.fullmatch(model):
        raise InvalidArgument(
            "model",
            f"there is no folder {model}, and it is no hub id (owner/name); looked in {layout.ROOT} and {Path.cwd()}",
        )
    return _download(model, revision)


def local_folder(model: str) -> Path | None:
    """The folder ``model`` names on this machine, or None if it names none."""
    given = Path(model).expanduser()
    for candidate in (given,) if given.is_absolute() else (layout.ROOT / given, Path.cwd() / given):
        if candidate.is_dir():
            return candidate.resolve()
        if candidate.exists():
            raise InvalidArgument("model", f"{candidate} is a file; give the folder that holds config.json")
    return None


def _download(hub_id: str, revision: str | None) -> Path:
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
        problem = f"{where} is neither a local folder nor in the hub's cache, and {why}"
        raise InvalidArgument("model", problem) from exc
    except (HfHubHTTPError, HFValidationError, OSError) as exc:
        raise InvalidArgument("model", f"{where} could not be downloaded: {str(exc).splitlines()[0]}") from exc

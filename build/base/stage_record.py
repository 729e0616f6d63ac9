"""What a finished stage leaves: a record of what it was made from and of every file it made.

A stage is done while its key is the same (recipe, inputs, code and versions, all by content) and its files are those
it left. A kill leaves no record, a changed or damaged file belies it: both run the stage again.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from build.base import digest, layout


class StageRecords:
    """The records of one engine, ``<folder>/stages/<stage>.json``; files are named relative to ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def problem(self, stage: str, key: str) -> str | None:
        """Why the stage must run: a few words, or None when it is done."""
        try:
            record = json.loads(self._path(stage).read_text(encoding="utf-8"))
            was, files = record["key"], dict(record["files"])
        except FileNotFoundError:
            return "not done yet"
        except (OSError, ValueError, KeyError, TypeError):
            return "its record is damaged"
        if was != key:
            return "what it is made from has changed"
        for name, expected in sorted(files.items()):
            path = self._folder / name
            if not path.is_file():
                return f"{name} is missing"
            if digest.sha256_file(path) != expected:
                return f"{name} is not the file that was made"
        return None

    def forget(self, stage: str) -> None:
        self._path(stage).unlink(missing_ok=True)

    def write(self, stage: str, key: str, made: Iterable[Path]) -> None:
        """Records the stage as done, whole or not at all. made: files, or folders with all that is in them."""
        files = [file for path in made for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
        hashes = {str(f.relative_to(self._folder)): digest.sha256_file(f) for f in files if f.is_file()}
        layout.write_whole(self._path(stage), json.dumps({"key": key, "files": hashes}, indent=2) + "\n")

    def digest(self, stage: str) -> str:
        """Of what the stage made; it goes into the keys of those after it."""
        return digest.sha256_file(self._path(stage))

    def _path(self, stage: str) -> Path:
        return self._folder / "stages" / f"{stage}.json"

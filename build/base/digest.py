"""SHA-256 of files and of JSON values; large files are hashed once and remembered until they are touched."""

import contextlib
import hashlib
import json
from pathlib import Path

from build.base import layout
from contract.manifest import sha256_file as _hash

CACHE = layout.ROOT / ".cache" / "sha256.json"
REMEMBERED_BYTES = 32 * 1024 * 1024  # below this hashing takes less than 30 ms


def sha256_json(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sha256_file(path: Path, cache: Path = CACHE) -> str:
    """Hex digest. A large file's digest is kept under its inode, size, mtime and ctime: no write goes unseen,
    because the kernel moves ctime on every change and no program can set it back."""
    stat = path.stat()
    if stat.st_size < REMEMBERED_BYTES:
        return _hash(path)
    place = f"{path.resolve()}:"
    key = f"{place}{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"
    if (known := _load(cache).get(key)) is not None:
        return known
    digest = _hash(path)
    # Read again: another build may have added to it while this one hashed.
    others = {k: v for k, v in _load(cache).items() if not k.startswith(place)}
    with contextlib.suppress(OSError):  # a full or read-only disk: it is hashed again the next time
        layout.write_whole(cache, json.dumps(others | {key: digest}, indent=0))
    return digest


def _load(cache: Path) -> dict[str, str]:
    try:
        known = json.loads(cache.read_text())
    except (OSError, ValueError):
        return {}  # absent or damaged: hashing again is the safe answer
    return known if isinstance(known, dict) else {}

"""Samples in a folder: files of lines by tenant and hour, which every process of the gateway writes under one lock.

A line is the digest of its request's id and JSON, or its Fernet token. Nothing else holds a sample's text: a deletion
removes the files, and what was generated for requests from before it is not written any more.
"""

from __future__ import annotations

import calendar
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import time
import urllib.parse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from contract.errors import InvalidArgument
from gateway.config.samples import SampleRules

KEPT, HELD = "kept", "held"  # HELD: requests that only a later rating keeps
_DELETED = "deleted"
_TENANT = "tenant="
_HOUR = "%Y%m%dT%H"
_HOUR_CHARS = len("20261123T06")
_DIGEST = 16  # hexadecimal digits
MAX_CHANGES = 20  # ratings of one request that replace each other
_FILES = 16  # of a full store: one of them goes when room is needed


def new_key() -> str:
    """Return a line for the file of keys."""
    return Fernet.generate_key().decode()


def cipher(path: Path | None) -> MultiFernet | None:
    """Return what encrypts with the first key of a file and decrypts with all of them. Raises InvalidArgument."""
    if path is None:
        return None
    try:
        keys = [Fernet(line.strip()) for line in path.read_bytes().splitlines() if line.strip()]
        return MultiFernet(keys)
    except (OSError, ValueError):
        problem = "must hold one key or more, a line each, as `python -m gateway samples new-key` prints them"
        raise InvalidArgument(str(path), problem) from None


class SampleStore:
    """The samples in one folder. Any number of processes may use it; all methods block and may raise OSError.

    keys: file of the keys; None: samples are not encrypted.
    Raises: InvalidArgument for a folder or a file that cannot be used.
    """

    def __init__(self, folder: Path, keys: Path | None) -> None:
        self.folder, self._cipher = folder, cipher(keys)
        self.encrypted = keys is not None
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._locked():
                pass
        except OSError as exc:
            raise InvalidArgument(str(folder), f"must be a folder that can be written: {exc.strerror or exc}") from exc

    def append(self, tenant: str, kind: str, samples: Sequence[dict[str, Any]], rules: SampleRules) -> int:
        """Write samples; return how many were not, because the tenant's were deleted after their request arrived."""
        with self._locked():
            deleted_s = self._deleted_s(tenant)
            current = [sample for sample in samples if sample["time"] > deleted_s]
            lines = defaultdict(list)
            for sample in current:
                lines[time.strftime(_HOUR, time.gmtime(sample["time"]))].append(self._line(tenant, sample))
            for hour, added in lines.items():
                self._write(tenant, kind, hour, added, rules)
            return len(samples) - len(current)

    def rate(self, tenant: str, feedback: dict[str, Any], rules: SampleRules) -> dict[str, Any] | None:
        """Put feedback beside the samples of its request; return what is stored, None if there is no such request.

        The same feedback again changes nothing; other feedback for the request and choice takes its place.
        Raises: InvalidArgument after MAX_CHANGES.
        """
        prefix, choice = self._digest(tenant, feedback["request_id"]), feedback["choice"]
        with self._locked():
            for path in (file for kind in (KEPT, HELD) for file in reversed(self._files(tenant, kind))):
                found = list(self._read(path, prefix))
                samples = [line for line in found if "feedback" not in line and choice in (None, line["choice"])]
                if not samples:
                    continue
                earlier = [line["feedback"] for line in found if "feedback" in line]
                same = [other for other in earlier if other["choice"] == choice][-1:]
                if same and {**same[0], "time": feedback["time"]} == feedback:
                    return same[0]
                if len(earlier) >= MAX_CHANGES:
                    raise InvalidArgument("request_id", f"must be one with fewer than {MAX_CHANGES} ratings")
                line = {"request_id": feedback["request_id"], "feedback": feedback}
                kind = path.parent.name
                if kind == HELD and feedback["rating"] in rules.keep:
                    promoted = [self._line(tenant, sample) for sample in samples]
                    self._write(tenant, KEPT, path.name[:_HOUR_CHARS], [*promoted, self._line(tenant, line)], rules)
                else:
                    self._write(tenant, kind, "", [self._line(tenant, line)], rules, path)
                return feedback
        return None

    def delete(self, tenant: str) -> int:
        """Remove all samples and feedback of a tenant, and refuse those of requests that arrived before now; return how
        many bytes went."""
        with self._locked():
            home = self._home(tenant)
            home.mkdir(exist_ok=True, mode=0o700)
            (home / _DELETED).write_text(repr(time.time()))
            return sum(_remove(path) for kind in (KEPT, HELD) for path in self._files(tenant, kind))

    def purge(self, rules: SampleRules, now_s: float) -> None:
        """Remove what is older than the rules allow; it may be gone an hour earlier."""
        with self._locked():
            for tenant in self.tenants():
                for kind, age_s in ((KEPT, rules.days * 86_400), (HELD, rules.hold_s)):
                    for path in self._files(tenant, kind):
                        began_s = calendar.timegm(time.strptime(path.name[:_HOUR_CHARS], _HOUR))
                        if began_s + age_s <= now_s:
                            _remove(path)

    def tenants(self) -> list[str]:
        """Return the tenants that have, or had, samples."""
        found = (path.name.removeprefix(_TENANT) for path in self.folder.glob(f"{_TENANT}*"))
        return sorted(map(urllib.parse.unquote, found))

    def samples(self, tenant: str) -> Iterator[dict[str, Any]]:
        """Yield the samples that are kept of a tenant, oldest file first, each with its latest ``feedback``."""
        for path in self._files(tenant, KEPT):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                lines = list(self._read(path))
                rated = [line["feedback"] | {"request_id": line["request_id"]} for line in lines if "feedback" in line]
                for sample in (line for line in lines if "feedback" not in line):
                    own = [one for one in rated if _about(one, sample)]
                    if own:
                        reasons = [*sample["reasons"], *({own[-1]["rating"]} - {*sample["reasons"]})]
                        sample |= {"feedback": own[-1], "reasons": reasons}
                    yield sample

    def summary(self) -> list[dict[str, Any]]:
        """Return what is kept of each tenant, without any text."""
        rows = []
        for tenant in self.tenants():
            files = {kind: self._files(tenant, kind) for kind in (KEPT, HELD)}
            sizes = {f"{kind}_bytes": sum(map(_size, paths)) for kind, paths in files.items()}
            times = [sample["time"] for sample in self.samples(tenant)]
            oldest_s, newest_s = (min(times), max(times)) if times else (None, None)
            rows.append({"tenant": tenant, "samples": len(times), "oldest": oldest_s, "newest": newest_s, **sizes})
        return rows

    def _write(
        self, tenant: str, kind: str, hour: str, lines: list[bytes], rules: SampleRules, path: Path | None = None
    ) -> None:
        """Append lines to a file of this hour, or to ``path``, once the oldest files made room."""
        limit = rules.bytes if kind == KEPT else rules.hold_bytes
        sizes = {file: _size(file) for file in self._files(tenant, kind)}
        if path is None:
            own = [file for file in sizes if file.name.startswith(hour)]
            last = int(own[-1].stem[_HOUR_CHARS + 1 :]) if own else 0
            path = (
                self._home(tenant) / kind / f"{hour}-{last + bool(own and sizes[own[-1]] >= limit // _FILES):06d}.jsonl"
            )
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        data = b"".join(lines)
        while sizes and sum(sizes.values()) + len(data) >= limit:
            oldest = next((file for file in sizes if file != path), path)
            del sizes[oldest]
            _remove(oldest)
        if len(data) >= limit:
            raise OSError(errno.EFBIG, "more was added at once than the tenant may have")
        with open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            if file.tell() and not _ends_whole(path):  # the process that wrote it was killed
                file.write(b"\n")
            file.write(data)

    def _read(self, path: Path, prefix: bytes = b"") -> Iterator[dict[str, Any]]:
        """Yield the lines of a file that begin with a digest. One that a killed process cut, or that no key decrypts,
        is left out."""
        for line in path.read_bytes().split(b"\n"):
            if line.startswith(prefix) and len(line) > _DIGEST:
                data = line[_DIGEST + 1 :]
                with contextlib.suppress(ValueError, InvalidToken):
                    yield orjson.loads(self._cipher.decrypt(data) if self._cipher is not None else data)

    def _line(self, tenant: str, fields: dict[str, Any]) -> bytes:
        data = json.dumps(fields, ensure_ascii=False, default=str).encode(errors="replace")
        data = self._cipher.encrypt(data) if self._cipher is not None else data
        return b"%s %s\n" % (self._digest(tenant, fields["request_id"]), data)

    def _digest(self, tenant: str, request_id: str) -> bytes:
        return hashlib.sha256(f"{tenant}\n{request_id}".encode(errors="replace")).hexdigest()[:_DIGEST].encode()

    def _home(self, tenant: str) -> Path:
        return self.folder / f"{_TENANT}{urllib.parse.quote(tenant, safe='')}"

    def _files(self, tenant: str, kind: str) -> list[Path]:
        """Return the files, oldest first."""
        return sorted((self._home(tenant) / kind).glob("*.jsonl"))

    def _deleted_s(self, tenant: str) -> float:
        try:
            return float((self._home(tenant) / _DELETED).read_text())
        except FileNotFoundError:
            return 0.0

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes and threads out. The system ends the lock of a process that is killed."""
        with open(self.folder / ".lock", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _about(rating: dict[str, Any], sample: dict[str, Any]) -> bool:
    return rating["request_id"] == sample["request_id"] and rating["choice"] in (None, sample["choice"])


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _remove(path: Path) -> int:
    size = _size(path)
    path.unlink(missing_ok=True)
    return size


def _ends_whole(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"

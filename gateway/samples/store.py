"""Samples in a folder: files of lines by tenant and hour, which every process of the gateway writes under one lock.

A line is the digest of its request's id and JSON, or its Fernet token. Nothing else holds a sample's text: a deletion
removes the files, and what was generated for requests from before it is not written any more.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import time
import urllib.parse
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from contract.errors import InvalidArgument, NotFound, Unavailable
from gateway.config.samples import SampleRules
from gateway.config.settings import variable
from gateway.config.tenant import Tenant

KEPT, HELD = "kept", "held"  # HELD: requests that only a later rating keeps
_DELETED = "deleted"
_TENANT = "tenant="
_HOUR = "%Y%m%dT%H"
_HOUR_CHARS = len("20261123T06")
_DIGEST = 16  # hexadecimal digits
MAX_CHANGES = 20  # ratings of one request that replace each other
_SEGMENTS = f"{'[0-9]' * 8}T[0-9][0-9]-{'[0-9]' * 6}.jsonl"  # names of the files; others in the folder stay
_FILES = 16  # of a full store: one of them goes when room is needed


def new_key() -> str:
    """Return a line for the file of keys."""
    return Fernet.generate_key().decode()


def cipher(path: Path | None) -> MultiFernet | None:
    """Return what encrypts with the first key of a file and decrypts with all of them. Raises InvalidArgument."""
    if path is None:
        return None
    try:
        return MultiFernet([Fernet(line.strip()) for line in path.read_bytes().splitlines() if line.strip()])
    except (OSError, ValueError):
        problem = "must be a file of keys, a line each, as `python -m gateway samples new-key` prints them"
        raise InvalidArgument(variable("samples_keys"), f"{problem}, got {path}") from None


class SampleStore:
    """The samples in one folder, of any number of processes. All methods block, and may raise Unavailable."""

    def __init__(self, folder: Path, keys: Path | None) -> None:
        """keys: file of the keys; None: samples are not encrypted. Raises: InvalidArgument for what cannot be used."""
        self.folder, self._cipher, self.encrypted = folder, cipher(keys), keys is not None
        self.unreadable = 0  # lines found so far that a killed process cut, or that none of the keys decrypts
        try:
            with self._locked():
                pass
        except Unavailable as exc:
            raise InvalidArgument(variable("samples"), f"must be a folder to write to, got {folder}: {exc}") from exc

    def append(self, tenant: str, kind: str, samples: Sequence[dict[str, Any]], rules: SampleRules) -> int:
        """Write samples; return how many were not, because the tenant's were deleted after their request arrived."""
        with self._locked():
            deleted_s = self._deleted_s(tenant)
            current = [sample for sample in samples if sample["time"] > deleted_s]
            for sample in current:
                self._write(self._segment(tenant, kind, _hour(sample["time"]), rules), [sample], rules)
            return len(samples) - len(current)

    def rate(self, tenant: str, feedback: dict[str, Any], rules: SampleRules) -> dict[str, Any] | None:
        """Put feedback beside its request's samples; return what is stored, None if there is no such request.

        Other feedback for the request and choice takes its place. Raises: InvalidArgument after MAX_CHANGES.
        """
        prefix, choice = _digest(feedback["request_id"]), feedback["choice"]
        stored, rated, added = None, set[int](), defaultdict[Path, list[dict[str, Any]]](list)
        hours = set[str]()  # of the request, whose choices arrived together: only their files are read
        with self._locked():
            for path in (file for kind in (KEPT, HELD) for file in reversed(self._files(tenant, kind))):
                if hours and path.name[:_HOUR_CHARS] not in hours:
                    continue
                found = list(self._read(path, prefix))
                own = [one for one in found if "feedback" not in one and one["choice"] not in rated]
                samples = [one for one in own if choice in (None, one["choice"])]
                if not samples:
                    continue
                rated.update(one["choice"] for one in samples)
                hours |= {_hour(one["time"] + apart_s) for one in samples for apart_s in (-1.0, 0.0, 1.0)}
                earlier = [one["feedback"] for one in found if "feedback" in one]
                same = [other for other in earlier if other["choice"] == choice][-1:]
                if same and {**same[0], "time": feedback["time"]} == feedback:
                    stored = same[0]
                    continue
                if len(earlier) >= MAX_CHANGES:
                    raise InvalidArgument("request_id", f"must be one with fewer than {MAX_CHANGES} ratings")
                if path.parent.name == HELD and feedback["rating"] in rules.keep:
                    added[self._segment(tenant, KEPT, path.name[:_HOUR_CHARS], rules)] += samples
                else:
                    added[path] += []
            line = {"request_id": feedback["request_id"], "feedback": feedback}
            for path, samples in added.items():
                self._write(path, [*samples, line], rules)
        return feedback if added else stored

    def delete(self, tenant: str, member: Callable[[str, str, str], Tenant | None] | None = None) -> int:
        """Remove a tenant's samples, and refuse those of earlier requests; return their bytes. Raises: NotFound."""
        org, _, team = tenant.partition("/")
        with self._locked():
            if member is not None and not self._home(tenant).is_dir() and not (team and member(org, team, "")):
                raise NotFound(f"{tenant!r:.100} has no samples and is no team of the configuration")
            marker, now_s = self._home(tenant) / _DELETED, time.time()
            marker.parent.mkdir(exist_ok=True, mode=0o700)
            marker.touch()
            os.utime(marker, (now_s, now_s))
            files = [*self._files(tenant, KEPT), *self._files(tenant, HELD)]
            size = _size(files)
            for path in files:
                path.unlink()
            return size

    def purge(self, rules: SampleRules, now_s: float) -> None:
        """Remove what is older than the rules allow; it may be gone an hour earlier."""
        with self._locked():
            for tenant in self.tenants():
                for kind, age_s in ((KEPT, rules.days * 86_400), (HELD, rules.hold_s)):
                    for path in self._files(tenant, kind):
                        if path.name[:_HOUR_CHARS] <= _hour(now_s - age_s):
                            path.unlink()

    def tenants(self) -> list[str]:
        """Return the tenants that have, or had, samples."""
        found = (path.name.removeprefix(_TENANT) for path in self.folder.glob(f"{_TENANT}*"))
        return sorted(map(urllib.parse.unquote, found))

    def samples(self, tenant: str) -> Iterator[dict[str, Any]]:
        """Yield the samples that are kept of a tenant, oldest file first, each with its latest ``feedback``."""
        for path in self._files(tenant, KEPT):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                lines = list(self._read(path))
                rated = defaultdict[str, list[dict[str, Any]]](list)
                for line in lines:
                    rated[line["request_id"]] += [line["feedback"]] if "feedback" in line else []
                for sample in (line for line in lines if "feedback" not in line):
                    for rating in rated[sample["request_id"]]:  # the latest one stays
                        if rating["choice"] in (None, sample["choice"]):
                            sample["feedback"] = rating
                    if "feedback" in sample:
                        sample["reasons"] += {sample["feedback"]["rating"]} - {*sample["reasons"]}
                    yield sample

    def summary(self) -> list[dict[str, Any]]:
        """Return what is kept of each tenant, without any text."""
        rows = []
        for tenant in self.tenants():
            times = [sample["time"] for sample in self.samples(tenant)]
            with self._locked():
                sizes = {f"{kind}_bytes": _size(self._files(tenant, kind)) for kind in (KEPT, HELD)}
            row = {"tenant": tenant, "samples": len(times), "oldest": min(times, default=None)}
            rows.append(row | {"newest": max(times, default=None)} | sizes)
        return rows

    def _segment(self, tenant: str, kind: str, hour: str, rules: SampleRules) -> Path:
        """Return the file for what is added to an hour: its last one, or another once that is large."""
        own = [path for path in self._files(tenant, kind) if path.name.startswith(hour)]
        if own and own[-1].stat().st_size < _limit(kind, rules) // _FILES:
            return own[-1]
        number = int(own[-1].stem[-6:]) + 1 if own else 0
        return self._home(tenant) / kind / f"{hour}-{number:06d}.jsonl"

    def _write(self, path: Path, lines: Sequence[dict[str, Any]], rules: SampleRules) -> None:
        """Append lines to a file, once the oldest files of its tenant and kind made room."""
        data, limit = b"".join(map(self._line, lines)), _limit(path.parent.name, rules)
        if len(data) >= limit:
            raise OSError(errno.EFBIG, "more was added at once than the tenant may have")
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        sizes = {file: file.stat().st_size for file in sorted(path.parent.glob(_SEGMENTS))}
        while sum(sizes.values()) + len(data) >= limit:
            oldest = next((file for file in sizes if file != path), path)
            del sizes[oldest]
            oldest.unlink()
        with open(path, "a+b", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                data = b"\n" * (file.read(1) != b"\n") + data  # the process that wrote it was killed
            file.write(data)

    def _read(self, path: Path, prefix: bytes = b"") -> Iterator[dict[str, Any]]:
        """Yield the lines of a file that begin with a digest, and count those that cannot be read."""
        for line in path.read_bytes().split(b"\n"):
            if line.startswith(prefix) and len(line) > _DIGEST:
                data = line[_DIGEST + 1 :]
                try:
                    fields = orjson.loads(self._cipher.decrypt(data) if self._cipher is not None else data)
                except (ValueError, InvalidToken):
                    self.unreadable += 1
                    continue
                yield fields

    def _line(self, fields: dict[str, Any]) -> bytes:
        data = json.dumps(fields, ensure_ascii=False, default=str).encode(errors="replace")
        data = self._cipher.encrypt(data) if self._cipher is not None else data
        return b"%s %s\n" % (_digest(fields["request_id"]), data)

    def _home(self, tenant: str) -> Path:
        return self.folder / f"{_TENANT}{urllib.parse.quote(tenant, safe='')}"

    def _files(self, tenant: str, kind: str) -> list[Path]:
        """Return the files, oldest first."""
        return sorted((self._home(tenant) / kind).glob(_SEGMENTS))

    def _deleted_s(self, tenant: str) -> float:
        try:
            return (self._home(tenant) / _DELETED).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes and threads out. The system ends the lock of a process that is killed."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # an operator may have removed it
            with open(self.folder / ".lock", "ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield
        except OSError as exc:
            raise Unavailable(f"the folder of samples cannot be used: {exc.strerror or exc}", 5.0) from exc


def _hour(time_s: float) -> str:
    return time.strftime(_HOUR, time.gmtime(time_s))


def _size(files: list[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def _limit(kind: str, rules: SampleRules) -> int:
    return rules.bytes if kind == KEPT else rules.hold_bytes


def _digest(request_id: str) -> bytes:
    return hashlib.sha256(request_id.encode(errors="replace")).hexdigest()[:_DIGEST].encode()

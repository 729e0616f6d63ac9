"""Files of servers: whose worker lives, whose died, and those that are left over."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cluster.ray import ownership


def written(folder: Path, pid: int, *more: str, started: str = "", gpus: str = "") -> Path:
    """Write the file of a server whose supervisor is ``pid``, as ``keep`` does."""
    started = started or Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    (folder / "status").write_text(json.dumps({"state": "ready", "started": int(started)}))
    file = folder / "replica-kind-1.owner"
    file.write_text("\n".join((str(pid), str(folder / "status"), gpus, *more)) + "\n")
    return file


def test_an_owned_server_is_left_alone_until_its_worker_releases_it(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.print", None)  # Ray's own in its workers writes something else into files
    written(tmp_path, os.getpid())
    first = ownership.adopted(tmp_path, "replica-kind-", "")
    assert first is not None and first.state == "ready"
    assert ownership.adopted(tmp_path, "replica-kind-", "") is None
    first.release()
    second = ownership.adopted(tmp_path, "replica-kind-", "")
    assert second is not None
    second.stop()
    second.release()
    assert ownership.adopted(tmp_path, "replica-kind-", "") is None  # it drains


@pytest.mark.parametrize("started", ["1", ""])
def test_the_file_of_a_supervisor_that_has_ended_goes_also_where_its_number_was_given_again(tmp_path, started):
    file = written(tmp_path, os.getpid() if started else 2**22 + 1, started=started)
    assert ownership.adopted(tmp_path, "replica-kind-", "") is None
    assert not file.exists()


def test_a_server_that_starts_is_of_another_kind_or_does_not_serve_is_not_adopted(tmp_path):
    file = tmp_path / "replica-kind-1.owner"
    file.touch()
    assert ownership.adopted(tmp_path, "replica-kind-", "") is None and file.exists()
    written(tmp_path, os.getpid())
    assert ownership.adopted(tmp_path, "replica-other-", "0,1") is None
    status = json.loads((tmp_path / "status").read_text())
    (tmp_path / "status").write_text(json.dumps({**status, "state": "draining"}))
    assert ownership.adopted(tmp_path, "replica-kind-", "") is None and file.exists()

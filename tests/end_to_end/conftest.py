"""A real tritonserver with the real model repository and the demo engine, shared by the tests of this folder."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

from server.replica import Replica, running

ROOT = Path(__file__).resolve().parents[2]
DEATHS = pytest.StashKey[dict[str, int]]()
DIED = pytest.StashKey[bool]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.end_to_end)


@pytest.fixture(scope="session")
def engine_dir() -> Path:
    """engines/demo, built from the recipe and the checkpoint that ship unless it is there already."""
    subprocess.run([sys.executable, "-m", "build.engine", "--engine", "demo"], cwd=ROOT, check=True, timeout=120)
    return ROOT / "engines" / "demo"


@pytest.fixture(scope="module")
def replica(engine_dir: Path) -> Iterator[Replica]:
    """One server per test file: what one file does to it, another does not see.

    It asks no canaries once it is ready: they would be among what is counted. A halted worker is no fault here.
    """
    with running("demo", canary_interval_s=3600, stall_s=3600) as server:
        yield server


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """A failed test shows the end of the server's log and of its supervisor's."""
    report = (yield).get_result()
    server = getattr(item, "funcargs", {}).get("replica")
    if report.failed and server is not None:
        log = server.log()
        report.sections.append(("tritonserver's log", log[-20000:]))
        report.sections.append(("the supervisor's output", server.output.read_text()[-5000:]))
        deaths = len(re.findall(r"unaligned \w+ chunk detected", log))
        seen = item.session.stash.setdefault(DEATHS, {})
        if deaths > seen.get(server.grpc_url, 0):
            item.stash[DIED] = True
            server.wait_until_ready()  # the supervisor starts another
        seen[server.grpc_url] = deaths


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A test during which tritonserver damaged its memory (docs/decisions/0048) runs again on the next server."""
    if Path(__file__).parent not in item.path.parents:
        return None
    report, place = item.ihook, {"nodeid": item.nodeid, "location": item.location}
    report.pytest_runtest_logstart(**place)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    if item.stash.get(DIED, False):
        print(f"\n{item.nodeid}: tritonserver died of its own race; once more")
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
    for one in reports:
        report.pytest_runtest_logreport(report=one)
    report.pytest_runtest_logfinish(**place)
    return True

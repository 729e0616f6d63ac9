"""A scripted replica to measure: its pace is known, so what the load generator says of it can be held against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.fakes.replica import FakeReplica, replica_in_thread


@pytest.fixture
def replica() -> Iterator[Callable[..., FakeReplica]]:
    """``replica(script, slots=…)`` runs in a thread of its own until the test ends."""
    with ExitStack() as stack:
        yield lambda *script, **options: stack.enter_context(replica_in_thread(*script, **options))

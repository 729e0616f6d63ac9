"""What the tests of the cluster share."""

from __future__ import annotations

import pytest

from tests.gateway.conftest import SteppedClock


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()

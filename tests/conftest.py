"""What all tests share: the devices they run on."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["cpu"])
def device(request: pytest.FixtureRequest) -> str:
    """Each device that kvcupy has; a test that takes it runs on all of them."""
    return str(request.param)

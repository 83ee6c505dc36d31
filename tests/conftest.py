"""What all tests share: the devices they run on."""

from __future__ import annotations

import pytest

from kvcupy import DeviceUnavailable
from kvcupy.backends import get_backend


@pytest.fixture(params=["cpu", "ptx", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """Each device that kvcupy has; a test that takes it runs on all of them that answer here."""
    name = str(request.param)
    try:
        get_backend(name)
    except DeviceUnavailable as reason:
        pytest.skip(str(reason))
    return name


@pytest.fixture
def ptx() -> None:
    """Skips a test that needs the device `ptx` where it cannot run."""
    try:
        get_backend("ptx")
    except DeviceUnavailable as reason:
        pytest.skip(str(reason))

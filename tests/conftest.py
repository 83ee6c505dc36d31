"""What all tests share: the devices they run on."""

from __future__ import annotations

import pytest

from kvcupy import DeviceUnavailable
from kvcupy.backends import get_backend

DEVICES: list[str] = []
MISSING: list[str] = []
for _name in ("cpu", "ptx", "cuda"):
    try:
        get_backend(_name)
        DEVICES.append(_name)
    except DeviceUnavailable as _reason:
        MISSING.append(str(_reason))


def pytest_report_header() -> list[str]:
    return [f"devices: {', '.join(DEVICES)}", *(f"not tested: {reason}" for reason in MISSING)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Each device that answers here; a test that takes it runs on all of them."""
    return str(request.param)


@pytest.fixture
def ptx() -> None:
    """For tests of the device ptx alone."""
    if "ptx" not in DEVICES:
        pytest.skip("the device ptx does not answer here")

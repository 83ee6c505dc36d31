"""How decode is measured: how much memory to go through, and which results to believe.

What is read must not fit in the cache of the machine, or the cache would be measured and not memory. So a
measurement goes round many layer pools that together are far larger, none twice in a row.
"""

from __future__ import annotations

from kvcupy.backends import Backend
from kvcupy.errors import KVCupyError

MIN_WORKING_SET_BYTES = 1 << 30
CACHE_MULTIPLE = 8
"""The working set is at least this many times the last-level cache, and MIN_WORKING_SET_BYTES."""

MIN_READ_BYTES = 1 << 20
"""What one measured call reads, at least: below, the call itself takes longer."""

MAX_SHARE = 1.02
"""A larger share of the read bandwidth is a fault of the measurement, not a result."""


def layer_pools(backend: Backend, kv_bytes: int) -> int:
    """How many layer pools, of which a decode reads kv_bytes each, make up a working set: at least 2.

    A device that is not timed needs no more than 2.
    """
    if not backend.timed:
        return 2
    wanted = max(MIN_WORKING_SET_BYTES, CACHE_MULTIPLE * backend.last_level_cache_bytes())
    return max(2, -(-wanted // kv_bytes))


def require_plausible(share: float) -> None:
    """Raises KVCupyError if decode seems to have read faster than a plain sum of the same memory."""
    if share > MAX_SHARE:
        raise KVCupyError(
            f"decode seems to read {share:.2f} times what memory delivered to a plain sum: "
            "the machine's speed changed during the run; repeat it when the machine is quiet"
        )

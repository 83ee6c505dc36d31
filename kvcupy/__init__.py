"""kvcupy: a paged KV cache and decode attention for LLM inference, without PyTorch.

`KVCache` is the cache as an inference loop uses it; `append`, `decode_attention`, `gather` and `merge_states` are
its operations over memory that the caller owns; `KVSpec` and `PageAllocator` do their sums without any memory.
"""

from kvcupy.allocator import PageAllocator
from kvcupy.cache import CacheStats, KVCache, Step
from kvcupy.errors import DeviceUnavailable, IntegrityError, KVCupyError, OutOfPages, StaleStep
from kvcupy.ops import append, decode_attention, gather, merge_states
from kvcupy.pool import KVPool, LayerPool
from kvcupy.spec import KVSpec, Strides

__all__ = [
    "CacheStats",
    "DeviceUnavailable",
    "IntegrityError",
    "KVCache",
    "KVCupyError",
    "KVPool",
    "KVSpec",
    "LayerPool",
    "OutOfPages",
    "PageAllocator",
    "StaleStep",
    "Step",
    "Strides",
    "append",
    "decode_attention",
    "gather",
    "merge_states",
]

__version__ = "0.1.0"

"""Decode attention on the cpu device: GB/s of K and V, and the share of the same run's read bandwidth.

Rotates over layers of one pool that together are far larger than the last-level cache.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from kvcupy.backends import get_backend
from kvcupy.backends.base import STORAGE_DTYPES, Layer
from kvcupy.spec import LAYOUTS, KVSpec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--q-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--dtype", choices=STORAGE_DTYPES, default="float16")
    parser.add_argument("--layout", choices=LAYOUTS, default="interleaved")
    parser.add_argument("--working-set-gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5, help="passes over the whole working set")
    args = parser.parse_args()

    backend = get_backend("cpu")
    spec = KVSpec(
        num_layers=1,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        page_size=args.page_size,
        dtype=args.dtype,
        layout=args.layout,
    )
    pages = spec.pages_for(args.tokens)
    num_pages = pages * args.batch
    num_layers = max(2, round(args.working_set_gib * 2**30 / (num_pages * spec.page_bytes)))
    rng = np.random.default_rng(0)
    pool = backend.allocate(num_layers * num_pages * spec.page_bytes).reshape(num_layers, -1)
    tile = rng.standard_normal(1 << 20).astype(STORAGE_DTYPES[args.dtype]).view(np.uint8)
    for layer in pool:
        layer[:] = np.resize(tile, layer.size)
    layers = [
        Layer(spec, num_pages, backend.address(data), spec.strides, spec.padding_bytes_per_row) for data in pool
    ]
    # Pages in random order, as after a long run of an allocator.
    page_table = rng.permutation(num_pages).astype(np.int32).reshape(args.batch, pages)
    seq_lens = np.full(args.batch, args.tokens, np.int32)
    q = rng.standard_normal((args.batch, args.q_heads, args.head_dim), np.float32)
    out = np.empty_like(q)

    def step(layer: Layer) -> float:
        start = time.perf_counter()
        backend.decode_attention(layer, q, page_table, seq_lens, None, args.head_dim**-0.5, out, None)
        return time.perf_counter() - start

    print(f"{backend.describe()}; working set {pool.nbytes / 2**30:.2f} GiB in {num_layers} layers")
    print(f"first call {step(layers[0]):.2f} s")
    seconds = [statistics.fmean(map(step, layers)) for _ in range(args.rounds)]
    nbytes = 2 * args.batch * args.tokens * args.kv_heads * args.head_dim * spec.itemsize
    rate = nbytes / statistics.median(seconds)
    bandwidth = backend.read_bandwidth() or float("nan")
    print(
        f"decode {rate / 1e9:.1f} GB/s (best round {nbytes / min(seconds) / 1e9:.1f}), "
        f"read bandwidth {bandwidth / 1e9:.1f} GB/s, share {rate / bandwidth:.0%}"
    )


if __name__ == "__main__":
    main()

"""What the page allocator costs the host: ns a page to allocate and free a sequence, µs a step for a batch.

    python benchmarks/bench_allocator.py [--json]

Best of several rounds, in CPython, on one core. The step is the usual one: one more token for each sequence, at
random places in their pages, so that on average batch / page_size of them take a new page.
"""

from __future__ import annotations

import argparse
import json
import random
from timeit import repeat

from kvcupy import PageAllocator

PAGE_SIZE = 16
ROUNDS = 7


def ns_per_page(pages: int) -> float:
    """Allocate and free a sequence of so many pages."""
    allocator = PageAllocator(4 * pages, PAGE_SIZE)

    def once() -> None:
        sequence = allocator.add()
        allocator.reserve({sequence: pages * PAGE_SIZE})
        allocator.free(sequence)

    calls = 2000
    return min(repeat(once, number=calls, repeat=ROUNDS)) / calls / pages * 1e9


def us_per_step(batch: int) -> float:
    """One more token for each sequence of a batch."""
    steps = 2000
    allocator = PageAllocator(batch * (64 + steps * ROUNDS // PAGE_SIZE + 1), PAGE_SIZE)
    rng = random.Random(0)
    sequences = [allocator.add() for _ in range(batch)]
    allocator.reserve({sequence: 1000 + rng.randrange(PAGE_SIZE) for sequence in sequences})
    counts = dict.fromkeys(sequences, 1)
    return min(repeat(lambda: allocator.reserve(counts), number=steps, repeat=ROUNDS)) / steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = {"ns_per_page_of_128": ns_per_page(128), "us_per_step_of_64": us_per_step(64)}
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    print(f"allocate and free a sequence of 128 pages: {result['ns_per_page_of_128']:.1f} ns a page")
    print(f"one more token for each of 64 sequences:   {result['us_per_step_of_64']:.1f} µs a step")


if __name__ == "__main__":
    main()

"""How much memory a way of allocating wastes: the same seeded churn of requests through each, not executed.

Requests of lognormal lengths arrive a little faster than a pool of `slots` token slots can serve them, wait
first come first served until they fit, store their prompt, grow by one token a step, and leave after the
last. A request of p prompt and o output tokens stores p + o - 1.

contiguous: one run of exactly the final length, first fit, in one arena of token slots.
paged: pages of page_size slots from `PageAllocator`, taken as the sequence grows. A request waits until the
    final lengths of all fit, so that both strategies admit by the same rule and neither preempts.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from kvcupy.allocator import PageAllocator
from kvcupy.errors import IntegrityError, OutOfPages
from kvcupy.simulate.workload import synthesize
from kvcupy.spec import whole_number

STRATEGIES = ("contiguous", "paged")
PROMPT_TOKENS = "lognormal:512:1.0"
OUTPUT_TOKENS = "lognormal:192:0.8"
LOAD = 1.2  # requests arrive this much faster than a pool that is always full would serve them


@dataclass(frozen=True)
class Fragmentation:
    """What a churn of requests did to a pool.

    internal_fragmentation: 1 - tokens stored / slots reserved, both summed over the steps (time-weighted):
        slots that a sequence holds and does not use, not yet or never.
    external_fragmentation: 1 - largest run of slots that one sequence could be granted / all slots that
        nobody holds, the mean over the events (admissions and departures); 0 where no slot is free.
    peak_slots: most slots reserved at any step.
    peak_pages: most pages at any step; a contiguous sequence is one page.
    """

    strategy: str
    internal_fragmentation: float
    external_fragmentation: float
    peak_slots: int
    peak_pages: int


class FirstFitArena:
    """Runs of slots from one arena, each at the lowest address where it fits; freed neighbours coalesce.

    >>> arena = FirstFitArena(10)
    >>> arena.allocate(4), arena.allocate(4)
    (0, 4)
    >>> arena.free(0)
    >>> arena.free_slots, arena.largest_run
    (6, 4)
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = whole_number("num_slots", num_slots, 0)
        # Free runs by address: where each starts and ends. Never empty, never touching.
        self._starts = [0] if num_slots else []
        self._ends = [num_slots] if num_slots else []
        self._used: dict[int, int] = {}  # start -> end

    @property
    def free_slots(self) -> int:
        """Slots that belong to no run."""
        return sum(self._ends) - sum(self._starts)

    @property
    def largest_run(self) -> int:
        """The longest run that could be allocated now."""
        return max(map(int.__sub__, self._ends, self._starts), default=0)

    def allocate(self, slots: int) -> int:
        """The first slot of a new run. Raises OutOfPages, and changes nothing, where none is as long."""
        slots = whole_number("slots", slots, 1)
        runs = enumerate(zip(self._starts, self._ends, strict=True))
        at = next((at for at, (start, end) in runs if end - start >= slots), None)
        if at is None:
            raise OutOfPages(slots, self.largest_run)
        start = self._starts[at]
        self._starts[at] += slots
        if self._starts[at] == self._ends[at]:
            del self._starts[at], self._ends[at]
        self._used[start] = start + slots
        return start

    def free(self, start: int) -> None:
        """Give back the run that starts here. A ValueError if there is none."""
        if start not in self._used:
            raise ValueError(f"no run starts at slot {start!r}")
        end = self._used.pop(start)
        at = bisect_left(self._starts, start)
        if at < len(self._starts) and self._starts[at] == end:
            end = self._ends[at]
            del self._starts[at], self._ends[at]
        if at and self._ends[at - 1] == start:
            self._ends[at - 1] = end
        else:
            self._starts.insert(at, start)
            self._ends.insert(at, end)

    def check_integrity(self) -> None:
        """Prove that runs tile the arena and that no two free ones touch. Raises IntegrityError."""
        free = list(zip(self._starts, self._ends, strict=True))
        position = 0
        for start, end in sorted(free + list(self._used.items())):
            if start != position or end <= start:
                raise IntegrityError(f"runs do not tile the arena at slot {position}")
            position = end
        if position != self.num_slots or not set(self._starts).isdisjoint(self._ends):
            raise IntegrityError("runs do not fill the arena, or free runs touch")


class _Strategy(Protocol):
    """A way of giving slots to sequences; the churn adds up what it reports."""

    @property
    def reserved_slots(self) -> int: ...

    @property
    def free_slots(self) -> int: ...

    @property
    def largest_grant_slots(self) -> int:
        """Slots of the largest single sequence that could be added now."""
        ...

    @property
    def pages(self) -> int: ...

    def admit(self, prompt_tokens: int, final_tokens: int) -> int:
        """Id of a new sequence. Raises OutOfPages when it must wait."""
        ...

    def grow(self) -> None:
        """One more token for every sequence."""
        ...

    def leave(self, sequence: int) -> None: ...


class _Contiguous:
    def __init__(self, slots: int) -> None:
        self.arena = FirstFitArena(slots)
        self.pages = 0
        self.reserved_slots = 0
        self.lengths: dict[int, int] = {}

    @property
    def free_slots(self) -> int:
        return self.arena.free_slots

    @property
    def largest_grant_slots(self) -> int:
        return self.arena.largest_run

    def admit(self, prompt_tokens: int, final_tokens: int) -> int:
        start = self.arena.allocate(final_tokens)
        self.lengths[start] = final_tokens
        self.reserved_slots += final_tokens
        self.pages += 1
        return start

    def grow(self) -> None:
        """The room was reserved at admission."""

    def leave(self, sequence: int) -> None:
        self.arena.free(sequence)
        self.reserved_slots -= self.lengths.pop(sequence)
        self.pages -= 1


class _Paged:
    def __init__(self, slots: int, page_size: int) -> None:
        self.allocator = PageAllocator(slots // page_size, page_size)
        self.final_pages: dict[int, int] = {}  # by sequence
        self.promised_pages = 0
        self.one_each: dict[int, int] = {}

    @property
    def pages(self) -> int:
        return self.allocator.used_pages

    @property
    def reserved_slots(self) -> int:
        return self.allocator.used_pages * self.allocator.page_size

    @property
    def free_slots(self) -> int:
        return self.allocator.free_pages * self.allocator.page_size

    @property
    def largest_grant_slots(self) -> int:
        """Any free page serves any sequence; the allocator is asked, not trusted."""
        slots = self.free_slots
        probe = self.allocator.add()
        self.allocator.reserve({probe: slots})
        self.allocator.free(probe)
        return slots

    def admit(self, prompt_tokens: int, final_tokens: int) -> int:
        needed = -(-final_tokens // self.allocator.page_size)
        if self.promised_pages + needed > self.allocator.num_pages:
            raise OutOfPages(needed, self.allocator.num_pages - self.promised_pages)
        self.promised_pages += needed
        sequence = self.allocator.add()
        self.allocator.reserve({sequence: prompt_tokens})
        self.final_pages[sequence] = needed
        self.one_each[sequence] = 1
        return sequence

    def grow(self) -> None:
        self.allocator.reserve(self.one_each)

    def leave(self, sequence: int) -> None:
        self.allocator.free(sequence)
        self.promised_pages -= self.final_pages.pop(sequence)
        del self.one_each[sequence]


def churn(
    strategy: str, *, num_requests: int = 2000, slots: int = 32768, page_size: int = 16, seed: int = 0
) -> Fragmentation:
    """Fragmentation of "contiguous" or "paged" allocation under `num_requests` requests. Same seed, same
    result.

    slots: token slots of the pool, of which both strategies use a whole number of pages.
    Lengths are `PROMPT_TOKENS` and `OUTPUT_TOKENS`; what could never fit is cut to the whole pool.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    page_size = whole_number("page_size", page_size, 1)
    slots = whole_number("slots", slots, page_size) // page_size * page_size
    trace = synthesize(num_requests, 1.0, PROMPT_TOKENS, OUTPUT_TOKENS, seed)
    prompts = trace.prompt_tokens.clip(max=slots)
    finals = (prompts + trace.output_tokens - 1).clip(max=slots)
    # A request of f slots that stays for n steps takes f * n of the pool's slots * steps.
    steps_per_request = float((finals * (finals - prompts + 1)).mean()) / slots / LOAD
    columns = (trace.arrival_s * steps_per_request, prompts, finals)
    requests = deque(zip(*(column.tolist() for column in columns), strict=True))
    pool: _Strategy = _Contiguous(slots) if strategy == "contiguous" else _Paged(slots, page_size)
    return _churn(strategy, pool, requests)


def _churn(strategy: str, pool: _Strategy, queue: deque[tuple[float, int, int]]) -> Fragmentation:
    """Run the queue of (arrival in steps, prompt tokens, final tokens) dry."""
    running: list[tuple[int, int, int]] = []  # a heap of (step of departure, sequence, tokens)
    step = stored_tokens = stored_sum = reserved_sum = peak_slots = peak_pages = 0
    external: list[float] = []  # one value for each event

    def observe() -> None:
        free_slots = pool.free_slots
        external.append(1 - pool.largest_grant_slots / free_slots if free_slots else 0.0)

    while queue or running:
        while running and running[0][0] == step:
            _, sequence, tokens = heapq.heappop(running)
            pool.leave(sequence)
            stored_tokens -= tokens
            observe()
        pool.grow()
        stored_tokens += len(running)
        while queue and queue[0][0] <= step:
            _, prompt_tokens, final_tokens = queue[0]
            try:
                sequence = pool.admit(prompt_tokens, final_tokens)
            except OutOfPages:
                break
            queue.popleft()
            heapq.heappush(running, (step + final_tokens - prompt_tokens + 1, sequence, final_tokens))
            stored_tokens += prompt_tokens
            observe()
        stored_sum += stored_tokens
        reserved_sum += pool.reserved_slots
        peak_slots = max(peak_slots, pool.reserved_slots)
        peak_pages = max(peak_pages, pool.pages)
        step += 1
        if queue and not running:
            step = max(step, math.ceil(queue[0][0]))
    return Fragmentation(
        strategy=strategy,
        internal_fragmentation=1 - stored_sum / reserved_sum,
        external_fragmentation=sum(external) / len(external),
        peak_slots=peak_slots,
        peak_pages=peak_pages,
    )

"""Who owns which page: a free list, reference counts, copy-on-write; plain ints, no memory.

The cache and the simulator use this same allocator. A sequence of n tokens owns ceil(n / page_size) pages.
Forked sequences share pages; the first write into a shared, partly filled page copies it.

Work per step is kept to C-level passes over the batch (map, zip, update), because a decode step of 64
sequences must not cost the host more than a few microseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from operator import add, gt

from kvcupy.errors import IntegrityError, OutOfPages, StaleStep
from kvcupy.spec import whole_number


class Reservation:
    """Room for new tokens, granted to a batch of sequences at once.

    counts: new tokens of each sequence, in batch order.
    starts: tokens each sequence had before, in the same order.
    copies: (source, destination) pages that must be copied before anything is written.
    grown: sequences whose list of pages changed.
    alive: False once one of its sequences was reserved again, forked, truncated, freed or cancelled.
    """

    __slots__ = ("alive", "copies", "counts", "epoch", "grown", "starts")

    def __init__(self, counts: Mapping[int, int], starts: list[int]) -> None:
        self.counts = counts
        self.starts = starts
        self.copies: list[tuple[int, int]] = []
        self.grown: list[int] = []
        self.alive = True
        self.epoch = 0


class PageAllocator:
    """Hands out num_pages pages of page_size token slots to sequences.

    Every method either does all it says or raises and changes nothing.

    >>> allocator = PageAllocator(num_pages=4, page_size=16)
    >>> a = allocator.add()
    >>> _ = allocator.reserve({a: 17})
    >>> allocator.pages(a), allocator.free_pages
    ([0, 1], 2)
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = whole_number("num_pages", num_pages, 0)
        self.page_size = whole_number("page_size", page_size, 1)
        self._free = list(range(self.num_pages - 1, -1, -1))  # a stack: the page freed last is warm
        self._pages: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._capacity: dict[int, int] = {}  # tokens that the pages owned now can hold
        self._shared: dict[int, int] = {}  # page -> owners beyond the first; exclusive pages are absent
        self._reservations: dict[int, Reservation | None] = {}
        self._next_id = 0
        self._epoch = 0

    # Looking

    @property
    def free_pages(self) -> int:
        """Pages that no sequence owns."""
        return len(self._free)

    @property
    def used_pages(self) -> int:
        """Pages that at least one sequence owns."""
        return self.num_pages - len(self._free)

    @property
    def sequences(self) -> list[int]:
        """Ids of the live sequences, oldest first."""
        return list(self._lengths)

    @property
    def shared_pages(self) -> int:
        """Pages owned by more than one sequence."""
        return len(self._shared)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        self._require(sequence)
        return self._lengths[sequence]

    def pages(self, sequence: int) -> list[int]:
        """Ids of a sequence's pages, in token order."""
        self._require(sequence)
        return self._pages[sequence].copy()

    # Changing

    def add(self) -> int:
        """A new, empty sequence. Ids are never given twice."""
        sequence = self._next_id
        self._next_id += 1
        self._pages[sequence] = []
        self._lengths[sequence] = self._capacity[sequence] = 0
        self._reservations[sequence] = None
        return sequence

    def reserve(self, counts: Mapping[int, int]) -> Reservation:
        """Make room for counts[sequence] more tokens in each sequence, for all of them or for none.

        Advances the lengths. Raises OutOfPages when the pages do not suffice, ValueError or TypeError for
        unknown sequences and for counts that are negative or not whole.
        """
        counts = dict(counts)
        try:
            starts = list(map(self._lengths.__getitem__, counts))
        except KeyError as unknown:
            raise ValueError(f"unknown sequence {unknown.args[0]!r}") from None
        if set(map(type, counts.values())) - {int} or min(counts.values(), default=0) < 0:
            counts = {s: whole_number(f"counts[{s}]", n, 0) for s, n in counts.items()}
        ends = list(map(add, starts, counts.values()))
        reservation = Reservation(counts, starts)
        if self._shared or any(map(gt, ends, map(self._capacity.__getitem__, counts))):
            self._grow(reservation, ends)
        for old in set(map(self._reservations.__getitem__, counts)):
            if old is not None:
                old.alive = False
        self._reservations.update(dict.fromkeys(counts, reservation))
        self._lengths.update(zip(counts, ends, strict=True))
        self._epoch += 1
        reservation.epoch = self._epoch
        return reservation

    def cancel(self, reservation: Reservation) -> None:
        """Take a reservation back: lengths and pages are as before it.

        A page that the reservation copied on write is shared again, unless other sequences have changed
        meanwhile: then the sequence keeps its copy, which holds the same tokens.
        Raises StaleStep for a reservation that is no longer alive.
        """
        if not reservation.alive:
            raise StaleStep("this step's sequences have changed since it was reserved: nothing to cancel")
        undisturbed = reservation.epoch == self._epoch
        copies = {copy: source for source, copy in reservation.copies} if undisturbed else {}
        for sequence, start in zip(reservation.counts, reservation.starts, strict=True):
            self._cut(sequence, start)
            pages = self._pages[sequence]
            if copies and pages and pages[-1] in copies:
                source = copies[pages[-1]]
                self._free.append(pages[-1])
                pages[-1] = source
                self._shared[source] = self._shared.get(source, 0) + 1
            self._reservations[sequence] = None
        reservation.alive = False
        self._epoch += 1

    def fork(self, sequence: int) -> int:
        """A new sequence that shares every page of this one. No page is copied until one of them writes."""
        self._require(sequence)
        self._retire(sequence)
        child = self.add()
        pages = self._pages[sequence]
        for page in pages:
            self._shared[page] = self._shared.get(page, 0) + 1
        self._pages[child] = pages.copy()
        self._lengths[child] = self._lengths[sequence]
        self._capacity[child] = self._capacity[sequence]
        return child

    def truncate(self, sequence: int, tokens: int) -> None:
        """Keep the first `tokens` tokens and give back the pages behind them. More than there are is a ValueError."""
        self._require(sequence)
        tokens = whole_number("tokens", tokens, 0, self._lengths[sequence])
        self._retire(sequence)
        self._cut(sequence, tokens)

    def free(self, sequence: int) -> None:
        """Forget a sequence; its pages are free once no fork shares them. A second time is a ValueError."""
        self._require(sequence)
        self._retire(sequence)
        self._release(self._pages.pop(sequence))
        del self._lengths[sequence], self._capacity[sequence], self._reservations[sequence]

    def check_integrity(self) -> None:
        """Prove that every page is free or owned, once, and that counts agree. Raises IntegrityError."""
        owners = Counter(page for pages in self._pages.values() for page in pages)
        problems = []
        if len(set(self._free)) != len(self._free):
            problems.append("a page is free twice")
        if not owners.keys().isdisjoint(self._free):
            problems.append("an owned page is free")
        if sorted([*owners, *self._free]) != list(range(self.num_pages)):
            problems.append("free and used pages do not make up the pool")
        if {page: count - 1 for page, count in owners.items() if count > 1} != self._shared:
            problems.append("reference counts differ from owners")
        for sequence, pages in self._pages.items():
            if len(set(pages)) != len(pages):
                problems.append(f"sequence {sequence} owns a page twice")
            if len(pages) != -(-self._lengths[sequence] // self.page_size):
                problems.append(f"sequence {sequence} has {len(pages)} pages for {self._lengths[sequence]} tokens")
            if self._capacity[sequence] != len(pages) * self.page_size:
                problems.append(f"sequence {sequence} has a wrong capacity")
        if problems:
            raise IntegrityError("; ".join(problems))

    # Inside

    def _require(self, sequence: int) -> None:
        if sequence not in self._lengths:
            raise ValueError(f"unknown sequence {sequence!r}")

    def _retire(self, sequence: int) -> None:
        """The sequence is about to change in a way that its last reservation does not describe."""
        self._epoch += 1
        reservation = self._reservations[sequence]
        if reservation is not None:
            reservation.alive = False
            self._reservations[sequence] = None

    def _grow(self, reservation: Reservation, ends: list[int]) -> None:
        """Find the pages for a reservation, copies on write included; commit only if there are enough."""
        page_size, shared = self.page_size, self._shared
        leaving: Counter[int] = Counter()  # owners that this very reservation moves off a shared page
        wanted: list[tuple[int, int, bool]] = []
        for sequence, start, end in zip(reservation.counts, reservation.starts, ends, strict=True):
            pages = self._pages[sequence]
            new = -(-end // page_size) - len(pages)
            copy = bool(shared) and end > start and start % page_size > 0
            if copy:
                tail = pages[-1]
                copy = shared.get(tail, 0) > leaving[tail]
                leaving[tail] += copy
            if new or copy:
                wanted.append((sequence, new, copy))
        needed = sum(new + copy for _, new, copy in wanted)
        if needed > len(self._free):
            raise OutOfPages(needed, len(self._free))
        for sequence, new, copy in wanted:
            pages = self._pages[sequence]
            if copy:
                source = pages.pop()
                pages.append(self._free.pop())
                self._unshare(source)
                reservation.copies.append((source, pages[-1]))
            if new:
                taken = self._free[-new:]
                del self._free[-new:]
                taken.reverse()
                pages += taken
                self._capacity[sequence] = len(pages) * page_size
            reservation.grown.append(sequence)

    def _cut(self, sequence: int, tokens: int) -> None:
        pages = self._pages[sequence]
        keep = -(-tokens // self.page_size)
        self._release(pages[keep:])
        del pages[keep:]
        self._lengths[sequence] = tokens
        self._capacity[sequence] = keep * self.page_size

    def _release(self, pages: list[int]) -> None:
        """Drop one owner of each page; last pages first, so that they are handed out again in order."""
        if not self._shared or self._shared.keys().isdisjoint(pages):
            self._free += pages[::-1]
            return
        for page in reversed(pages):
            if page in self._shared:
                self._unshare(page)
            else:
                self._free.append(page)

    def _unshare(self, page: int) -> None:
        if self._shared[page] == 1:
            del self._shared[page]
        else:
            self._shared[page] -= 1

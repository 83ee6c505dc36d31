"""Who owns which page: a free list, reference counts, copy-on-write; plain ints, no memory.

The cache and the simulator use this same allocator. A sequence of n tokens owns ceil(n / page_size) pages.
Forked sequences share pages; the first write into a shared, partly filled page copies it.

Work per step is kept to C-level passes over the batch (map, zip, update), because a decode step of 64
sequences must not cost the host more than a few microseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvcupy.errors import IntegrityError, OutOfPages, StaleStep
from kvcupy.spec import whole_number


class _Batch:
    """The sequences of one reservation. `latest` is their newest reservation, None once one of them changed.

    Sequences decoded together step after step share one _Batch, so that a step need not touch each of them.
    """

    __slots__ = ("latest",)

    def __init__(self) -> None:
        self.latest: Reservation | None = None


class Reservation:
    """Room for new tokens, granted to a batch of sequences at once.

    counts: new tokens of each sequence, in batch order.
    allocator: whose pages they are.
    copies: (source, destination) pages that must be copied before anything is written.
    grown: sequences whose list of pages changed.
    """

    __slots__ = ("_batch", "_epoch", "allocator", "copies", "counts", "grown")

    def __init__(self, allocator: PageAllocator, counts: Mapping[int, int], batch: _Batch, epoch: int) -> None:
        self.allocator = allocator
        self.counts = counts
        self.copies: list[tuple[int, int]] = []
        self.grown: list[int] = []
        self._batch = batch
        self._epoch = epoch
        batch.latest = self

    @property
    def alive(self) -> bool:
        """False once one of its sequences was reserved again, forked, truncated, freed or cancelled."""
        return self._batch.latest is self


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
        self._room: dict[int, int] = {}  # slots still empty in the last page: 0 to page_size - 1
        self._shared: dict[int, int] = {}  # page -> owners beyond the first; exclusive pages are absent
        self._batches: dict[int, _Batch] = {}
        self._last = Reservation(self, {}, _Batch(), 0)
        self._next_id = 0
        self._epoch = 0  # counts changes

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
        return list(self._pages)

    @property
    def shared_pages(self) -> int:
        """Pages owned by more than one sequence."""
        return len(self._shared)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        self._require(sequence)
        return len(self._pages[sequence]) * self.page_size - self._room[sequence]

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
        self._room[sequence] = 0
        self._batches[sequence] = _Batch()
        return sequence

    def reserve(self, counts: Mapping[int, int]) -> Reservation:
        """Make room for counts[sequence] more tokens in each sequence, for all of them or for none.

        Advances the lengths. Raises OutOfPages when the pages do not suffice, ValueError or TypeError for
        unknown sequences and for counts that are negative or not whole.
        """
        if not isinstance(counts, Mapping):
            raise TypeError(f"counts must map sequences to whole numbers, got {counts!r}")
        last = self._last
        # The usual step asks for what the last one asked for. (1.0 equals 1, but makes the sum a float.)
        repeated = (
            counts == last.counts
            and last.alive
            and list(counts) == list(last.counts)
            and type(sum(counts.values())) is int
        )
        counts = last.counts if repeated else self._valid_counts(counts)
        room = self._room
        short = []
        for sequence, count in counts.items():
            room[sequence] = left = room[sequence] - count
            if left < 0:
                short.append(sequence)
        growth = self._plan_growth(counts, short) if short or self._shared else []
        # Nothing fails from here on.
        self._epoch += 1
        batch = last._batch
        if not repeated:
            batch = _Batch()
            for old in set(map(self._batches.__getitem__, counts)):
                old.latest = None
            self._batches.update(dict.fromkeys(counts, batch))
        self._last = reservation = Reservation(self, counts, batch, self._epoch)
        if growth:
            self._grow(reservation, growth)
        return reservation

    def cancel(self, reservation: Reservation) -> None:
        """Take a reservation back: lengths and pages are as before it.

        A page that the reservation copied on write is shared again, unless other sequences have changed
        meanwhile: then the sequence keeps its copy, which holds the same tokens.
        Raises StaleStep for a reservation that is no longer alive.
        """
        if reservation.allocator is not self:
            raise ValueError("the step must come from this cache, got one of another")
        if not reservation.alive:
            raise StaleStep("this step's sequences have changed since it was reserved: nothing to cancel")
        undisturbed = reservation._epoch == self._epoch
        sources = {copy: source for source, copy in reservation.copies} if undisturbed else {}
        for sequence, count in reservation.counts.items():
            self._cut(sequence, self.length(sequence) - count)
            pages = self._pages[sequence]
            if pages and pages[-1] in sources:
                source = sources[pages[-1]]
                self._free.append(pages[-1])
                pages[-1] = source
                self._shared[source] = self._shared.get(source, 0) + 1
        reservation._batch.latest = None
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
        self._room[child] = self._room[sequence]
        return child

    def truncate(self, sequence: int, tokens: int) -> None:
        """Keep the first `tokens` tokens and give back the pages behind them. More than there are is a ValueError."""
        self._require(sequence)
        tokens = whole_number("tokens", tokens, 0, self.length(sequence))
        self._retire(sequence)
        self._cut(sequence, tokens)

    def free(self, sequence: int) -> None:
        """Forget a sequence; its pages are free once no fork shares them. A second time is a ValueError."""
        self._require(sequence)
        self._retire(sequence)
        self._release(self._pages.pop(sequence))
        del self._room[sequence], self._batches[sequence]

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
            if not 0 <= self._room[sequence] < self.page_size or (self._room[sequence] and not pages):
                problems.append(f"sequence {sequence} has {len(pages)} pages and room for {self._room[sequence]}")
        if problems:
            raise IntegrityError("; ".join(problems))

    # Inside

    def _require(self, sequence: int) -> None:
        if isinstance(sequence, bool | float) or sequence not in self._pages:
            raise ValueError(f"unknown sequence {sequence!r}")

    def _valid_counts(self, counts: Mapping[int, int]) -> dict[int, int]:
        if set(map(type, counts)) - {int} or not counts.keys() <= self._pages.keys():
            for sequence in counts:
                self._require(sequence)
            counts = {int(sequence): count for sequence, count in counts.items()}
        if set(map(type, counts.values())) - {int} or min(counts.values(), default=0) < 0:
            return {s: whole_number(f"counts[{s}]", n, 0) for s, n in counts.items()}
        return dict(counts)

    def _retire(self, sequence: int) -> None:
        """The sequence is about to change in a way that its last reservation does not describe."""
        self._epoch += 1
        self._batches[sequence].latest = None

    def _plan_growth(self, counts: Mapping[int, int], short: list[int]) -> list[tuple[int, int, bool]]:
        """(sequence, new pages, copy on write?) for all that need any, `_room` having been lowered by `counts`.

        Raises OutOfPages, with `_room` as it was, before anything is taken.
        """
        room, page_size, shared = self._room, self.page_size, self._shared
        growth = []
        needed = 0
        leaving: Counter[int] = Counter()  # owners that this very reservation moves off a shared page
        for sequence in counts if shared else short:
            left, copy = room[sequence], False
            new = -(left // page_size) if left < 0 else 0
            if shared and counts[sequence] and left + counts[sequence]:
                tail = self._pages[sequence][-1]
                copy = shared.get(tail, 0) > leaving[tail]
                leaving[tail] += copy
            if new or copy:
                growth.append((sequence, new, copy))
                needed += new + copy
        if needed > len(self._free):
            for sequence, count in counts.items():
                room[sequence] += count
            raise OutOfPages(needed, len(self._free))
        return growth

    def _grow(self, reservation: Reservation, growth: list[tuple[int, int, bool]]) -> None:
        free = self._free
        for sequence, new, copy in growth:
            pages = self._pages[sequence]
            reservation.grown.append(sequence)
            if copy:
                source = pages.pop()
                pages.append(free.pop())
                self._unshare(source)
                reservation.copies.append((source, pages[-1]))
            if new == 1:  # a decode step's case, worth its branch
                pages.append(free.pop())
            elif new:
                pages += free[: -new - 1 : -1]
                del free[-new:]
            self._room[sequence] += new * self.page_size

    def _cut(self, sequence: int, tokens: int) -> None:
        pages = self._pages[sequence]
        keep = -(-tokens // self.page_size)
        self._release(pages[keep:])
        del pages[keep:]
        self._room[sequence] = keep * self.page_size - tokens

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

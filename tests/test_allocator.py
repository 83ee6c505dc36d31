"""PageAllocator: books that always balance, and operations that do all or nothing."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvcupy import OutOfPages, PageAllocator, StaleStep


def snapshot(allocator: PageAllocator) -> Any:
    """Everything that can be seen of an allocator, the order of its free list included."""
    sequences = {s: (allocator.length(s), allocator.pages(s)) for s in allocator.sequences}
    return sequences, list(allocator._free), dict(allocator._shared), dict(allocator._room)


def test_pages_come_in_order_and_go_back() -> None:
    allocator = PageAllocator(num_pages=8, page_size=4)
    a, b = allocator.add(), allocator.add()
    allocator.reserve({a: 5, b: 4})
    assert (allocator.pages(a), allocator.pages(b), allocator.free_pages) == ([0, 1], [2], 5)
    allocator.reserve({a: 3, b: 1})
    assert (allocator.pages(a), allocator.pages(b)) == ([0, 1], [2, 3])
    allocator.free(a)
    assert allocator.free_pages == 6
    allocator.check_integrity()
    assert allocator.add() not in (a, b)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_bug_B14_room_at_the_page_boundary(page_size: int) -> None:
    allocator = PageAllocator(num_pages=1, page_size=page_size)
    a = allocator.add()
    allocator.reserve({a: page_size - 1})
    allocator.reserve({a: 1})
    assert (allocator.length(a), allocator.free_pages) == (page_size, 0)
    before = snapshot(allocator)
    with pytest.raises(OutOfPages, match="out of pages: 1 needed, 0 free"):
        allocator.reserve({a: 1})
    assert snapshot(allocator) == before
    allocator.check_integrity()


def test_bug_B16_double_free() -> None:
    allocator = PageAllocator(num_pages=4, page_size=2)
    a = allocator.add()
    allocator.reserve({a: 2})
    allocator.free(a)
    before = snapshot(allocator)
    with pytest.raises(ValueError, match="unknown sequence 0"):
        allocator.free(a)
    assert snapshot(allocator) == before
    pages = []
    for _ in range(4):
        sequence = allocator.add()
        allocator.reserve({sequence: 1})
        pages += allocator.pages(sequence)
    assert sorted(pages) == [0, 1, 2, 3]
    with pytest.raises(OutOfPages):
        allocator.reserve({allocator.add(): 1})


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_bug_B17_forks_copy_once_per_writer_and_free_in_any_order(order: tuple[int, ...]) -> None:
    allocator = PageAllocator(num_pages=20, page_size=4)
    parent = allocator.add()
    allocator.reserve({parent: 10})
    family = [parent, allocator.fork(parent), allocator.fork(parent)]
    family.append(allocator.fork(family[1]))
    full, partial = allocator.pages(parent)[:2], allocator.pages(parent)[2]
    copies = []
    for sequence in family:
        copies += allocator.reserve({sequence: 1}).copies
        allocator.check_integrity()
    assert [source for source, _ in copies] == [partial] * 3
    assert all(allocator.pages(sequence)[:2] == full for sequence in family)
    assert len({allocator.pages(sequence)[2] for sequence in family}) == 4
    for index in order:
        allocator.free(family[index])
        allocator.check_integrity()
    assert allocator.free_pages == 20


def test_one_reservation_for_all_owners_of_a_shared_page() -> None:
    allocator = PageAllocator(num_pages=8, page_size=4)
    parent = allocator.add()
    allocator.reserve({parent: 6})
    children = [allocator.fork(parent), allocator.fork(parent)]
    reservation = allocator.reserve({parent: 1, children[0]: 1, children[1]: 1})
    assert len(reservation.copies) == 2, "the last owner writes in place"
    assert len({allocator.pages(s)[1] for s in (parent, *children)}) == 3
    allocator.check_integrity()


def test_a_fork_at_a_page_boundary_copies_nothing() -> None:
    allocator = PageAllocator(num_pages=8, page_size=4)
    parent = allocator.add()
    allocator.reserve({parent: 8})
    child = allocator.fork(parent)
    assert allocator.reserve({child: 1, parent: 1}).copies == []
    assert allocator.pages(child)[:2] == allocator.pages(parent)[:2]
    assert allocator.pages(child)[2] != allocator.pages(parent)[2]


def test_bug_B19_failed_reservation_keeps_nothing() -> None:
    allocator = PageAllocator(num_pages=3, page_size=1)
    a = allocator.add()
    with pytest.raises(OutOfPages, match="5 needed, 3 free") as caught:
        allocator.reserve({a: 5})
    assert (caught.value.needed, caught.value.free) == (5, 3)
    assert allocator.free_pages == 3
    allocator.reserve({a: 3})
    assert sorted(allocator.pages(a)) == [0, 1, 2]


@pytest.mark.parametrize("free", range(14))
def test_reservations_that_fail_at_the_nth_page_change_nothing(free: int) -> None:
    """A batch with growth and a copy on write needs 13 pages: with fewer it must leave no trace."""
    allocator = PageAllocator(num_pages=4 + free, page_size=4)
    parent = allocator.add()
    allocator.reserve({parent: 6})
    child = allocator.fork(parent)
    other = allocator.add()
    allocator.reserve({other: 8})
    step = allocator.reserve({other: 0})
    before = snapshot(allocator)
    wanted = {parent: 3, child: 13, other: 29}
    if free < 13:
        for _ in range(2):
            with pytest.raises(OutOfPages, match=f"13 needed, {free} free"):
                allocator.reserve(wanted)
            assert snapshot(allocator) == before
            assert step.alive
    else:
        assert len(allocator.reserve(wanted).copies) == 1
        assert allocator.free_pages == 0
    allocator.check_integrity()


@pytest.mark.parametrize(("tokens", "length", "free"), [(0, 0, 4), (2, 2, 3), (3, 3, 2)])
def test_bug_B21_truncate(tokens: int, length: int, free: int) -> None:
    allocator = PageAllocator(num_pages=4, page_size=2)
    a = allocator.add()
    allocator.reserve({a: 3})
    allocator.truncate(a, tokens)
    assert (allocator.length(a), allocator.free_pages) == (length, free)
    allocator.check_integrity()


@pytest.mark.parametrize("tokens", [5, -5, 4])
def test_bug_B21_truncate_refuses(tokens: int) -> None:
    allocator = PageAllocator(num_pages=4, page_size=2)
    a = allocator.add()
    allocator.reserve({a: 3})
    with pytest.raises(ValueError, match=f"tokens must be from 0 to 3, got {tokens}"):
        allocator.truncate(a, tokens)
    assert allocator.length(a) == 3


@pytest.mark.parametrize(
    ("count", "error"), [(-1, ValueError), (1.5, TypeError), (1.0, TypeError), ("1", TypeError), (None, TypeError)]
)
def test_bad_counts_change_nothing(count: Any, error: type[Exception]) -> None:
    allocator = PageAllocator(num_pages=4, page_size=2)
    a, b = allocator.add(), allocator.add()
    step = allocator.reserve({a: 1, b: 1})
    before = snapshot(allocator)
    with pytest.raises(error, match=r"counts\[1\] must be"):
        allocator.reserve({a: 1, b: count})
    with pytest.raises(ValueError, match="unknown sequence 7"):
        allocator.reserve({a: 1, 7: 1})
    assert snapshot(allocator) == before
    assert step.alive


@pytest.mark.parametrize("sequence", [0.0, False, "0", None, -1, 1])
def test_unknown_ids_change_nothing(sequence: Any) -> None:
    allocator = PageAllocator(num_pages=4, page_size=2)
    allocator.reserve({allocator.add(): 3})
    before = snapshot(allocator)
    calls: list[Any] = [
        lambda: allocator.reserve({sequence: 1}),
        lambda: allocator.free(sequence),
        lambda: allocator.fork(sequence),
        lambda: allocator.truncate(sequence, 0),
        lambda: allocator.pages(sequence),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="unknown sequence"):
            call()
    assert snapshot(allocator) == before
    with pytest.raises(TypeError, match="counts must map sequences to whole numbers"):
        allocator.reserve([0])  # type: ignore[arg-type]


def test_numpy_counts_are_whole_numbers() -> None:
    allocator = PageAllocator(num_pages=4, page_size=2)
    a = allocator.add()
    allocator.reserve({a: np.int64(3)})  # type: ignore[dict-item]
    assert (allocator.length(a), type(allocator.length(a))) == (3, int)


def test_cancel_restores_everything() -> None:
    allocator = PageAllocator(num_pages=10, page_size=4)
    parent = allocator.add()
    allocator.reserve({parent: 6})
    child, other = allocator.fork(parent), allocator.add()
    before = snapshot(allocator)
    step = allocator.reserve({child: 5, other: 9, parent: 0})
    assert len(step.copies) == 1
    allocator.cancel(step)
    sequences, free, shared, room = snapshot(allocator)
    assert (sequences, sorted(free), shared, room) == (before[0], sorted(before[1]), before[2], before[3])
    with pytest.raises(StaleStep):
        allocator.cancel(step)
    allocator.check_integrity()


def test_cancel_after_the_source_of_a_copy_is_gone() -> None:
    allocator = PageAllocator(num_pages=4, page_size=4)
    parent = allocator.add()
    allocator.reserve({parent: 2})
    child = allocator.fork(parent)
    step = allocator.reserve({child: 1})
    source, copy = step.copies[0]
    allocator.free(parent)
    thief = allocator.add()
    allocator.reserve({thief: 1})
    assert allocator.pages(thief) == [source]
    allocator.cancel(step)
    assert (allocator.length(child), allocator.pages(child)) == (2, [copy])
    allocator.check_integrity()


@pytest.mark.parametrize("change", ["reserve", "fork", "truncate", "free", "cancel"])
def test_a_reservation_dies_with_the_next_change(change: str) -> None:
    allocator = PageAllocator(num_pages=8, page_size=4)
    a, b, c = allocator.add(), allocator.add(), allocator.add()
    bystander = allocator.reserve({c: 1})
    step = allocator.reserve({a: 1, b: 1})
    {
        "reserve": lambda: allocator.reserve({b: 1}),
        "fork": lambda: allocator.fork(a),
        "truncate": lambda: allocator.truncate(a, 0),
        "free": lambda: allocator.free(b),
        "cancel": lambda: allocator.cancel(step),
    }[change]()
    assert not step.alive
    assert bystander.alive
    with pytest.raises(StaleStep):
        allocator.cancel(step)


def test_repeated_batches_keep_only_the_newest_alive() -> None:
    allocator = PageAllocator(num_pages=8, page_size=4)
    a, b = allocator.add(), allocator.add()
    steps = [allocator.reserve({a: 1, b: 1}) for _ in range(3)]
    steps.append(allocator.reserve({b: 1, a: 1}))
    steps.append(allocator.reserve({b: 2, a: 1}))
    assert [step.alive for step in steps] == [False] * 4 + [True]
    allocator.cancel(steps[-1])
    assert (allocator.length(a), allocator.length(b)) == (4, 4)


class Books(RuleBasedStateMachine):
    """Any sequence of calls: the allocator agrees with plain lengths and balances after each."""

    sequences: Bundle[int] = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(num_pages=12, page_size=3)
        self.lengths: dict[int, int] = {}
        self.step: tuple[Any, dict[int, int]] | None = None

    @rule(target=sequences)
    def add(self) -> int:
        sequence = self.allocator.add()
        self.lengths[sequence] = 0
        return sequence

    @rule(batch=st.lists(st.tuples(sequences, st.integers(0, 8)), max_size=4))
    def reserve(self, batch: list[tuple[int, int]]) -> None:
        counts = dict(batch)
        before = snapshot(self.allocator)
        if not counts.keys() <= self.lengths.keys():
            with pytest.raises(ValueError, match="unknown sequence"):
                self.allocator.reserve(counts)
            assert snapshot(self.allocator) == before
            return
        try:
            self.step = self.allocator.reserve(counts), counts
        except OutOfPages:
            assert snapshot(self.allocator) == before
            return
        for sequence, count in counts.items():
            self.lengths[sequence] += count

    @rule(target=sequences, parent=sequences)
    def fork(self, parent: int) -> int:
        if parent not in self.lengths:
            return parent
        child = self.allocator.fork(parent)
        self.lengths[child] = self.lengths[parent]
        return child

    @rule(sequence=sequences, share=st.floats(0, 1))
    def truncate(self, sequence: int, share: float) -> None:
        if sequence in self.lengths:
            self.lengths[sequence] = int(self.lengths[sequence] * share)
            self.allocator.truncate(sequence, self.lengths[sequence])

    @rule(sequence=consumes(sequences))
    def free(self, sequence: int) -> None:
        if self.lengths.pop(sequence, None) is not None:
            self.allocator.free(sequence)

    @rule()
    def cancel(self) -> None:
        if self.step is None:
            return
        step, counts = self.step
        if step.alive:
            self.allocator.cancel(step)
            for sequence, count in counts.items():
                self.lengths[sequence] -= count
        else:
            with pytest.raises(StaleStep):
                self.allocator.cancel(step)

    @invariant()
    def books_balance(self) -> None:
        self.allocator.check_integrity()
        assert {s: self.allocator.length(s) for s in self.allocator.sequences} == self.lengths


Books.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBooks = Books.TestCase

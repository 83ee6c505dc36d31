"""First fit, and the churn that shows what it costs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcupy.errors import IntegrityError, OutOfPages
from kvcupy.simulate.fragmentation import FirstFitArena, churn


def test_lowest_address_where_it_fits():
    arena = FirstFitArena(20)
    assert [arena.allocate(slots) for slots in (5, 3, 5, 3)] == [0, 5, 8, 13]
    arena.free(0)
    arena.free(8)
    assert (arena.free_slots, arena.largest_run) == (14, 5)
    assert arena.allocate(4) == 0
    assert arena.allocate(5) == 8
    assert arena.allocate(1) == 4
    arena.check_integrity()


def test_neighbours_coalesce_on_both_sides():
    arena = FirstFitArena(12)
    for slots in (4, 4, 4):
        arena.allocate(slots)
    arena.free(0)
    arena.free(8)
    assert arena.largest_run == 4
    arena.free(4)
    assert arena.largest_run == arena.free_slots == 12
    arena.check_integrity()


def test_refusals_change_nothing():
    arena = FirstFitArena(10)
    arena.allocate(4)
    with pytest.raises(OutOfPages, match="7 needed, 6 free"):
        arena.allocate(7)
    for start in (1, 4, -1):
        with pytest.raises(ValueError, match=f"no run starts at slot {start}"):
            arena.free(start)
    with pytest.raises(ValueError, match="slots must be at least 1, got 0"):
        arena.allocate(0)
    assert arena.free_slots == 6
    arena.check_integrity()
    assert (FirstFitArena(0).free_slots, FirstFitArena(0).largest_run) == (0, 0)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_arena_agrees_with_a_row_of_flags(operations):
    arena, flags, runs = FirstFitArena(40), [False] * 40, []
    for allocate, number in operations:
        if allocate:
            fits = [at for at in range(41 - number) if not any(flags[at : at + number])]
            if fits:
                assert arena.allocate(number) == fits[0]
                runs.append((fits[0], number))
                flags[fits[0] : fits[0] + number] = [True] * number
            else:
                with pytest.raises(OutOfPages):
                    arena.allocate(number)
        elif runs:
            start, length = runs.pop(number % len(runs))
            arena.free(start)
            flags[start : start + length] = [False] * length
        assert arena.free_slots == flags.count(False)
        longest = max(map(len, "".join("x" if flag else "." for flag in flags).split("x")))
        assert arena.largest_run == longest
        arena.check_integrity()


def test_integrity_is_not_taken_on_trust():
    arena = FirstFitArena(10)
    arena.allocate(4)
    arena._used[0] = 5
    with pytest.raises(IntegrityError, match="slot 5"):
        arena.check_integrity()


def test_contiguous_fragments_outside_and_paged_inside_a_page_only():
    contiguous = churn("contiguous", seed=0)
    paged = churn("paged", seed=0)
    assert paged.external_fragmentation == 0
    assert 0.2 < contiguous.external_fragmentation < 0.95
    # Half a page of 16 in some 550 stored tokens; contiguous holds what is still to be written.
    assert 0.005 < paged.internal_fragmentation < 0.03
    assert 0.1 < contiguous.internal_fragmentation < 0.4
    assert 0.85 * 32_768 < contiguous.peak_slots <= 32_768
    assert paged.peak_slots == paged.peak_pages * 16 <= 32_768
    assert contiguous.peak_pages < 100


def test_pages_of_one_token_waste_nothing_and_larger_pages_waste_more():
    waste = [churn("paged", page_size=size, num_requests=300).internal_fragmentation for size in (1, 16, 256)]
    assert waste[0] == 0
    assert waste[1] < waste[2] < 0.5


def test_same_seed_same_result():
    for strategy in ("contiguous", "paged"):
        results = [churn(strategy, num_requests=200, seed=seed) for seed in (1, 1, 2)]
        assert results[0] == results[1] != results[2]


def test_one_request_by_hand(monkeypatch):
    monkeypatch.setattr("kvcupy.simulate.fragmentation.PROMPT_TOKENS", "10")
    monkeypatch.setattr("kvcupy.simulate.fragmentation.OUTPUT_TOKENS", "3")
    contiguous = churn("contiguous", num_requests=1, slots=64)
    # 10, 11, 12 tokens stored in 12 reserved slots; one free run of 52, then of 64.
    assert contiguous.internal_fragmentation == 1 - 33 / 36
    assert contiguous.external_fragmentation == 0
    assert (contiguous.peak_slots, contiguous.peak_pages) == (12, 1)
    paged = churn("paged", num_requests=1, slots=64, page_size=8)
    assert paged.internal_fragmentation == 1 - 33 / 48
    assert (paged.peak_slots, paged.peak_pages) == (16, 2)
    grows = churn("paged", num_requests=1, slots=64, page_size=11)
    assert grows.internal_fragmentation == 1 - 33 / 44
    assert grows.peak_pages == 2


def test_requests_longer_than_the_pool_are_cut_and_the_churn_ends():
    for strategy in ("contiguous", "paged"):
        result = churn(strategy, num_requests=50, slots=100, page_size=16)
        assert 80 < result.peak_slots <= 96


def test_bad_arguments():
    with pytest.raises(ValueError, match="strategy must be one of contiguous, paged, got 'buddy'"):
        churn("buddy")
    with pytest.raises(ValueError, match="page_size must be at least 1, got 0"):
        churn("paged", page_size=0)
    with pytest.raises(ValueError, match="slots must be at least 16, got 8"):
        churn("paged", slots=8)
    with pytest.raises(ValueError, match="num_requests must be at least 1, got 0"):
        churn("paged", num_requests=0)

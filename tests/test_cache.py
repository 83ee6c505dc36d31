"""KVCache: the façade holds the right tokens through every mixture of calls."""

from __future__ import annotations

import copy
import pickle
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from problems import Array, assert_close, assert_same, host
from reference import attention

from kvcupy import KVCache, KVPool, KVSpec, OutOfPages, StaleStep
from kvcupy.backends.base import STORAGE_DTYPES

SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=8, page_size=4, dtype="float32")


class Mirror:
    """A cache beside plain arrays of what each sequence should hold: [tokens, layers, K|V, heads, head_dim]."""

    def __init__(self, num_pages: int, device: str, spec: KVSpec = SPEC) -> None:
        self.cache = KVCache(spec, num_pages=num_pages, device=device)
        self.cache.pool.data[...] = 0xFF
        self.rng = np.random.default_rng(7)
        self.tokens: dict[int, Array] = {}

    @property
    def spec(self) -> KVSpec:
        return self.cache.spec

    def add(self) -> int:
        sequence = self.cache.add()
        self.tokens[sequence] = np.zeros((0, self.spec.num_layers, 2, self.spec.num_kv_heads, self.spec.head_dim))
        return sequence

    def fork(self, parent: int) -> int:
        child = self.cache.fork(parent)
        self.tokens[child] = self.tokens[parent]
        return child

    def extend(self, counts: dict[int, int]) -> Any:
        """Reserve, append and decode in every layer; compare each layer's output with float64."""
        step = self.cache.reserve(counts)
        total = sum(counts.values())
        shape = (total, self.spec.num_layers, 2, self.spec.num_kv_heads, self.spec.head_dim)
        new = self.rng.standard_normal(shape).astype(STORAGE_DTYPES[self.spec.dtype])
        start = 0
        for sequence, count in counts.items():
            self.tokens[sequence] = np.concatenate([self.tokens[sequence], new[start : start + count]])
            start += count
        for layer in range(self.spec.num_layers):
            self.cache.append(step, layer, new[:, layer, 0], new[:, layer, 1])
            self.check_decode(step, layer)
        return step

    def check_decode(self, step: Any, layer: int) -> None:
        shape = (len(step.sequences), 2 * self.spec.num_kv_heads, self.spec.head_dim)
        q = self.rng.standard_normal(shape).astype(np.float32)
        out, lse = self.cache.decode(step, layer, q, return_lse=True)
        for row, sequence in enumerate(step.sequences):
            k, v = self.tokens[sequence][:, layer, 0], self.tokens[sequence][:, layer, 1]
            expected_out, expected_lse = attention(q[row], k, v, self.spec.head_dim**-0.5)
            assert_close(out[row], expected_out, "float32")
            assert_close(lse[row], expected_lse, "float32")

    def check(self) -> None:
        self.cache.check_integrity()
        assert self.cache.sequences == sorted(self.tokens)
        for sequence, tokens in self.tokens.items():
            assert self.cache.length(sequence) == len(tokens)
            for layer in range(self.spec.num_layers):
                k, v = self.cache.read(sequence, layer)
                assert_same(k, tokens[:, layer, 0])
                assert_same(v, tokens[:, layer, 1])


@pytest.mark.parametrize("dtype", list(STORAGE_DTYPES))
@pytest.mark.parametrize("layout", ["interleaved", "token_major", "hnd", "nhd"])
def test_a_life_of_ragged_steps(device: str, dtype: str, layout: str) -> None:
    if device == "ptx" and dtype != "float16" and layout != "interleaved":
        pytest.skip("each dtype once and each layout once, to save time")
    spec = KVSpec(num_layers=3, num_kv_heads=3, head_dim=20, page_size=16, dtype=dtype, layout=layout, row_align=64)
    mirror = Mirror(40, device, spec)
    a, b = mirror.add(), mirror.add()
    mirror.extend({a: 100, b: 1})
    for _ in range(20):
        mirror.extend({b: 1, a: 1})
    c = mirror.fork(a)
    mirror.extend({c: 30, b: 0, a: 2})
    mirror.cache.truncate(a, 33)
    mirror.tokens[a] = mirror.tokens[a][:33]
    mirror.check()
    mirror.cache.free(b)
    del mirror.tokens[b]
    mirror.extend({a: 5, c: 1})
    mirror.check()


def test_query_lens_take_the_last_tokens(device: str) -> None:
    mirror = Mirror(20, device)
    a, b = mirror.add(), mirror.add()
    step = mirror.extend({a: 9, b: 3})
    q = mirror.rng.standard_normal((5, 4, 8)).astype(np.float32)
    out = mirror.cache.decode(step, 0, q, query_lens=[4, 1], scale=0.3)
    for row in range(4):
        seen = mirror.tokens[a][: 6 + row, 0]
        assert_close(out[row], attention(q[row], seen[:, 0], seen[:, 1], 0.3)[0], "float32")
    with pytest.raises(ValueError, match="row 1 has 4 query tokens of 3"):
        mirror.cache.decode(step, 0, q, query_lens=[1, 4])
    for bad in ([1, 1, 1], [4.0, 1.0], 5):
        with pytest.raises(ValueError, match="query_lens must be whole numbers of shape"):
            mirror.cache.decode(step, 0, q, query_lens=bad)
    with pytest.raises(ValueError, match="sum to q's 5 tokens"):
        mirror.cache.decode(step, 0, q, query_lens=[2, 1])


def test_bug_B05_freed_pages_belong_to_their_new_owner(device: str) -> None:
    mirror = Mirror(16, device)
    sequences = [mirror.add() for _ in range(4)]
    mirror.extend(dict.fromkeys(sequences, 6))
    for sequence in sequences[2:]:
        mirror.cache.free(sequence)
        del mirror.tokens[sequence]
    newcomer = mirror.add()
    mirror.extend({newcomer: 30})
    before = mirror.cache.pool.data.copy()
    step = mirror.extend(dict.fromkeys(sequences[:2], 1))
    changed = np.argwhere(host(before != mirror.cache.pool.data).any(axis=2))
    pages = {int(slot) // 4 for slot in host(step.slot_mapping)}
    assert {int(page) for _, page in changed} == pages
    mirror.check()


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_bug_B17_forks_keep_their_tokens(device: str, order: tuple[int, ...]) -> None:
    mirror = Mirror(20, device)
    parent = mirror.add()
    mirror.extend({parent: 10})
    family = [parent, mirror.fork(parent), mirror.fork(parent)]
    family.append(mirror.fork(family[1]))
    for sequence in family:
        mirror.extend({sequence: 1})
        mirror.check()
    for index in order:
        mirror.check_decode(mirror.cache.reserve(dict.fromkeys(mirror.tokens, 0)), 1)
        mirror.cache.free(family[index])
        del mirror.tokens[family[index]]
        mirror.check()
    assert mirror.cache.free_pages == 20


@pytest.mark.parametrize("change", ["reserve", "fork", "truncate", "free", "cancel"])
def test_stale_steps_are_refused(device: str, change: str) -> None:
    mirror = Mirror(20, device)
    a = mirror.add()
    step = mirror.extend({a: 3})
    if change == "reserve":
        mirror.cache.reserve({a: 1})
    elif change == "truncate":
        mirror.cache.truncate(a, 1)
    elif change == "cancel":
        mirror.cache.cancel(step)
    else:
        getattr(mirror.cache, change)(a)
    before = mirror.cache.pool.data.copy()
    k = np.ones((3, 2, 8), np.float32)
    for call in (
        lambda: mirror.cache.append(step, 0, k, k),
        lambda: mirror.cache.decode(step, 0, np.ones((1, 2, 8), np.float32)),
        lambda: mirror.cache.cancel(step),
    ):
        with pytest.raises(StaleStep):
            call()
    assert_same(mirror.cache.pool.data, before)


def test_steps_of_another_cache_are_refused(device: str) -> None:
    mine, other = Mirror(8, device), Mirror(8, device)
    a, b = mine.add(), other.add()
    step = mine.extend({a: 20})
    other.extend({b: 5})
    k = np.ones((20, 2, 8), np.float32)
    calls: list[Any] = [
        lambda: other.cache.append(step, 0, k, k),
        lambda: other.cache.decode(step, 0, np.ones((1, 2, 8), np.float32)),
        lambda: other.cache.cancel(step),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="step must come from this cache"):
            call()
    mine.check()
    other.check()
    mine.check_decode(step, 1)


def test_caches_are_not_copied(device: str) -> None:
    cache = KVCache(SPEC, num_pages=2, device=device)
    for thing in (cache, cache.pool, cache.pool[0]):
        for copier in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied or pickled: it holds device memory by address"):
                copier(thing)
    assert pickle.loads(pickle.dumps(SPEC)) == copy.deepcopy(SPEC) == SPEC


def test_a_step_that_cannot_be_made_changes_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = Mirror(12, device)
    a = mirror.add()
    mirror.extend({a: 6})
    b = mirror.fork(a)
    before = mirror.cache.stats()

    def no_room(array: Any) -> Any:
        raise MemoryError("no room for the step")

    with monkeypatch.context() as patch:
        patch.setattr(mirror.cache.pool.backend, "upload", no_room)
        with pytest.raises(MemoryError):
            mirror.cache.reserve({b: 9, a: 1})
    assert mirror.cache.stats() == before
    mirror.check()
    mirror.extend({b: 9, a: 1})
    mirror.check()


def test_running_out_changes_nothing(device: str) -> None:
    mirror = Mirror(3, device)
    a, b = mirror.add(), mirror.add()
    step = mirror.extend({a: 4, b: 4})
    before = mirror.cache.pool.data.copy(), mirror.cache.stats()
    with pytest.raises(OutOfPages, match="2 needed, 1 free"):
        mirror.cache.reserve({a: 1, b: 1})
    assert_same(mirror.cache.pool.data, before[0])
    assert mirror.cache.stats() == before[1]
    mirror.check_decode(step, 1)


def test_step_says_where_things_are(device: str) -> None:
    cache = KVCache(SPEC, num_pages=6, device=device)
    a, b = cache.add(), cache.add()
    step = cache.reserve({b: 5, a: 2})
    assert (step.sequences, step.counts) == ((b, a), (5, 2))
    assert_same(step.seq_lens, np.array([5, 2], np.int32))
    assert_same(step.page_table, np.array([[0, 1], [2, -1]], np.int32))
    assert_same(step.slot_mapping, np.array([0, 1, 2, 3, 4, 8, 9]))
    assert (step.page_table.dtype, step.slot_mapping.dtype) == (np.int32, np.int64)


def test_bad_calls_are_named(device: str) -> None:
    cache = KVCache(SPEC, num_pages=6, device=device)
    a = cache.add()
    step = cache.reserve({a: 2})
    k = np.ones((2, 2, 8), np.float32)
    with pytest.raises(ValueError, match="layer must be from 0 to 1, got 2"):
        cache.append(step, 2, k, k)
    with pytest.raises(ValueError, match="layer must be from 0 to 1, got -1"):
        cache.append(step, -1, k, k)
    with pytest.raises(ValueError, match="k and v must have a token for each of 2 slots, got 1 tokens"):
        cache.append(step, 0, k[:1], k[:1])
    with pytest.raises(ValueError, match="unknown sequence 5"):
        cache.free(5)
    with pytest.raises(ValueError, match="unknown sequence 5"):
        cache.read(5, 0)
    with pytest.raises(IndexError, match="layer must be from 0 to 1, got 2"):
        cache.read(a, 2)
    assert cache.sequences == [a]


def test_bug_B40_memory_is_never_exceeded(device: str) -> None:
    for budget in (SPEC.page_bytes, 10 * SPEC.page_bytes - 1, "5KiB"):
        pool = KVPool(SPEC, memory=budget, device=device)
        limit = 5 * 1024 if isinstance(budget, str) else budget
        assert pool.nbytes == pool.num_pages * SPEC.page_bytes <= limit < pool.nbytes + SPEC.page_bytes
        assert pool.data.nbytes == pool.nbytes
    with pytest.raises(ValueError, match="memory must hold at least one page of 1024 bytes, got '1KB'"):
        KVCache(SPEC, memory="1KB", device=device)
    with pytest.raises(ValueError, match="give either num_pages or memory"):
        KVPool(SPEC, device=device)
    with pytest.raises(ValueError, match="give either num_pages or memory"):
        KVPool(SPEC, 3, memory="1GiB", device=device)
    with pytest.raises(ValueError, match="num_pages must be at least 1, got 0"):
        KVPool(SPEC, 0, device=device)
    with pytest.raises(MemoryError):
        KVPool(SPEC, memory="1000000TiB", device=device)


def test_devices_are_asked_for_by_name() -> None:
    with pytest.raises(ValueError, match="device must be one of auto, cpu, cuda, ptx, got 'gpu'"):
        KVCache(SPEC, num_pages=1, device="gpu")


def test_stats(device: str) -> None:
    mirror = Mirror(10, device)
    assert mirror.cache.stats().internal_fragmentation == 0.0
    a = mirror.add()
    mirror.extend({a: 6})
    mirror.fork(a)
    stats = mirror.cache.stats()
    assert (stats.sequences, stats.tokens, stats.used_pages, stats.free_pages) == (2, 12, 2, 8)
    assert (stats.shared_pages, stats.num_pages, stats.device) == (2, 10, device)
    assert (stats.used_bytes, stats.total_bytes) == (2 * SPEC.page_bytes, 10 * SPEC.page_bytes)
    assert stats.internal_fragmentation == 1 - 6 / 8
    assert stats.padding_waste == 0.0


class Life(RuleBasedStateMachine):
    """Any mixture of calls: after each, every sequence reads back exactly its own tokens and the books balance."""

    sequences: Bundle[int] = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.mirror = Mirror(num_pages=14, device="cpu")
        self.step: tuple[Any, dict[int, int]] | None = None

    @rule(target=sequences)
    def add(self) -> int:
        return self.mirror.add()

    @rule(batch=st.lists(st.tuples(sequences, st.integers(0, 9)), max_size=4), keep=st.booleans())
    def extend(self, batch: list[tuple[int, int]], keep: bool) -> None:
        counts = {sequence: count for sequence, count in batch if sequence in self.mirror.tokens}
        before = dict(self.mirror.tokens)
        try:
            self.step = self.mirror.extend(counts), counts
        except OutOfPages:
            assert self.mirror.tokens == before
            return
        if not keep:
            self.cancel()

    @rule()
    def cancel(self) -> None:
        if self.step is None:
            return
        step, counts = self.step
        if step.alive:
            self.mirror.cache.cancel(step)
            for sequence, count in counts.items():
                tokens = self.mirror.tokens[sequence]
                self.mirror.tokens[sequence] = tokens[: len(tokens) - count]
        else:
            with pytest.raises(StaleStep):
                self.mirror.cache.cancel(step)

    @rule(target=sequences, parent=sequences)
    def fork(self, parent: int) -> int:
        return self.mirror.fork(parent) if parent in self.mirror.tokens else parent

    @rule(sequence=sequences, share=st.floats(0, 1))
    def truncate(self, sequence: int, share: float) -> None:
        if sequence in self.mirror.tokens:
            kept = int(len(self.mirror.tokens[sequence]) * share)
            self.mirror.cache.truncate(sequence, kept)
            self.mirror.tokens[sequence] = self.mirror.tokens[sequence][:kept]

    @rule(sequence=consumes(sequences))
    def free(self, sequence: int) -> None:
        if self.mirror.tokens.pop(sequence, None) is not None:
            self.mirror.cache.free(sequence)

    @invariant()
    def holds(self) -> None:
        self.mirror.check()


Life.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestLife = Life.TestCase

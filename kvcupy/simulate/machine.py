"""What the engine drives: pages and time. Modelled here; a device that executes is another `Machine`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvcupy.allocator import PageAllocator
from kvcupy.simulate.gpus import GPU
from kvcupy.simulate.models import ModelPreset
from kvcupy.simulate.timing import Clock, FloatArray, IntArray, RooflineClock
from kvcupy.spec import KVSpec


class Pool(Protocol):
    """The part of an allocator or a cache that hands out pages."""

    @property
    def free_pages(self) -> int: ...

    def add(self) -> int: ...

    def reserve(self, counts: Mapping[int, int], /) -> object: ...

    def free(self, sequence: int, /) -> None: ...


class Machine(Protocol):
    """Stores tokens and says how long that took.

    The engine asks only for what fits in the free pages. num_pages and page_size do not change.
    """

    @property
    def num_pages(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def free_pages(self) -> int: ...

    def add(self) -> int:
        """A new, empty sequence."""
        ...

    def free(self, sequence: int, /) -> None:
        """Give a sequence's pages back."""
        ...

    def prefill(self, prompts: Mapping[int, int], /) -> float:
        """Store prompts[sequence] tokens of each of these new sequences; seconds that it took."""
        ...

    def decode(
        self,
        sequences: Sequence[int],
        context_tokens: IntArray,
        max_steps: int,
        now_s: float,
        until_s: float,
        /,
    ) -> FloatArray:
        """Store one more token of each sequence in every step; seconds of each step.

        Runs 1 to max_steps steps from now_s on, none that would start at or after until_s. Running fewer is
        always right: a machine that executes runs one.

        context_tokens: tokens that each sequence attends to in the first step, the newest included.
        """
        ...


@dataclass(frozen=True)
class ModelledMachine:
    """Pages from a pool, time from a model. Nothing is executed."""

    pool: Pool
    clock: Clock
    num_pages: int
    page_size: int

    @property
    def free_pages(self) -> int:
        return self.pool.free_pages

    def add(self) -> int:
        return self.pool.add()

    def free(self, sequence: int, /) -> None:
        self.pool.free(sequence)

    def prefill(self, prompts: Mapping[int, int], /) -> float:
        self.pool.reserve(prompts)
        return self.clock.prefill_s(np.fromiter(prompts.values(), np.int64, len(prompts)))

    def decode(
        self,
        sequences: Sequence[int],
        context_tokens: IntArray,
        max_steps: int,
        now_s: float,
        until_s: float,
        /,
    ) -> FloatArray:
        durations = self.clock.decode_s(context_tokens, max_steps)
        # Summed from now_s on, as the engine does it: the same bits decide whether a step starts in time.
        ends = np.add.accumulate(np.concatenate(((now_s,), durations[:-1])))
        steps = max(1, int(np.searchsorted(ends, until_s)))
        self.pool.reserve(dict.fromkeys(sequences, steps))
        return durations[:steps]


def modelled_machine(model: ModelPreset, gpu: GPU, spec: KVSpec, memory: int | str) -> ModelledMachine:
    """A model on a GPU by the roofline, with a pool of as many pages of `spec` as memory holds: bytes, or "8GiB"."""
    pool = PageAllocator(spec.pool_pages(memory), spec.page_size)
    clock = RooflineClock(gpu=gpu, model=model, kv_bytes_per_token=spec.bytes_per_token)
    return ModelledMachine(pool, clock, pool.num_pages, pool.page_size)

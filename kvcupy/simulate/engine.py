"""Continuous batching over a trace: who is admitted, prefilled, decoded, preempted, and when.

Requests are served first come first served. The head of the queue is admitted when its prompt fits in the
free pages and the batch has room; all that are admitted together are prefilled in one step of their own,
whose end is their first token. Otherwise the whole batch decodes. While the next decode step does not fit,
the
youngest running request is preempted: its pages are freed and it goes back to the head of the queue, with a
prompt that has grown by the tokens it has generated (recompute).

A request of p prompt and o output tokens stores p + o - 1: the last sampled token's K and V are never stored.
If they need more pages than the pool has, it is rejected, and blocks nobody.

Why a small pool ends: every other request fits when it is alone, so the oldest running one is never
preempted; it finishes, and so, one after another, do all. Why it does not thrash: the last one preempted is
at the head of the queue and needs one page more than there are (its own, and the page for want of which it
was preempted); what is free only shrinks until a request finishes, so nobody is admitted before. Hence at
most max_batch preemptions for each request that finishes.

Between two events (an arrival that could be admitted, a finish, an empty pool) the batch does not change.
Those decode steps are advanced at once; sums are accumulated in the order of the steps, so the result is the
same to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvcupy.simulate.machine import Machine
from kvcupy.simulate.timing import FloatArray, IntArray
from kvcupy.simulate.trace import Trace
from kvcupy.spec import whole_number

MAX_BATCH = 256
_STEPS_AT_ONCE = 1024  # bounds the work thrown away when an arrival cuts a long stretch short

Progress = Callable[[int, int], None]
"""Called with (requests done, requests in all)."""


@dataclass(frozen=True)
class Percentiles:
    """Linear interpolation between the nearest values."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: FloatArray) -> Percentiles | None:
        """None when there are no values."""
        return cls(*map(float, np.percentile(values, (50, 90, 99)))) if values.size else None


@dataclass(frozen=True)
class PoolUse:
    """Pages in use. mean_pages is weighted by time, from the first arrival to the last finish."""

    total_pages: int
    peak_pages: int
    mean_pages: float


@dataclass(frozen=True)
class Rejection:
    """A request that could never run. request: its place in the trace."""

    request: int
    reason: str


@dataclass(frozen=True, eq=False)
class Replay:
    """What became of a trace.

    requests_finished, requests_rejected: together all requests of the trace.
    preemptions: how often a request lost its pages.
    output_tokens: tokens sampled for the caller; recomputed ones count once.
    makespan_s: from the first arrival to the last finish.
    tokens_per_s: output_tokens / makespan_s, 0 when nothing ran.
    ttft_s: time to first token, from arrival.
    tpot_s: time per output token after the first, (finish - first token) / (output_tokens - 1); requests of
        one output token have none.
    internal_fragmentation: 1 - tokens stored / slots of the used pages, both weighted by time.
    first_token_s, finish_s: per request of the trace, on the trace's clock; NaN when rejected.
    """

    requests_finished: int
    requests_rejected: int
    rejections: tuple[Rejection, ...]
    preemptions: int
    output_tokens: int
    makespan_s: float
    tokens_per_s: float
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    pool: PoolUse
    internal_fragmentation: float
    first_token_s: FloatArray
    finish_s: FloatArray


def replay(trace: Trace, machine: Machine, *, max_batch: int = MAX_BATCH, progress: Progress | None = None) -> Replay:
    """Run all requests of a trace on a machine whose pool is empty. Pure: same trace and machine, same
    result.

    max_batch: most requests that run at the same time.
    progress: called after each step in which a request finished.
    """
    max_batch = whole_number("max_batch", max_batch, 1)
    if machine.free_pages != machine.num_pages:
        raise ValueError(f"machine must have all its {machine.num_pages} pages free, got {machine.free_pages} free")
    run = _Run(trace, machine, max_batch)
    done = len(trace) - run.unfinished
    while run.unfinished:
        run.advance()
        if progress and len(trace) - run.unfinished > done:
            done = len(trace) - run.unfinished
            progress(done, len(trace))
    return run.result()


def page_growth(stored_tokens: IntArray, page_size: int, steps: int) -> IntArray:
    """Pages that sequences of these lengths take in each of `steps` steps of one more token each."""
    first = -stored_tokens % page_size  # steps until a sequence's last page is full
    if steps <= page_size:
        return np.bincount(first[first < steps], minlength=steps)
    return np.resize(np.bincount(first, minlength=page_size), steps)  # repeats


class _Run:
    """The state of a replay. Columns hold the servable requests, in order of arrival.

    `left` is what a request still has to sample. Running, it stores total - left - 1 tokens; waiting, new or
    preempted, it has a prompt of total - left.

    As service is in order of arrival, the queue needs no list: preempted requests are older than any that
    never ran, and were preempted youngest first. So it is `preempted`, its head on top, then all from `next`.
    """

    def __init__(self, trace: Trace, machine: Machine, max_batch: int) -> None:
        self.trace = trace
        self.machine = machine
        self.max_batch = max_batch
        pages = -(-(trace.prompt_tokens + trace.output_tokens - 1) // machine.page_size)
        self.servable = np.flatnonzero(pages <= machine.num_pages)
        self.rejections = tuple(
            Rejection(int(at), f"needs {pages[at]} pages, the pool has {machine.num_pages}")
            for at in np.flatnonzero(pages > machine.num_pages)
        )
        self.arrival_s = trace.arrival_s[self.servable]
        self.left = trace.output_tokens[self.servable]
        self.total = trace.prompt_tokens[self.servable] + self.left
        self.first_token_s = np.full(len(self.servable), np.nan)
        self.finish_s = np.full(len(self.servable), np.nan)
        self.unfinished = len(self.servable)
        self.next = 0
        self.preempted: list[int] = []
        self.running: dict[int, int] = {}  # request -> sequence, oldest first
        self.preemptions = 0
        self.peak_pages = 0
        start_s = float(trace.arrival_s[0]) if len(trace) else 0.0
        self.sums = np.array([start_s, 0.0, 0.0])  # now, pages * seconds, tokens * seconds

    @property
    def now_s(self) -> float:
        return float(self.sums[0])

    def advance(self) -> None:
        """To the next event: a prefill, decode steps, or the next arrival."""
        if admitted := self._admit():
            self._prefill(admitted)
        elif self.running:
            self._decode()
        else:
            self.sums[0] = self.arrival_s[self.next]

    def _head(self) -> int | None:
        """The request that is next to be admitted, if one is waiting."""
        if self.preempted:
            return self.preempted[-1]
        if self.next < len(self.arrival_s) and self.arrival_s[self.next] <= self.sums[0]:
            return self.next
        return None

    def _admit(self) -> dict[int, int]:
        """Requests that start now: request -> prompt tokens."""
        admitted: dict[int, int] = {}
        free_pages, page_size = self.machine.free_pages, self.machine.page_size
        while len(self.running) + len(admitted) < self.max_batch and (request := self._head()) is not None:
            prompt_tokens = int(self.total[request] - self.left[request])
            free_pages -= -(-prompt_tokens // page_size)
            if free_pages < 0:
                break
            if self.preempted:
                self.preempted.pop()
            else:
                self.next += 1
            admitted[request] = prompt_tokens
        return admitted

    def _prefill(self, admitted: dict[int, int]) -> None:
        sequences = {request: self.machine.add() for request in admitted}
        duration_s = self.machine.prefill({sequences[request]: n for request, n in admitted.items()})
        self.running |= sequences
        new = np.fromiter(admitted, np.int64, len(admitted))
        self.left[new] -= 1
        batch = self._batch()
        used_pages = self.machine.num_pages - self.machine.free_pages
        stored_tokens = int((self.total[batch] - self.left[batch]).sum()) - len(batch)
        self._pass(np.array([duration_s]), np.array([used_pages]), np.array([stored_tokens]))
        first = new[np.isnan(self.first_token_s[new])]
        self.first_token_s[first] = self.now_s
        self._finish(new[self.left[new] == 0])

    def _decode(self) -> None:
        self._make_room()
        machine = self.machine
        batch = self._batch()
        left = self.left[batch]
        stored_tokens = self.total[batch] - left - 1
        steps = min(int(left.min()), _STEPS_AT_ONCE)
        used_before = machine.num_pages - machine.free_pages
        used_pages = used_before + page_growth(stored_tokens, machine.page_size, steps).cumsum()
        steps = int(used_pages.searchsorted(machine.num_pages, side="right"))
        # Whoever waits now waits for a finish: later arrivals queue behind and change nothing.
        waiting = self._head() is not None or self.next == len(self.arrival_s)
        until_s = math.inf if waiting else float(self.arrival_s[self.next])
        sequences = list(self.running.values())
        durations = machine.decode(sequences, stored_tokens + 1, steps, self.now_s, until_s)
        steps = len(durations)
        stored_after = int(stored_tokens.sum()) + len(batch) * np.arange(1, steps + 1)
        self._pass(durations, used_pages[:steps], stored_after)
        left -= steps
        self.left[batch] = left
        self._finish(batch[left == 0])

    def _batch(self) -> IntArray:
        return np.fromiter(self.running, np.int64, len(self.running))

    def _pass(self, durations: FloatArray, used_pages: IntArray, stored_tokens: IntArray) -> None:
        """Let time pass, step by step: a running sum rounds as one addition per step does."""
        columns = np.empty((3, len(durations) + 1))
        columns[:, 0] = self.sums
        columns[0, 1:] = durations
        columns[1, 1:] = durations * used_pages
        columns[2, 1:] = durations * stored_tokens
        self.sums = np.add.accumulate(columns, axis=1)[:, -1].copy()
        self.peak_pages = max(self.peak_pages, int(used_pages[-1]))

    def _make_room(self) -> None:
        """Preempt the youngest until the others can take one more step."""
        machine = self.machine
        if machine.free_pages >= len(self.running):  # one page each is the most they can need
            return
        batch = self._batch()
        full = ((self.total[batch] - self.left[batch] - 1) % machine.page_size == 0).tolist()
        needed_pages = sum(full)
        while needed_pages > machine.free_pages:
            needed_pages -= full.pop()
            request, sequence = self.running.popitem()
            machine.free(sequence)
            self.preempted.append(request)
            self.preemptions += 1

    def _finish(self, requests: IntArray) -> None:
        self.finish_s[requests] = self.sums[0]
        self.unfinished -= len(requests)
        for request in requests.tolist():
            self.machine.free(self.running.pop(request))

    def result(self) -> Replay:
        trace, servable = self.trace, self.servable
        first_token_s, finish_s = np.full((2, len(trace)), np.nan)
        first_token_s[servable] = self.first_token_s
        finish_s[servable] = self.finish_s
        outputs = trace.output_tokens[servable]
        output_tokens = int(outputs.sum())
        makespan_s = self.now_s - float(trace.arrival_s[0]) if len(servable) else 0.0
        page_seconds, token_seconds = map(float, self.sums[1:])
        many = outputs > 1
        tpot_s = (self.finish_s - self.first_token_s)[many] / (outputs[many] - 1)
        slot_seconds = page_seconds * self.machine.page_size
        return Replay(
            requests_finished=len(servable),
            requests_rejected=len(self.rejections),
            rejections=self.rejections,
            preemptions=self.preemptions,
            output_tokens=output_tokens,
            makespan_s=makespan_s,
            tokens_per_s=output_tokens / makespan_s if makespan_s else 0.0,
            ttft_s=Percentiles.of(self.first_token_s - self.arrival_s),
            tpot_s=Percentiles.of(tpot_s),
            pool=PoolUse(
                total_pages=self.machine.num_pages,
                peak_pages=self.peak_pages,
                mean_pages=page_seconds / makespan_s if makespan_s else 0.0,
            ),
            internal_fragmentation=1 - token_seconds / slot_seconds if slot_seconds else 0.0,
            first_token_s=first_token_s,
            finish_s=finish_s,
        )

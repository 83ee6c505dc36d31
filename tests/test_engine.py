"""Continuous batching: against a slow, step-by-step version written apart, and the cases that bite."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcupy.allocator import PageAllocator
from kvcupy.simulate.engine import page_growth, replay
from kvcupy.simulate.gpus import find_gpu
from kvcupy.simulate.machine import ModelledMachine, modelled_machine
from kvcupy.simulate.models import find_model
from kvcupy.simulate.timing import RooflineClock
from kvcupy.simulate.trace import Trace, read_trace
from kvcupy.simulate.workload import synthesize

AZURE = Path(__file__).parents[2] / "shared" / "traces" / "azure_llm_2023_conv.csv"


class AffineClock:
    """Seconds with no round binary form, so that any other order of additions shows."""

    def prefill_s(self, prompt_tokens):
        return 0.1 + 0.003 * int(prompt_tokens.sum())

    def decode_s(self, context_tokens, steps):
        contexts = int(context_tokens.sum()) + len(context_tokens) * np.arange(steps)
        return 0.07 + 0.0013 * contexts


def machine(num_pages, page_size, clock=None):
    return ModelledMachine(PageAllocator(num_pages, page_size), clock or AffineClock(), num_pages, page_size)


def run(requests, num_pages=10, page_size=16, **options):
    simulated = machine(num_pages, page_size)
    result = replay(Trace.of(requests), simulated, **options)
    simulated.pool.check_integrity()
    assert simulated.pool.free_pages == num_pages
    assert result.requests_finished + result.requests_rejected == len(requests)
    return result


def oracle(requests, num_pages, page_size, max_batch, clock):
    """One step at a time, one page count per sequence, lists and dicts only."""

    def pages(tokens):
        return (tokens + page_size - 1) // page_size

    arrivals = sorted(range(len(requests)), key=lambda i: requests[i][0])
    now = requests[arrivals[0]][0]
    first, finish, stored, sampled, running, queue = {}, {}, {}, dict.fromkeys(arrivals, 0), [], []
    preemptions, peak, page_seconds, token_seconds = 0, 0, 0.0, 0.0

    def used():
        return sum(pages(stored[i]) for i in running)

    def spend(seconds):
        nonlocal now, peak, page_seconds, token_seconds
        now += seconds
        peak = max(peak, used())
        page_seconds += seconds * used()
        token_seconds += seconds * sum(stored[i] for i in running)

    def sample(batch):
        for i in batch:
            sampled[i] += 1
            first.setdefault(i, now)
            if sampled[i] == requests[i][2]:
                finish[i] = now
                running.remove(i)

    rejected = [i for i in arrivals if pages(requests[i][1] + requests[i][2] - 1) > num_pages]
    arrivals = [i for i in arrivals if i not in rejected]
    while arrivals or queue or running:
        while arrivals and requests[arrivals[0]][0] <= now:
            queue.append(arrivals.pop(0))
        new = []
        while queue and len(running) < max_batch:
            tokens = requests[queue[0]][1] + sampled[queue[0]]
            if used() + pages(tokens) > num_pages:
                break
            stored[queue[0]] = tokens
            new.append(queue[0])
            running.append(queue.pop(0))
        if new:
            spend(clock.prefill_s(np.array([stored[i] for i in new])))
            sample(new)
        elif running:
            while sum(pages(stored[i] + 1) for i in running) > num_pages:
                queue.insert(0, running.pop())
                preemptions += 1
            for i in running:
                stored[i] += 1
            spend(clock.decode_s(np.array([stored[i] for i in running]), 1)[0])
            sample(list(running))
        else:
            now = requests[arrivals[0]][0]
    return first, finish, rejected, preemptions, peak, page_seconds, token_seconds


REQUEST = st.tuples(st.floats(0, 20), st.integers(1, 40), st.integers(1, 60))


@given(
    requests=st.lists(REQUEST, min_size=1, max_size=12),
    num_pages=st.integers(1, 40),
    page_size=st.sampled_from([1, 2, 3, 4, 16, 1000]),
    max_batch=st.integers(1, 6),
)
def test_many_steps_at_once_are_the_steps_one_by_one_to_the_last_bit(requests, num_pages, page_size, max_batch):
    result = run(requests, num_pages, page_size, max_batch=max_batch)
    requests = sorted(requests, key=lambda request: request[0])
    first, finish, rejected, preemptions, peak, page_seconds, token_seconds = oracle(
        requests, num_pages, page_size, max_batch, AffineClock()
    )
    count = len(requests)
    nan = float("nan")
    np.testing.assert_array_equal(result.first_token_s, [first.get(i, nan) for i in range(count)])
    np.testing.assert_array_equal(result.finish_s, [finish.get(i, nan) for i in range(count)])
    assert [rejection.request for rejection in result.rejections] == rejected
    assert result.requests_rejected == len(rejected)
    assert result.preemptions == preemptions
    assert result.output_tokens == sum(requests[i][2] for i in finish)
    assert result.pool.total_pages == num_pages
    assert result.pool.peak_pages == peak
    if finish:
        assert result.makespan_s == max(finish.values()) - requests[0][0]
        assert result.pool.mean_pages == page_seconds / result.makespan_s
        assert result.internal_fragmentation == 1 - token_seconds / (page_seconds * page_size)
        assert result.tokens_per_s == result.output_tokens / result.makespan_s


def test_a_machine_that_decodes_one_step_at_a_time_gives_the_same_replay():
    class OneStep(ModelledMachine):
        def decode(self, sequences, context_tokens, max_steps, now_s, until_s):
            return super().decode(sequences, context_tokens, 1, now_s, until_s)

    trace = synthesize(200, 0.5, "uniform:1:100", "lognormal:40:1", seed=5)
    assert_same(
        replay(trace, machine(60, 4)),
        replay(trace, OneStep(PageAllocator(60, 4), AffineClock(), 60, 4)),
    )


def assert_same(one, other):
    one, other = asdict(one), asdict(other)
    for name in ("first_token_s", "finish_s"):
        np.testing.assert_array_equal(one.pop(name), other.pop(name))
    assert one == other


def test_bug_B38_a_request_that_can_never_fit_blocks_nobody():
    a, b, c, d = (0.0, 400, 10), (0.0, 16, 4), (1.0, 159, 1), (2.0, 150, 11)
    result = run([a, b, c, d])
    assert (result.requests_finished, result.requests_rejected) == (3, 1)
    (rejection,) = result.rejections
    assert rejection.request == 0
    assert rejection.reason == "needs 26 pages, the pool has 10"
    assert np.isnan(result.finish_s).tolist() == [True, False, False, False]
    assert result.output_tokens == 4 + 1 + 11
    assert result.pool.peak_pages == 10
    # The last sampled token is not stored: 150 + 11 - 1 = 160 slots fit, one more does not.
    result = run([a, b, c, (2.0, 150, 12)])
    assert (result.requests_finished, result.requests_rejected) == (2, 2)
    assert [rejection.request for rejection in result.rejections] == [0, 3]


def test_times_of_one_request_by_hand():
    result = run([(5.0, 20, 3)])
    assert result.first_token_s[0] == pytest.approx(5 + 0.1 + 0.003 * 20)
    decode_s = 0.07 + 0.0013 * 21 + 0.07 + 0.0013 * 22
    assert result.finish_s[0] == pytest.approx(5.16 + decode_s)
    assert result.makespan_s == pytest.approx(0.16 + decode_s)
    assert result.ttft_s.p50 == result.ttft_s.p99 == pytest.approx(0.16)
    assert result.tpot_s.p90 == pytest.approx(decode_s / 2)
    assert result.pool.mean_pages == pytest.approx(2)
    assert result.tokens_per_s == pytest.approx(3 / result.makespan_s)
    tokens = (20 * 0.16 + 21 * (0.07 + 0.0013 * 21) + 22 * (0.07 + 0.0013 * 22)) / result.makespan_s
    assert result.internal_fragmentation == pytest.approx(1 - tokens / 32)


def test_one_output_token_ends_with_the_prefill():
    result = run([(0.0, 16, 1), (0.0, 16, 1)])
    assert result.finish_s.tolist() == result.first_token_s.tolist()
    assert result.tpot_s is None
    assert result.internal_fragmentation == 0
    assert result.pool.peak_pages == 2


def test_the_youngest_is_preempted_and_keeps_its_first_token():
    # Both fit at first; when the older needs a third page, the younger gives way, and is recomputed later.
    result = run([(0.0, 16, 20), (0.0, 16, 20)], num_pages=3)
    assert result.preemptions == 1
    assert result.first_token_s[0] == result.first_token_s[1]
    assert result.finish_s[0] < result.finish_s[1]
    assert result.output_tokens == 40


def test_an_undersized_pool_ends_and_does_not_thrash():
    requests = [(0.0, 100, 61)] * 200
    result = run(requests, num_pages=45, page_size=16)
    assert result.requests_finished == 200
    # Nobody is admitted again before a finish, so a finish costs at most the others of its batch.
    assert result.preemptions <= 6 * 200
    assert np.all(np.diff(result.finish_s) >= 0)


def test_max_batch_limits_who_runs_together():
    together = run([(0.0, 4, 5)] * 6, max_batch=6)
    alone = run([(0.0, 4, 5)] * 6, max_batch=1)
    assert (together.pool.peak_pages, alone.pool.peak_pages) == (6, 1)
    assert alone.makespan_s > together.makespan_s
    with pytest.raises(ValueError, match="max_batch must be at least 1, got 0"):
        run([(0.0, 4, 5)], max_batch=0)


def test_idle_time_jumps_to_the_next_arrival():
    result = run([(0.0, 1, 1), (1e6, 1, 1)])
    assert result.first_token_s.tolist() == pytest.approx([0.103, 1e6 + 0.103], rel=1e-12)
    assert result.pool.mean_pages == pytest.approx(0.206 / 1_000_000.103)


def test_nothing_to_run():
    result = run([(0.0, 161, 1)])
    assert (result.requests_finished, result.requests_rejected, result.output_tokens) == (0, 1, 0)
    assert (result.makespan_s, result.tokens_per_s, result.pool.mean_pages) == (0, 0, 0)
    assert result.ttft_s is result.tpot_s is None
    result = run([])
    assert (result.requests_finished, result.requests_rejected) == (0, 0)
    assert run([(0.0, 1, 1)], num_pages=0).requests_rejected == 1


def test_progress_counts_to_the_end():
    seen = []
    run([(0.0, 400, 10), (0.0, 16, 4), (1.0, 159, 1)], progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 3), (3, 3)]


def test_a_pool_in_use_is_refused():
    used = machine(10, 16)
    used.pool.reserve({used.pool.add(): 1})
    with pytest.raises(ValueError, match="machine must have all its 10 pages free, got 9 free"):
        replay(Trace.of([(0.0, 1, 1)]), used)


def test_same_seed_same_result():
    trace = synthesize(300, 2.0, "uniform:1:100", "zipf:1.2:60", seed=9)
    assert_same(replay(trace, machine(30, 16)), replay(trace, machine(30, 16)))


@given(
    stored=st.lists(st.integers(1, 200), min_size=1, max_size=8),
    page_size=st.integers(1, 70),
    steps=st.integers(1, 150),
)
def test_page_growth_is_the_difference_of_page_counts(stored, page_size, steps):
    growth = page_growth(np.array(stored), page_size, steps)
    expected = [
        sum(-(-(n + step + 1) // page_size) + (-(n + step) // page_size) for n in stored) for step in range(steps)
    ]
    assert growth.tolist() == expected


def test_modelled_machine_is_the_preset_on_the_data_sheet():
    model = find_model("llama-3-8b")
    modelled = modelled_machine(model, find_gpu("h100"), model.spec(), 1 << 30)
    assert (modelled.num_pages, modelled.page_size, modelled.free_pages) == (512, 16, 512)
    clock = RooflineClock(gpu=find_gpu("h100"), model=model, kv_bytes_per_token=131_072)
    assert modelled.clock == clock
    result = replay(Trace.of([(0.0, 100, 2)]), modelled)
    assert result.tpot_s.p50 == pytest.approx(clock.decode_s(np.array([101]), 1)[0])


def test_replay_of_the_shared_azure_trace():
    if not AZURE.exists():
        pytest.skip("needs ../shared/traces")
    model = find_model("llama-3-8b")
    modelled = modelled_machine(model, find_gpu("h100"), model.spec(), 40 << 30)
    result = replay(read_trace(AZURE), modelled)
    assert (result.requests_finished, result.requests_rejected, result.preemptions) == (19_366, 0, 0)
    assert result.output_tokens == 4_088_665
    assert result.pool.total_pages == 20_480
    # Arrivals take 3,501.7 s; a batch of one decodes at 16.06 GB / 3.35 TB/s = 4.8 ms a token at best.
    assert 3501.7 < result.makespan_s < 3510
    assert 0.0048 < result.tpot_s.p50 < result.tpot_s.p90 < result.tpot_s.p99 < 0.05
    assert np.all(result.finish_s >= result.first_token_s)
    assert modelled.free_pages == 20_480

"""The experiment and the executing machine do what their figures claim: each call is watched."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from kvcupy import KVCache, KVSpec, measure
from kvcupy.backends.cpu import CpuBackend
from kvcupy.simulate import experiment
from kvcupy.simulate.engine import replay
from kvcupy.simulate.execute import ExecutingMachine
from kvcupy.simulate.experiment import run_experiment
from kvcupy.simulate.workload import synthesize

SPEC = KVSpec(num_layers=4, num_kv_heads=2, head_dim=20, page_size=4)


class Calls:
    """Every append and decode on the cpu device: (operation, layer's address, tokens, page table or slots)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, int, int, Any]] = []
        append, decode = CpuBackend.append, CpuBackend.decode_attention

        def watched_append(backend: CpuBackend, layer: Any, k: Any, v: Any, slots: Any) -> None:
            self.calls.append(("append", layer.data, len(k), np.array(slots)))
            append(backend, layer, k, v, slots)

        def watched_decode(backend: CpuBackend, layer: Any, q: Any, table: Any, *rest: Any) -> None:
            self.calls.append(("decode", layer.data, len(q), np.array(table)))
            decode(backend, layer, q, table, *rest)

        monkeypatch.setattr(CpuBackend, "append", watched_append)
        monkeypatch.setattr(CpuBackend, "decode_attention", watched_decode)


def test_the_experiment_appends_and_decodes_round_all_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MIN_WORKING_SET_BYTES", 1 << 17)
    monkeypatch.setattr(measure, "CACHE_MULTIPLE", 0)
    monkeypatch.setattr(experiment, "MIN_READ_BYTES", 0)
    monkeypatch.setattr(CpuBackend, "read_bandwidth", lambda self: 1e15)
    watched = Calls(monkeypatch)
    batch, steps = 3, 2
    result = run_experiment(SPEC, num_q_heads=4, batch=batch, context=60, steps=steps, device="cpu")
    timed = watched.calls[-2 * 4 * SPEC.num_layers * steps :]
    assert [name for name, *_ in timed] == ["append", "decode"] * (4 * SPEC.num_layers * steps)
    assert {tokens for _, _, tokens, _ in timed} == {batch}
    decoded = [address for name, address, *_ in timed if name == "decode"]
    assert [address for name, address, *_ in timed if name == "append"] == decoded, (
        "a token is stored where it is read"
    )
    assert all(one != next_one for one, next_one in pairwise(decoded))
    tokens = sum(result.lengths)
    assert len(set(decoded)) * tokens * 2 * 2 * 20 * 2 == result.working_set_bytes >= 1 << 17
    # Pages lie scattered, as in a server that has run for a while.
    tables = [table for name, _, _, table in timed if name == "decode" and table.shape[1] > 1]
    assert all((np.diff(table[0][table[0] >= 0]) != 1).any() for table in tables)


def test_the_seed_reaches_the_churn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MIN_WORKING_SET_BYTES", 1)
    monkeypatch.setattr(measure, "CACHE_MULTIPLE", 0)
    monkeypatch.setattr(experiment, "MIN_READ_BYTES", 0)
    monkeypatch.setattr(experiment, "CHURN_REQUESTS", 200)
    monkeypatch.setattr(CpuBackend, "read_bandwidth", lambda self: 1e15)
    fragmentation = [
        run_experiment(SPEC, num_q_heads=2, batch=1, context=50, steps=1, device="cpu", seed=seed).rows[0]
        for seed in (1, 1, 2)
    ]
    first, again, other = (row.external_fragmentation for row in fragmentation)
    assert first == again != other


def test_executing_a_stream_decodes_every_layer_of_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Calls(monkeypatch)
    stream = synthesize(5, 0, "uniform:1:30", "uniform:1:6", seed=2)
    cache = KVCache(SPEC, num_pages=200, device="cpu")
    machine = ExecutingMachine(cache, num_q_heads=4)
    replay(stream, machine)
    assert len(machine.costs) == 1 + max(stream.output_tokens) - 1
    assert [name for name, *_ in watched.calls] == ["append", "decode"] * (SPEC.num_layers * len(machine.costs))
    stored = sum(tokens for name, _, tokens, _ in watched.calls if name == "append")
    assert stored == SPEC.num_layers * int((stream.prompt_tokens + stream.output_tokens - 1).sum())

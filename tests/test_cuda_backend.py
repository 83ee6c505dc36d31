"""The `cuda` device over a stand-in for CuPy: how it calls CuPy, not what a GPU makes of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from problems import assert_close, assert_same, host, make_problem, on_device

import kvcupy.backends
from kvcupy import DeviceUnavailable, KVCache, KVSpec, decode_attention, measure, merge_states
from kvcupy.backends import cuda, get_backend
from kvcupy.bench import Axes, bench
from kvcupy.simulate import experiment

try:
    get_backend("ptx")
except DeviceUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

import fake_cupy

SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=32, page_size=4)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in with two GPUs, as the device `cuda`."""
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)  # type: ignore[arg-type]
    monkeypatch.setattr(fake_cupy, "device_count", 2)
    load, made = kvcupy.backends._load, cuda.create()
    monkeypatch.setattr(kvcupy.backends, "_load", lambda name: made if name == "cuda" else load(name))
    yield made
    fake_cupy._use(0)


def test_a_cache_lives_on_the_gpu(backend: Any) -> None:
    assert get_backend("auto") is backend
    assert backend.describe() == "Stand-in, 6 multiprocessors"
    caches = [KVCache(SPEC, num_pages=8, device=device) for device in ("cpu", "cuda")]
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 9, 2, 32)).astype(np.float32)
    q = rng.standard_normal((2, 6, 32)).astype(np.float32)
    results: list[list[Any]] = []
    for cache in caches:
        a, b = cache.add(), cache.add()
        step = cache.reserve({a: 6, b: 3})
        cache.append(step, 1, k, v)
        c = cache.fork(a)
        step = cache.reserve({c: 1, b: 0})
        cache.append(step, 1, k[:1], v[:1])
        results.append([*cache.decode(step, 1, q, return_lse=True), *cache.read(a, 1), *cache.read(c, 1)])
        assert cache.stats().device == cache.device
    for got in results[1]:
        assert isinstance(got, fake_cupy.ndarray)
    for cpu, gpu in zip(results[0][:2], results[1][:2], strict=True):
        assert_close(gpu, cpu, "float32")
    for cpu, gpu in zip(results[0][2:], results[1][2:], strict=True):
        assert_same(gpu, cpu)


def test_arrays_on_the_gpu_are_taken_as_they_are(backend: Any) -> None:
    problem = make_problem(SPEC, [9, 4], "cuda")
    arrays = problem.queries(2, 3), problem.page_table, problem.seq_lens
    q, table, lengths = (on_device("cuda", each) for each in arrays)
    out = on_device("cuda", np.zeros((2, 6, 32), np.float32))
    assert decode_attention(q, problem.pool, table, lengths, out=out) is out
    assert_close(out, problem.expected(host(q))[0], "float32")
    lse = on_device("cuda", np.zeros((2, 6), np.float32))
    assert_close(merge_states(out, lse, out, lse)[0], host(out), "float32")
    with pytest.raises(TypeError, match=r"out must lie in the memory of device cuda, got numpy\.ndarray"):
        decode_attention(q, problem.pool, table, lengths, out=host(out))


def test_everything_stays_on_the_gpu_of_the_pool(backend: Any) -> None:
    problem = make_problem(SPEC, [9], "cuda")
    with fake_cupy.Device(1):
        elsewhere = make_problem(SPEC, [9], "cuda")
        q = on_device("cuda", elsewhere.queries(1, 2))
    # GPU 0 is current again; host arrays go where the pool is.
    out = decode_attention(q, elsewhere.pool, elsewhere.page_table, elsewhere.seq_lens)
    assert out.device.id == 1
    assert_close(out, elsewhere.expected(host(q))[0], "float32")
    lse = np.zeros((1, 4), np.float32)
    assert merge_states(out, lse, out, lse)[0].device.id == 1
    with pytest.raises(ValueError, match="must be on one GPU, got GPU 0 and GPU 1"):
        decode_attention(q, problem.pool, problem.page_table, problem.seq_lens)
    assert fake_cupy.current_device == 0


def test_workspaces_belong_to_streams(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = backend.workspace(100)
    assert backend.workspace(100) is one
    assert backend.workspace(200) is not one
    monkeypatch.setattr(fake_cupy.cuda, "get_current_stream", lambda: fake_cupy.stream(7))
    assert backend.workspace(100) is not one


def test_what_is_measured_is_the_gpu_between_events(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_HOLD_CYCLES", 10)
    problem = make_problem(SPEC, [9], "cuda")
    arguments = problem.queries(1, 2), problem.pool, problem.page_table, problem.seq_lens

    def twice() -> None:
        for _ in range(2):
            decode_attention(*arguments)

    # In the stand-in's time a launch takes a millisecond, and so does an event; a decode is two launches.
    one, two = backend.measure([lambda: decode_attention(*arguments), twice])
    assert (one.seconds, two.seconds) == (0.003, 0.005)
    assert one.sectors is None


def test_the_experiment_and_the_benchmark_run_on_the_gpu(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_HOLD_CYCLES", 10)
    monkeypatch.setattr(measure, "MIN_WORKING_SET_BYTES", 1)
    monkeypatch.setattr(experiment, "MIN_READ_BYTES", 0)
    monkeypatch.setattr(measure, "CACHE_MULTIPLE", 0)
    monkeypatch.setattr(experiment, "CHURN_REQUESTS", 10)
    monkeypatch.setattr(cuda.CudaBackend, "read_bandwidth", lambda self: 1e9)
    result = experiment.run_experiment(SPEC, num_q_heads=2, batch=2, context=9, steps=1, device="cuda")
    assert result.device == "cuda"
    for row in result.rows:  # per layer: append, decode, merge, and the event
        assert row.tokens_per_s == pytest.approx(2 / (2 * 4e-3))
        assert row.sectors is None
    axes = Axes(batch=(1,), context=(8,), heads=((2, 1),), head_dim=(32,))
    decode, append = bench(axes.shapes(), "cuda", rounds=2).rows
    assert (decode.seconds, append.seconds) == (0.003, 0.002)
    assert decode.share_of_read_bandwidth == pytest.approx(8 * 2 * 64 / 0.003 / 1e9)


def test_checks_are_refused_under_capture(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(SPEC, [9], "cuda")
    q = problem.queries(1, 2)
    arguments = q, problem.pool, problem.page_table, problem.seq_lens
    monkeypatch.setattr(fake_cupy.cuda, "get_current_stream", lambda: fake_cupy.stream(capturing=True))
    with pytest.raises(ValueError, match="check must be False while a CUDA graph is captured"):
        decode_attention(*arguments)
    assert_close(decode_attention(*arguments, check=False), problem.expected(q)[0], "float32")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceUnavailable, match="needs the package cupy-cuda12x or cupy-cuda13x"):
        cuda.create()
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)  # type: ignore[arg-type]

    def fail(*arguments: object) -> None:
        raise fake_cupy.CUDARuntimeError("cudaErrorInsufficientDriver")

    with monkeypatch.context() as patch:
        patch.setattr(fake_cupy.cuda.runtime, "getDeviceCount", fail)
        with pytest.raises(DeviceUnavailable, match="found no GPU that answers: cudaErrorInsufficientDriver"):
            cuda.create()
    with monkeypatch.context() as patch:
        patch.setattr(fake_cupy, "device_count", 0)
        with pytest.raises(DeviceUnavailable, match="found no GPU"):
            cuda.create()
    monkeypatch.setattr(fake_cupy.cuda.nvrtc, "getVersion", fail)
    with pytest.raises(DeviceUnavailable, match="needs the package nvidia-cuda-nvrtc"):
        cuda.create()

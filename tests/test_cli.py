"""The command line: reports, JSON, and errors of one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcupy import KVSpec
from kvcupy.backends.cpu import CpuBackend
from kvcupy.cli import run
from kvcupy.simulate import experiment
from kvcupy.simulate.engine import replay
from kvcupy.simulate.execute import ExecutingMachine
from kvcupy.simulate.gpus import find_gpu
from kvcupy.simulate.machine import modelled_machine
from kvcupy.simulate.models import find_model
from kvcupy.simulate.workload import synthesize

AZURE = Path(__file__).parents[2] / "shared" / "traces" / "azure_llm_2023_conv.csv"

TINY = ["--layers", "2", "--q-heads", "4", "--kv-heads", "2", "--head-dim", "20"]


def output_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run(arguments) == 0
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.out


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error of a command line that is refused with exit code 2."""
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("kvcupy: ")
    return captured.err


@pytest.fixture
def small_working_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """An experiment in milliseconds; its shares mean nothing, so memory is said to be fast."""
    monkeypatch.setattr(experiment, "MIN_WORKING_SET_BYTES", 1 << 18)
    monkeypatch.setattr(experiment, "CACHE_MULTIPLE", 0)
    monkeypatch.setattr(experiment, "CHURN_REQUESTS", 100)
    monkeypatch.setattr(CpuBackend, "read_bandwidth", lambda self: 1e15)


@pytest.mark.usefixtures("small_working_set")
def test_the_experiment_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", *TINY, "--batch", "3", "--context", "50", "--steps", "2", "--json"]
    report = json.loads(output_of(arguments, capsys))
    assert (report["schema"], report["device"], report["gpu"]) == ("kvcupy.simulate/1", "cpu", None)
    assert report["modelled"] is False
    assert report["read_bandwidth_bytes_per_s"] == 1e15
    assert report["working_set_bytes"] >= 1 << 18
    rows = {row["strategy"]: row for row in report["rows"]}
    assert list(rows) == ["contiguous", "contiguous + padding", "paged", "paged + padding"]
    for name, row in rows.items():
        padded = "padding" in name
        assert row["dtype"] == "float16"
        assert row["bytes_per_token"] == 2 * 2 * 2 * (256 if padded else 40)
        assert row["padding_waste"] == (1 - 40 / 256 if padded else 0)
        assert row["share_of_read_bandwidth"] == pytest.approx(row["kv_bandwidth_bytes_per_s"] / 1e15)
        assert row["tokens_per_s"] > 0
        assert row["peak_pages"] > 0
        assert 0 < row["internal_fragmentation"] < 1
    assert rows["contiguous"]["external_fragmentation"] > 0
    assert rows["paged"]["external_fragmentation"] == 0
    # tokens/s and bandwidth are one measurement: bytes read per token, exactly.
    tokens = sum(_lengths(3, 50)) + 3 * 1.5
    for row in rows.values():
        per_token = row["kv_bandwidth_bytes_per_s"] / row["tokens_per_s"]
        assert per_token == pytest.approx(tokens * 2 * 2 * 2 * 20 * 2 / 3)


def _lengths(batch: int, context: int) -> Any:
    rng = np.random.default_rng(0)
    lengths = rng.integers(context // 2, context + 1, batch)
    lengths[rng.integers(batch)] = context
    return lengths


@pytest.mark.usefixtures("small_working_set")
def test_the_experiment_as_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = output_of(["simulate", "--batch", "2", "--context", "40", "--layers", "2"], capsys)
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("Executed on cpu: ")
    assert "paged + padding" in text
    assert "Padding changes nothing" in text
    text = output_of(["simulate", "--batch", "2", "--context", "40", "--head-dim", "125"], capsys)
    assert "Padding costs 2.3% of the memory" in text


@pytest.mark.usefixtures("small_working_set")
def test_more_than_the_read_bandwidth_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuBackend, "read_bandwidth", lambda self: 1.0)
    message = error_of(["simulate", *TINY, "--batch", "1", "--context", "20", "--steps", "1"], capsys)
    assert "times what memory delivered to a plain sum" in message


def test_a_stream_is_modelled_and_repeats_to_the_byte(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "--requests", "60", "--rate", "20", "--memory", "3GiB", "--seed", "5", "--json"]
    first, second = output_of(arguments, capsys), output_of(arguments, capsys)
    assert first == second
    report = json.loads(first)
    assert (report["device"], report["gpu"], report["modelled"]) == (None, "h100-sxm", True)
    assert report["requests_finished"] + report["requests_rejected"] == 60
    assert report["pool"]["total_pages"] == 3 * 2**30 // (524_288 * 16)
    assert set(report["ttft_s"]) == set(report["tpot_s"]) == {"p50", "p90", "p99"}
    assert output_of([*arguments[:-2], "6", "--json"], capsys) != first


def test_executed_beside_modelled(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", *TINY, "--requests", "6", "--rate", "0", "--prompt-tokens", "uniform:5:90"]
    arguments += ["--output-tokens", "uniform:1:9", "--memory", "40KB", "--device", "cpu", "--gpu", "a10"]
    report = json.loads(output_of([*arguments, "--json"], capsys))
    modelled = report["modelled_figures"]
    assert (report["device"], report["gpu"], report["modelled"]) == ("cpu", "a10", False)
    for figure in ("requests_finished", "output_tokens"):
        assert report[figure] == modelled[figure]
    assert report["makespan_s"] != modelled["makespan_s"]
    text = output_of(arguments, capsys)
    assert "measured, cpu" in text
    assert "modelled, a10" in text


def test_execution_follows_the_same_schedule_as_the_model() -> None:
    """All at once, first come first served: pages do not depend on the clock, preemptions included."""
    from kvcupy import KVCache

    stream = synthesize(40, 0, "uniform:1:60", "uniform:1:30", seed=3)
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=8, page_size=4, dtype="float32")
    cache = KVCache(spec, num_pages=60, device="cpu")
    executed = replay(stream, ExecutingMachine(cache, num_q_heads=2))
    model = find_model("llama-3-8b")
    modelled = replay(stream, modelled_machine(model, find_gpu("a10"), spec, 60 * spec.page_bytes))
    assert executed.preemptions == modelled.preemptions > 0
    assert executed.pool.peak_pages == modelled.pool.peak_pages
    assert executed.requests_finished == modelled.requests_finished == 40
    assert cache.free_pages == 60
    cache.check_integrity()


def test_a_recorded_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.0003500,374,44\n"
        "2023-11-16 18:15:46.0014750,396,0\n"
        "2023-11-16 18:15:47.0000100,99999,3\n"
        "2023-11-16 18:15:47.0000200,12,1\n"
    )
    arguments = ["simulate", "--trace", str(trace), "--model", "llama-3-8b", "--memory", "1GiB"]
    report = json.loads(output_of([*arguments, "--json"], capsys))
    assert (report["requests_finished"], report["requests_rejected"]) == (2, 1)
    assert sum(report["requests_skipped"].values()) == 1
    assert report["output_tokens"] == 45
    assert report["rejections"][0]["reason"] == "needs 6251 pages, the pool has 512"
    text = output_of(arguments, capsys)
    assert "1 rows skipped" in text or "1 row skipped" in text
    assert "rejected: needs 6251 pages" in text
    one = json.loads(output_of([*arguments, "--limit", "1", "--json"], capsys))
    assert one["output_tokens"] == 44


@pytest.mark.skipif(not AZURE.exists(), reason="the recorded Azure trace is not here")
def test_all_of_the_azure_trace(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "--trace", str(AZURE), "--model", "llama-3-8b", "--memory", "40GiB", "--gpu", "h100"]
    report = json.loads(output_of([*arguments, "--json"], capsys))
    assert (report["requests_finished"], report["requests_rejected"]) == (19_366, 0)
    assert report["output_tokens"] == 4_088_665
    assert report["pool"]["total_pages"] == 20_480
    assert 0 < report["pool"]["mean_pages"] < report["pool"]["peak_pages"] <= 20_480


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate", "--nonsense"], "No such option: --nonsense"),
        (["nonsense"], "No such command 'nonsense'"),
        (["simulate", "--batch", "0"], "'--batch'"),
        (["simulate", "--batch", "x"], "'--batch'"),
        (["simulate", "--head-dim", "513"], "'--head-dim'"),
        (["simulate", "--dtype", "fp16"], "dtype must be one of float32, float16"),
        (["simulate", "--layout", "x"], "layout must be one of interleaved"),
        (["simulate", "--row-align", "3"], "row_align must be one of 1, 16"),
        (["simulate", "--model", "lama-3-8b"], "llama-3-8b"),
        (["simulate", "--model", "deepseek-v3"], "not supported"),
        (["simulate", "--q-heads", "5", "--kv-heads", "2"], "multiple of --kv-heads, got 5 and 2"),
        (["simulate", "--gpu", "h100"], "--gpu models a stream of requests"),
        (["simulate", "--limit", "3"], "--limit cuts a stream"),
        (["simulate", "--device", "gpu"], "device must be one of auto, cpu, cuda, ptx, got 'gpu'"),
        (["simulate", "--dtype", "int8"], "must be one of float32, float16, bfloat16 to store, got int8"),
        (["simulate", "--requests", "3", "--gpu", "h1000"], "h100"),
        (["simulate", "--requests", "3", "--memory", "lots"], "memory must be bytes or a size such as 8GiB"),
        (["simulate", "--requests", "3", "--prompt-tokens", "normal:3"], "prompt_tokens must be"),
        (["simulate", "--requests", "3", "--trace", "x.csv"], "--trace or --requests, not both"),
        (["simulate", "--trace", "no/such/file.csv"], "no/such/file.csv"),
        (["simulate", "--trace", "."], "."),
        (["simulate", "--requests", "1", "--device", "cpu", "--memory", "1KB"], "at least one page"),
        (["simulate", "--requests", "1", "--device", "cpu", "--memory", "1000000TiB"], "no room"),
    ],
)
def test_errors_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in error_of(arguments, capsys)


def test_bad_lines_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "bad.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n0,1.5,1\n")
    assert "bad.csv:3: " in error_of(["simulate", "--trace", str(trace)], capsys)


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(output_of(["info", "--json"], capsys))
    assert report["schema"] == "kvcupy.info/1"
    assert report["devices"]["cpu"]["available"] is True
    assert report["auto"]["device"] == "cpu"
    assert report["versions"].keys() >= {"kvcupy", "python", "numpy", "numba"}
    text = output_of(["info"], capsys)
    assert "auto takes cpu" in text


def test_bug_B34_no_gpu_no_trouble() -> None:
    """With every GPU hidden: import, help, planning and a run on the CPU, in a fresh process, without a warning."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "error"}
    commands: list[list[str]] = [
        ["-c", "import kvcupy"],
        ["-c", "from kvcupy.cli import main; main()", "--help"],
        ["-c", "from kvcupy.cli import main; main()", "simulate", "--requests", "5"],
        ["-c", "from kvcupy.cli import main; main()", "simulate", *TINY, "--requests", "2", "--device", "cpu"],
    ]
    for command in commands:
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), command

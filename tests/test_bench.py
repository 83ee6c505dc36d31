"""What the benchmark counts and measures, against counts made by hand, byte by byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvcupy import KVCupyError, KVPool, KVSpec, append, decode_attention, measure
from kvcupy.backends.base import Cost
from kvcupy.backends.cpu import CpuBackend
from kvcupy.bench import Axes, Footprint, bench, default_shapes, footprint
from kvcupy.spec import LAYOUTS, ROW_ALIGNS

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "on_gpu.sh"


def spec_of(head_dim: int, **changes: object) -> KVSpec:
    return KVSpec(num_layers=1, num_kv_heads=2, head_dim=head_dim, **changes)  # type: ignore[arg-type]


# Where elements lie


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_footprint_byte_by_byte(layout: str) -> None:
    table, lengths = np.array([[5, 0, -1], [3, 1, 4]]), [7, 10]
    for head_dim in (1, 5, 15, 16, 40, 64, 65):
        for row_align in ROW_ALIGNS:
            spec = spec_of(head_dim, page_size=4, layout=layout, row_align=row_align)
            owners: tuple[set[int], set[int]] = set(), set()
            for row, length in enumerate(lengths):
                for token in range(length):
                    for head in range(2):
                        for kv in range(2):
                            start = spec.strides.offset(int(table[row, token // 4]), head, token % 4, kv)
                            owners[kv].update(range(start, start + 2 * head_dim))
            k_lines, v_lines = ({byte // 128 for byte in own} for own in owners)
            assert footprint(spec, table, lengths) == Footprint(
                sectors=len({byte // 32 for byte in owners[0] | owners[1]}),
                lines=len(k_lines | v_lines),
                lines_with_k_and_v=len(k_lines & v_lines),
            )


def test_whole_lines_hold_k_or_v() -> None:
    table = np.arange(4).reshape(2, 2)
    for layout in LAYOUTS:
        lies_in = footprint(spec_of(128, layout=layout), table, [32, 20])
        assert lies_in == Footprint(sectors=52 * 2 * 2 * 8, lines=52 * 2 * 2 * 2, lines_with_k_and_v=0)
    # Half a line each: interleaved, every line is a token's K and its V.
    assert footprint(spec_of(32), table, [32, 20]) == Footprint(52 * 2 * 2 * 2, 52 * 2, 52 * 2)
    assert footprint(spec_of(32, layout="hnd"), table, [32, 20]) == Footprint(52 * 2 * 2 * 2, 52 * 2, 0)


# What kernels move


@pytest.mark.usefixtures("ptx")
def test_cost_of_known_traffic() -> None:
    pool = KVPool(spec_of(64), 2, device="ptx")
    backend = pool.backend
    k, v = backend.upload(np.ones((2, 5, 2, 64), np.float16))
    slots = backend.upload(np.arange(5))
    q = backend.upload(np.ones((1, 2, 64), np.float16))
    calls = (
        partial(append, k, v, pool[0], slots, check=False),
        partial(decode_attention, q, pool[0], [[0]], [5]),
    )
    stored, decoded = backend.measure(calls)
    rows = 5 * 2 * 2 * 128 // 32
    assert stored.pool_sectors == decoded.pool_sectors == rows
    # K and V are read once, and each of the 5 warps or more reads its slot.
    assert stored.sectors is not None and stored.sectors >= 2 * rows + 5
    assert decoded.seconds is None
    total = Cost.total([stored, decoded])
    assert total.pool_sectors == 2 * rows
    assert total.seconds is None


@pytest.mark.usefixtures("ptx")
def test_rows_of_whole_sectors_move_nothing_else() -> None:
    axes = Axes(
        batch=(2,),
        context=(37,),
        heads=((4, 2),),
        dtype=("float16", "float32"),
        layout=tuple(LAYOUTS),
        row_align=(1,),
    )
    rows = bench(axes.shapes(), "ptx").rows
    assert len(rows) == 8
    for row in rows:
        assert row.kv_bytes == 2 * 2 * 37 * 2 * 128 * (2 if row.dtype == "float16" else 4)
        assert row.kv_sectors == row.kv_footprint_sectors == row.kv_bytes // 32
        assert row.kv_useful_share == row.kv_sectors_over_minimum == 1
        assert row.sectors is not None and row.sectors > row.kv_sectors
        assert row.seconds is None


@pytest.mark.usefixtures("ptx")
def test_padding_costs_what_it_adds() -> None:
    shapes = Axes(
        batch=(1,), context=(20,), heads=((2, 2),), head_dim=(120, 125), row_align=(1, 16, "128-elements")
    ).shapes()
    rows = {(row.head_dim, row.row_align): row for row in bench(shapes, "ptx").rows}
    # 125 elements are loaded in pieces of 2 bytes; padded to 256 bytes, a row is 8 sectors for 7.8.
    unpadded = rows[125, 1].kv_sectors_over_minimum
    assert unpadded is not None and unpadded > 1.3
    assert rows[125, 16].kv_sectors_over_minimum == pytest.approx(256 / 250)
    # 240 bytes are seven and a half sectors; in 256 they take eight.
    assert rows[120, 1].kv_footprint_sectors == 20 * 2 * 2 * 240 // 32
    assert rows[120, "128-elements"].kv_footprint_sectors == 20 * 2 * 2 * 8
    # Padding to 16 bytes leaves a row of 240 bytes as it is, and makes 256 of 250: one launch serves both.
    for head_dim, twins in ((120, (1, 16)), (125, (16, "128-elements"))):
        one, other = (rows[head_dim, align] for align in twins)
        assert one.row_bytes == other.row_bytes
        assert one.kv_sectors == other.kv_sectors


def test_the_default_table_has_every_combination() -> None:
    shapes = default_shapes("ptx")
    assert len(shapes) == len(set(shapes)) == 4 * 4 * 3 * 7
    for device in ("cpu", "cuda"):
        assert len({shape.kv_bytes for shape in default_shapes(device)}) <= 3  # the base, float32, head_dim 64


# Seconds


def test_no_share_above_the_read_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MIN_WORKING_SET_BYTES", 1)
    monkeypatch.setattr(measure, "CACHE_MULTIPLE", 0)
    monkeypatch.setattr(CpuBackend, "read_bandwidth", lambda self: 1.0)
    shapes = Axes(batch=(1,), context=(8,), heads=((2, 1),), head_dim=(32,), dtype=("float32",)).shapes()
    with pytest.raises(KVCupyError, match="times what memory delivered to a plain sum"):
        bench(shapes, "cpu", rounds=1)


def test_a_working_set_is_larger_than_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CpuBackend()
    monkeypatch.setattr(backend, "last_level_cache_bytes", lambda: 1 << 20)
    assert measure.layer_pools(backend, 100 << 20) == 11
    assert measure.layer_pools(backend, 2 << 30) == 2
    monkeypatch.setattr(backend, "last_level_cache_bytes", lambda: 1 << 28)
    assert measure.layer_pools(backend, 1 << 28) == 8


# The script for a GPU


@pytest.mark.skipif(sys.platform == "win32", reason="needs bash")
def test_a_failing_step_stops_no_other(tmp_path: Path) -> None:
    """With a stand-in for Python that fails in `verify` and does nothing else but what the script itself needs."""
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        f'case "$*" in "- "*) exec {sys.executable} "$@" ;;\n'
        "*verify*) echo broken >&2; exit 3 ;; *pytest*) echo 5 passed ;;\n"
        """*) echo '{"device": "cuda"}' ;; esac\n"""
    )
    python.chmod(0o755)
    result = tmp_path / "deep" / "result.json"
    environment = {**os.environ, "PYTHON": str(python), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([str(SCRIPT), str(result)], env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    report = json.loads(result.read_text())
    assert report["passed"] is False
    codes = {name: step["exit_code"] for name, step in report["steps"].items() if "exit_code" in step}
    assert codes == {"info": 0, "pytest": 0, "verify": 3, "simulate": 0, "bench": 0}
    assert report["steps"]["verify"]["errors"] == "broken\n"
    assert report["steps"]["bench"]["output"] == {"device": "cuda"}
    assert report["steps"]["pytest"]["output"] == "5 passed\n"
    assert set(report["steps"]) - set(codes) == {"memcheck", "racecheck"}

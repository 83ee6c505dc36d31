"""KVSpec against a brute-force enumeration of every byte of small pools, and against published figures."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcupy import KVSpec
from kvcupy.spec import CODECS, LAYOUTS, ROW_ALIGNS, parse_bytes

GIB = 1 << 30


def llama3_8b(**changes: Any) -> KVSpec:
    return replace(KVSpec(num_layers=32, num_kv_heads=8, head_dim=128), **changes)


@pytest.mark.parametrize(
    ("dtype", "bytes_per_token", "pages"),
    [("float16", 131_072, 512), ("bfloat16", 131_072, 512), ("float32", 262_144, 256), ("int8", 67_584, 992)],
)
def test_bug_B40_capacity_of_llama3_8b(dtype: str, bytes_per_token: int, pages: int) -> None:
    spec = llama3_8b(dtype=dtype)
    assert spec.bytes_per_token == bytes_per_token
    assert spec.page_bytes == 16 * bytes_per_token
    assert spec.pages_in(GIB) == pages
    assert spec.pages_in(GIB) * spec.page_bytes <= GIB < (spec.pages_in(GIB) + 1) * spec.page_bytes


def test_int8_codecs_count_their_scales() -> None:
    float16 = llama3_8b().bytes_per_token
    assert llama3_8b(dtype="int8").bytes_per_token / float16 == 0.515625
    assert llama3_8b(dtype="int8_minmax").bytes_per_token / float16 == 0.53125


def test_padding_of_head_dim_64() -> None:
    spec = llama3_8b(head_dim=64)
    assert replace(spec, row_align="128-elements").padding_waste == 0.5
    assert replace(spec, row_align=128).padding_waste == 0.0
    assert replace(spec, row_align="128-elements").bytes_per_token == 2 * spec.bytes_per_token


@pytest.mark.parametrize(
    ("head_dim", "row_align", "row_bytes"),
    [(125, 1, 250), (125, 16, 256), (120, 16, 240), (120, 32, 256), (80, 64, 192), (80, 128, 256), (1, 16, 16)],
)
def test_rows_are_padded_to_row_align(head_dim: int, row_align: int, row_bytes: int) -> None:
    spec = llama3_8b(head_dim=head_dim, row_align=row_align)
    assert spec.row_bytes == row_bytes
    assert spec.padding_bytes_per_row == row_bytes - 2 * head_dim
    assert spec.padding_waste == pytest.approx(1 - 2 * head_dim / row_bytes)


@given(
    head_dim=st.integers(1, 40),
    heads=st.integers(1, 4),
    page_size=st.integers(1, 9),
    pages=st.integers(1, 3),
    dtype=st.sampled_from(sorted(CODECS)),
    layout=st.sampled_from(sorted(LAYOUTS)),
    row_align=st.sampled_from(ROW_ALIGNS),
)
def test_rows_fill_a_page_exactly_once(
    head_dim: int, heads: int, page_size: int, pages: int, dtype: str, layout: str, row_align: int | str
) -> None:
    spec = KVSpec(
        num_layers=3,
        num_kv_heads=heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        layout=layout,
        row_align=row_align,
    )
    strides = spec.strides
    rows = sorted(
        strides.offset(page, head, token, kv)
        for page, head, token, kv in product(range(pages), range(heads), range(page_size), range(2))
    )
    assert rows == list(range(0, pages * strides.page, spec.row_bytes))
    assert strides.page == spec.data_bytes_per_layer_page
    assert spec.row_bytes % spec.row_align_bytes == 0
    assert 0 <= spec.padding_bytes_per_row < spec.row_align_bytes
    scales = CODECS[dtype].scale_bytes * heads * page_size
    assert spec.page_bytes == 3 * (strides.page + scales)
    assert spec.bytes_per_token * page_size == spec.page_bytes


@pytest.mark.parametrize(
    ("layout", "order"),
    [
        ("interleaved", ("head", "token", "kv")),
        ("token_major", ("token", "head", "kv")),
        ("hnd", ("kv", "head", "token")),
        ("nhd", ("kv", "token", "head")),
    ],
)
def test_layouts_order_their_axes(layout: str, order: tuple[str, ...]) -> None:
    strides = llama3_8b(layout=layout).strides
    steps = [getattr(strides, axis) for axis in order]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] == 256


def test_bug_B01_offsets_beyond_32_bits() -> None:
    spec = KVSpec(num_layers=1, num_kv_heads=8, head_dim=128, page_size=16, dtype="int8", layout="nhd")
    # K alone, as in the report: one page of K is 16,384 elements of one byte.
    assert spec.strides.offset(131_079, 0, 0, 0) // 2 == 2_147_598_336


def test_contiguous_is_one_page_per_sequence() -> None:
    spec = llama3_8b().contiguous(4096)
    assert spec.page_size == 4096
    assert spec.bytes_per_token == 131_072
    assert (spec.pages_for(0), spec.pages_for(1), spec.pages_for(4096)) == (0, 1, 1)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"head_dim": 0}, ValueError, "head_dim must be from 1 to 512, got 0"),
        ({"head_dim": 513}, ValueError, "head_dim must be from 1 to 512, got 513"),
        ({"head_dim": 64.0}, TypeError, "head_dim must be a whole number, got 64.0"),
        ({"num_layers": True}, TypeError, "num_layers must be a whole number, got True"),
        ({"num_kv_heads": -1}, ValueError, "num_kv_heads must be at least 1, got -1"),
        ({"page_size": 0}, ValueError, "page_size"),
        ({"dtype": "fp16"}, ValueError, "dtype must be one of float32, float16"),
        ({"dtype": ["float16"]}, ValueError, "dtype must be one of"),
        ({"layout": "nhdx"}, ValueError, "layout must be one of interleaved"),
        ({"row_align": 8}, ValueError, "row_align must be one of 1, 16, 32, 64, 128, 128-elements, got 8"),
        ({"row_align": True}, ValueError, "row_align"),
        ({"row_align": 16.0}, ValueError, "row_align"),
    ],
)
def test_bad_specs_name_the_argument(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        llama3_8b(**changes)


def test_spec_is_frozen_and_hashable() -> None:
    spec = llama3_8b()
    with pytest.raises(FrozenInstanceError):
        spec.head_dim = 64  # type: ignore[misc]
    assert {spec: 1}[llama3_8b()] == 1


def test_pages_in_refuses_nonsense() -> None:
    spec = llama3_8b()
    assert (spec.pages_in(0), spec.pages_in(spec.page_bytes - 1), spec.pages_in(spec.page_bytes)) == (0, 0, 1)
    with pytest.raises(ValueError, match="budget_bytes must be at least 0, got -1"):
        spec.pages_in(-1)
    with pytest.raises(TypeError, match="budget_bytes"):
        spec.pages_in(1e9)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "number"),
    [(12, 12), ("12", 12), ("8GiB", 8 * GIB), ("1.5 gib", 3 * GIB // 2), ("40GB", 40 * 10**9), ("0.1kB", 100)],
)
def test_parse_bytes(text: int | str, number: int) -> None:
    assert parse_bytes(text) == number


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e3", "8 GiBs", "1.2.3", "٣GiB", "nan"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="memory must be bytes or a size such as 8GiB"):
        parse_bytes(text)

"""CUDA sources as strings, one per variant: generated constants, then the shared headers, then one kernel file.

Everything is pasted into one string, so that a cache keyed by the source is right, and each part keeps its file name
and line numbers. Nothing is compiled here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import ClassVar

__all__ = [
    "AppendVariant",
    "CopyPagesVariant",
    "DecodeVariant",
    "GatherVariant",
    "MergeStatesVariant",
    "Variant",
]

_FOLDER = Path(__file__).parents[1] / "cuda"
_TYPES = {"float32": "float", "float16": "struct float16", "bfloat16": "struct bfloat16"}


@cache
def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Variant:
    """The constants of one compiled source: a field becomes a constant of its name in capitals, text a type."""

    files: ClassVar[tuple[str, ...]]

    def source(self) -> str:
        """The CUDA C++ of this variant."""
        lines = []
        for field in fields(self):
            value = getattr(self, field.name)
            name = field.name.upper()
            text = isinstance(value, str)
            lines.append(f"typedef {_TYPES[value]} {name};" if text else f"constexpr int {name} = {value};")
        parts = [f'#line 1 "{name}"\n{_read(name)}' for name in ("common.cuh", "layout.cuh", *self.files)]
        return "\n".join(['#line 1 "constants"', *lines, *parts])


@dataclass(frozen=True)
class AppendVariant(Variant):
    files = ("append.cu",)

    page_size: int
    row_bytes: int
    padding_bytes: int
    copy_bytes: int


@dataclass(frozen=True)
class GatherVariant(Variant):
    files = ("gather.cu",)

    page_size: int
    row_bytes: int
    copy_bytes: int


@dataclass(frozen=True)
class CopyPagesVariant(Variant):
    files = ("copy_pages.cu",)

    copy_bytes: int


@dataclass(frozen=True)
class MergeStatesVariant(Variant):
    files = ("merge_states.cu",)

    t: str


@dataclass(frozen=True)
class DecodeVariant(Variant):
    """decode_attention and merge_partials. What each constant means stands in decode_attention.cu."""

    files = ("schedule.cuh", "decode_attention.cu")

    kv: str
    q: str
    head_dim: int
    page_size: int
    rows: int
    threads: int
    chunk: int
    lanes: int
    load_bytes: int
    q_load_bytes: int

"""The shape of a KV cache in bytes: rows, padding, strides, pages, scale planes, capacity.

Pure integer arithmetic, exact, without NumPy: a planner, an allocator and a kernel get the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import index
from types import MappingProxyType


@dataclass(frozen=True)
class Codec:
    """How one value of K or V is stored.

    itemsize: bytes of one stored element.
    scale_bytes: bytes of scales per (token, head), K and V together.
    """

    itemsize: int
    scale_bytes: int = 0


CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        "float32": Codec(4),
        "float16": Codec(2),
        "bfloat16": Codec(2),
        "int8": Codec(1, scale_bytes=2 * 4),  # one FP32 scale for K, one for V
        "int8_minmax": Codec(1, scale_bytes=4 * 4),  # FP32 scale and midpoint for K and for V
    }
)

LAYOUTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "interleaved": ("head", "token", "kv"),
        "token_major": ("token", "head", "kv"),
        "hnd": ("kv", "head", "token"),
        "nhd": ("kv", "token", "head"),
    }
)
"""Axes inside a page from slowest to fastest, each followed by the row of head_dim elements."""

ROW_ALIGNS: tuple[int | str, ...] = (1, 16, 32, 64, 128, "128-elements")


def whole_number(name: str, value: object, minimum: int, maximum: int | None = None) -> int:
    """`value` as an int, or a TypeError or ValueError that names the argument."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {value!r}") from None
    if number < minimum or (maximum is not None and number > maximum):
        expected = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise ValueError(f"{name} must be {expected}, got {number}")
    return number


@dataclass(frozen=True)
class Strides:
    """Byte steps from one (page, head, token, K|V) to the next inside one layer."""

    page: int
    head: int
    token: int
    kv: int

    def __post_init__(self) -> None:
        for name in ("page", "head", "token", "kv"):
            object.__setattr__(self, name, whole_number(f"strides.{name}", getattr(self, name), 0))

    def offset(self, page: int, head: int, token: int, kv: int) -> int:
        """Bytes from the start of the layer to the row of (page, head, token, kv); kv is 0 for K, 1 for V."""
        return page * self.page + head * self.head + token * self.token + kv * self.kv


@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """One KV cache: identical layers of num_kv_heads heads, cut into pages of page_size tokens.

    A row is one token's K or V of one head: head_dim elements, padded to row_align.

    num_layers: layers that keep K and V.
    num_kv_heads: heads of K and V in a layer.
    head_dim: elements of a row, 1 to 512.
    page_size: token slots in a page. A *contiguous* cache has one page per sequence: see `contiguous`.
    dtype: a name in `CODECS`: how elements are stored.
    layout: a name in `LAYOUTS`: the order of heads, tokens, K and V inside a page.
    row_align: rows are padded to a multiple of this many bytes (1, 16, 32, 64 or 128), or "128-elements":
        head_dim is padded to a multiple of 128 elements.

    Llama-3-8B in FP16 with pages of 16: 131,072 bytes a token, 512 pages in 1 GiB.

    >>> spec = KVSpec(num_layers=32, num_kv_heads=8, head_dim=128)
    >>> spec.bytes_per_token, spec.page_bytes, spec.pages_in(1 << 30)
    (131072, 2097152, 512)
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 16
    dtype: str = "float16"
    layout: str = "interleaved"
    row_align: int | str = 16

    def __post_init__(self) -> None:
        for name, maximum in (("num_layers", None), ("num_kv_heads", None), ("head_dim", 512)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), 1, maximum))
        # One page holds at most int32 token slots: the kernels count tokens in 32 bits.
        object.__setattr__(self, "page_size", whole_number("page_size", self.page_size, 1, 2**31 - 1))
        for name, known in (("dtype", CODECS), ("layout", LAYOUTS)):
            if not isinstance(getattr(self, name), str) or getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if type(self.row_align) not in (int, str) or self.row_align not in ROW_ALIGNS:
            choices = ", ".join(map(str, ROW_ALIGNS))
            raise ValueError(f"row_align must be one of {choices}, got {self.row_align!r}")

    def contiguous(self, max_tokens: int) -> KVSpec:
        """The same cache with one page of max_tokens slots for each sequence."""
        return replace(self, page_size=whole_number("max_tokens", max_tokens, 1))

    # Rows

    @property
    def itemsize(self) -> int:
        """Bytes of one stored element."""
        return CODECS[self.dtype].itemsize

    @property
    def row_align_bytes(self) -> int:
        """row_align in bytes."""
        return 128 * self.itemsize if self.row_align == "128-elements" else int(self.row_align)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, padding included."""
        align = self.row_align_bytes
        return -(-self.head_dim * self.itemsize // align) * align

    @property
    def padding_bytes_per_row(self) -> int:
        """Bytes of a row that hold no element."""
        return self.row_bytes - self.head_dim * self.itemsize

    @property
    def padding_waste(self) -> float:
        """Share of a row's bytes that is padding: head_dim 64 padded to 128 elements wastes 0.5."""
        return self.padding_bytes_per_row / self.row_bytes

    # Pages and layers

    @property
    def strides(self) -> Strides:
        """Byte strides inside one layer of a pool that kvcupy allocates."""
        sizes = {"head": self.num_kv_heads, "token": self.page_size, "kv": 2}
        step = self.row_bytes
        steps = {}
        for axis in reversed(LAYOUTS[self.layout]):
            steps[axis] = step
            step *= sizes[axis]
        return Strides(page=step, **steps)

    @property
    def data_bytes_per_layer_page(self) -> int:
        """Bytes of one page's K and V in one layer, padding included, scales not."""
        return 2 * self.num_kv_heads * self.page_size * self.row_bytes

    @property
    def scale_bytes_per_layer_page(self) -> int:
        """Bytes of one page's scales in one layer; 0 for the float codecs."""
        return self.num_kv_heads * self.page_size * CODECS[self.dtype].scale_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: all layers, K and V, padding and scales."""
        return self.num_layers * (self.data_bytes_per_layer_page + self.scale_bytes_per_layer_page)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token slot: all layers, K and V, padding and scales."""
        return self.page_bytes // self.page_size

    # Capacity

    def pages_for(self, tokens: int) -> int:
        """Pages that a sequence of this many tokens occupies."""
        return -(-whole_number("tokens", tokens, 0) // self.page_size)

    def pages_in(self, budget_bytes: int) -> int:
        """Pages that fit in a memory budget; they never exceed it, to the byte."""
        return whole_number("budget_bytes", budget_bytes, 0) // self.page_bytes

    def pool_pages(self, memory: int | str) -> int:
        """Pages of a pool made from a memory budget: bytes, or text such as "8GiB". A ValueError if none fits."""
        pages = self.pages_in(parse_bytes(memory))
        if pages == 0:
            raise ValueError(f"memory must hold at least one page of {self.page_bytes} bytes, got {memory!r}")
        return pages


_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTP", 1)}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", 1)}
_BY_LOWER = {unit.lower(): factor for unit, factor in _UNITS.items()}


def parse_bytes(text: int | str) -> int:
    """A number of bytes from an int or from text such as "8GiB", "512 MiB" or "40GB" (1 GB = 10^9 bytes)."""
    if not isinstance(text, str):
        return whole_number("memory", text, 0)
    stripped = text.strip()
    digits = stripped.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    factor = _BY_LOWER.get(stripped[len(digits) :].strip().lower())
    whole, _, fraction = digits.partition(".")
    if factor is None or not (whole + fraction).isascii() or not (whole + fraction).isdigit():
        raise ValueError(f"memory must be bytes or a size such as 8GiB or 40GB, got {text!r}")
    # Integers throughout: 0.1 has no exact float.
    scale: int = 10 ** len(fraction)
    return int(whole + fraction) * factor // scale

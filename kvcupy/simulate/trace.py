"""Workloads as columns of requests, and the readers of recorded ones.

A trace file is CSV with a header; the header chooses the reader. To add a format, write one function that
turns the fields of a row into (arrival, prompt tokens, output tokens) and add it to `FORMATS`.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcupy.spec import whole_number

MAX_TOKENS = 2**31 - 1
"""The longest prompt or output: lengths are 32-bit wherever they reach a kernel."""
MAX_ARRIVAL_S = 1e10
"""Beyond this, seconds are surely milliseconds, and a float no longer tells a decode step from nothing."""
_MAX_LINE_BYTES = 1 << 16


class Request(NamedTuple):
    """One request: when it arrives, and how many tokens it brings and wants."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in order of arrival, as columns of equal length. Those that arrive together keep their order.

    name: where they come from, for reports.
    arrival_s: float64, seconds, 0 or more.
    prompt_tokens, output_tokens: int64, 1 or more.
    skipped: rows of the source that are no requests: reason -> how many.

    Unsorted arrivals are sorted (stably). Raises ValueError for columns that are not as said.
    """

    name: str
    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    skipped: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        arrival_s = np.asarray(self.arrival_s, dtype=np.float64)
        if not np.all((arrival_s >= 0) & (arrival_s <= MAX_ARRIVAL_S)):
            came = f"{arrival_s.min()} to {arrival_s.max()}"
            raise ValueError(f"arrival_s must be from 0 to {MAX_ARRIVAL_S:.0e} seconds, got {came}")
        order = np.argsort(arrival_s, kind="stable")
        columns = {"arrival_s": arrival_s}
        for name in ("prompt_tokens", "output_tokens"):
            columns[name] = column = np.asarray(getattr(self, name))
            if column.shape != arrival_s.shape:
                raise ValueError(f"{name} must be as long as arrival_s, {arrival_s.shape}, got {column.shape}")
            if column.size and column.dtype.kind not in "iu":
                raise ValueError(f"{name} must be whole numbers, got {column.dtype}")
            if not np.all((column >= 1) & (column <= MAX_TOKENS)):
                came = f"{column.min()} to {column.max()}"
                raise ValueError(f"{name} must be from 1 to {MAX_TOKENS}, got {came}")
        for name, column in columns.items():
            ordered = column.astype(np.float64 if name == "arrival_s" else np.int64)[order]
            ordered.setflags(write=False)
            object.__setattr__(self, name, ordered)

    @classmethod
    def of(
        cls,
        requests: Iterable[tuple[float, int, int]],
        name: str = "requests",
        skipped: Mapping[str, int] = MappingProxyType({}),
    ) -> Trace:
        """A trace of (arrival_s, prompt_tokens, output_tokens) rows."""
        columns = list(zip(*requests, strict=True)) or [()] * 3
        arrivals, prompts, outputs = map(np.array, columns)
        return cls(name, arrivals, prompts, outputs, dict(skipped))

    def __len__(self) -> int:
        return len(self.arrival_s)

    def __iter__(self) -> Iterator[Request]:
        columns = (self.arrival_s.tolist(), self.prompt_tokens.tolist(), self.output_tokens.tolist())
        return map(Request, *columns)


class Format(NamedTuple):
    """One kind of trace file.

    columns: the header's names, in any order and case, all required.
    parse: (arrival, prompt tokens, output tokens) from the fields of a row, ordered as columns + optional.
    optional: columns that may be absent; their fields then read "0".
    ticks_per_s: the arrival that `parse` returns counts in this fraction of a second.
    from_first: arrivals are counted from the earliest row.
    """

    columns: tuple[str, ...]
    parse: Callable[[Sequence[str]], tuple[float, int, int]]
    optional: tuple[str, ...] = ()
    ticks_per_s: int = 1
    from_first: bool = False


def read_trace(path: str | Path, limit: int | None = None) -> Trace:
    """The requests of a trace file: all of them, or the first `limit` that can be run.

    Rows of 0 prompt or 0 output tokens are skipped and counted in `Trace.skipped`. A row that cannot be read
    is a ValueError with the file's name and the line; a missing file is an OSError.
    """
    path = Path(path)
    if limit is not None:
        limit = whole_number("limit", limit, 1)
    if path.is_dir():
        raise ValueError(f"{path}: expected a trace file, got a directory")
    with path.open("rb") as file:
        return _read(file, path.name, limit)


def _read(file: BinaryIO, name: str, limit: int | None) -> Trace:
    rows = _rows(file, name)
    _, header = next(rows, (0, None))
    if header is None:
        raise ValueError(f"{name}: expected a trace, got an empty file")
    form, positions = _format_of(header, name)
    skipped: Counter[str] = Counter()
    first: float | None = None

    def requests() -> Iterator[tuple[float, int, int]]:
        nonlocal first
        for line, row in rows:
            try:
                if len(row) != len(header):
                    raise ValueError(f"expected {len(header)} fields ({','.join(header)}), got {len(row)}")
                request = form.parse([row[at] if at is not None else "0" for at in positions])
            except ValueError as error:
                raise ValueError(f"{name}:{line}: {error}") from None
            arrival, prompt_tokens, output_tokens = request
            if first is None or arrival < first:
                first = arrival
            if not prompt_tokens:
                skipped["0 prompt tokens"] += 1
            elif not output_tokens:
                skipped["0 output tokens"] += 1
            else:
                yield request

    kept = list(islice(requests(), limit))
    if first is None:
        raise ValueError(f"{name}: expected requests below the header, got none")
    start = first if form.from_first else 0
    try:
        requests_s = (((time - start) / form.ticks_per_s, prompt, output) for time, prompt, output in kept)
        return Trace.of(requests_s, name, skipped)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _rows(file: BinaryIO, name: str) -> Iterator[tuple[int, list[str]]]:
    """(line number, fields) of every line that is not blank."""
    reader = csv.reader(_lines(file, name), skipinitialspace=True, strict=True)
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise ValueError(f"{name}:{reader.line_num}: expected comma-separated values: {error}") from None
        if row and (len(row) > 1 or row[0].strip()):
            yield reader.line_num, row


def _lines(file: BinaryIO, name: str) -> Iterator[str]:
    line = 0
    while raw := file.readline(_MAX_LINE_BYTES):
        line += 1
        if line == 1:
            if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise ValueError(f"{name}:1: expected UTF-8 text, got UTF-16")
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if len(raw) == _MAX_LINE_BYTES:
            raise ValueError(f"{name}:{line}: expected a line of text, got more than {_MAX_LINE_BYTES} bytes")
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{name}:{line}: expected UTF-8 text, got other bytes") from None
        if "\0" in text:
            raise ValueError(f"{name}:{line}: expected text, got a NUL byte")
        yield text


def _format_of(header: Sequence[str], name: str) -> tuple[Format, list[int | None]]:
    """The format whose columns these are, and where each of its columns stands."""
    names = [column.strip().lower() for column in header]
    for form in FORMATS:
        required = [column.lower() for column in form.columns]
        known = required + [column.lower() for column in form.optional]
        if len(set(names)) == len(names) and set(required) <= set(names) <= set(known):
            return form, [names.index(column) if column in names else None for column in known]
    accepted = "; ".join(",".join([*form.columns, *(f"[{column}]" for column in form.optional)]) for form in FORMATS)
    came = ",".join(header)
    raise ValueError(f"{name}:1: expected a header of columns {accepted}; got {came[:120]!r}")


# Fields


def _tokens(name: str, text: str) -> int:
    text = text.strip()
    if text.isascii() and text.isdigit() and len(text) <= 10 and (tokens := int(text)) <= MAX_TOKENS:
        return tokens
    raise ValueError(f"{name} must be a whole number from 0 to {MAX_TOKENS}, got {text[:40]!r}")


def _seconds(name: str, text: str) -> float:
    try:
        seconds = math.nan if "_" in text else float(text)
    except ValueError:
        seconds = math.nan
    if 0 <= seconds <= MAX_ARRIVAL_S:
        return seconds
    raise ValueError(f"{name} must be seconds from 0 to {MAX_ARRIVAL_S:.0e}, got {text[:40]!r}")


_TIMESTAMP = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T]([01]\d|2[0-3]):([0-5]\d):([0-5]\d)(?:\.(\d{1,9}))?"
    r"(?:Z|([+-])([01]\d|2[0-3]):([0-5]\d))?",
    re.ASCII,
)


@lru_cache(maxsize=1024)
def _day(text: str) -> int:
    return date.fromisoformat(text).toordinal()


def _nanoseconds(name: str, text: str) -> int:
    """A time as whole nanoseconds: a float of it keeps only half a microsecond, and bursts would merge.

    A time without an offset is UTC.
    """
    match = _TIMESTAMP.fullmatch(text.strip())
    if match:
        day, hour, minute, second, fraction, sign, offset_hour, offset_minute = match.groups()
        try:
            minutes = (_day(day) * 24 + int(hour)) * 60 + int(minute)
        except ValueError:  # the 30th of February
            pass
        else:
            if sign:
                offset = int(offset_hour) * 60 + int(offset_minute)
                minutes += offset if sign == "-" else -offset
            return (minutes * 60 + int(second)) * 10**9 + int((fraction or "0").ljust(9, "0"))
    raise ValueError(f"{name} must be a time such as 2023-11-16 18:15:46.6805900, got {text[:40]!r}")


# Formats


def _azure(row: Sequence[str]) -> tuple[float, int, int]:
    """Azure/AzurePublicDataset, AzureLLMInferenceTrace."""
    time, prompt, output = row
    return (
        _nanoseconds("TIMESTAMP", time),
        _tokens("ContextTokens", prompt),
        _tokens("GeneratedTokens", output),
    )


def _plain(row: Sequence[str]) -> tuple[float, int, int]:
    prompt, output, arrival = row
    return _seconds("arrival_s", arrival), _tokens("prompt_tokens", prompt), _tokens("output_tokens", output)


FORMATS: tuple[Format, ...] = (
    Format(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure, ticks_per_s=10**9, from_first=True),
    Format(("prompt_tokens", "output_tokens"), _plain, optional=("arrival_s",)),
)

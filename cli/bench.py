"""`kvcupy bench`: what decode and append cost here, in seconds, or on `ptx` in sectors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from kvcupy.backends import DEVICES, get_backend
from kvcupy.bench import SECTOR_BYTES, BenchResult, Row, default_axes, default_shapes
from kvcupy.cli import report
from kvcupy.cli.simulate import parse_row_align
from kvcupy.spec import CODECS, LAYOUTS, ROW_ALIGNS


def bench(
    device: Annotated[str, typer.Option("--device", help=f"What executes: {', '.join(DEVICES)}.")] = "auto",
    batch: Annotated[list[int] | None, typer.Option("--batch", help="Sequences.", min=1)] = None,
    context: Annotated[list[int] | None, typer.Option("--context", help="Tokens of each sequence.", min=1)] = None,
    heads: Annotated[
        list[str] | None, typer.Option("--heads", help="Query and KV heads, such as 32/8.", metavar="Q/KV")
    ] = None,
    head_dim: Annotated[
        list[int] | None, typer.Option("--head-dim", help="Elements of a head.", min=1, max=512)
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option("--dtype", help=f"How K and V are stored: {', '.join(CODECS)}.")
    ] = None,
    layout: Annotated[
        list[str] | None, typer.Option("--layout", help=f"Order in a page: {', '.join(LAYOUTS)}.")
    ] = None,
    row_align: Annotated[
        list[str] | None,
        typer.Option("--row-align", help=f"Pad rows to so many bytes: {', '.join(map(str, ROW_ALIGNS))}."),
    ] = None,
    page_size: Annotated[int | None, typer.Option("--page-size", help="Tokens in a page: 16.", min=1)] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Times that all are measured in turn.", min=1)] = 3,
    seed: Annotated[int, typer.Option("--seed", help="Of the order of pages.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure decode and append of a batch, in turn with the device's read bandwidth.

    On ptx: count the 32-byte sectors that a decode moves, over the fewest that could hold its K and V, and the
    128-byte lines that hold both, for each layout, padding, dtype and head_dim. Nothing is timed there.

    Options may be given several times: all combinations are measured.
    """
    from kvcupy.bench import bench as run

    name = get_backend(device).name
    given: dict[str, Any] = {
        "batch": batch,
        "context": context,
        "heads": heads and map(_heads, heads),
        "head_dim": head_dim,
        "dtype": dtype,
        "layout": layout,
        "row_align": row_align and map(parse_row_align, row_align),
    }
    changes: dict[str, Any] = {key: tuple(values) for key, values in given.items() if values}
    if page_size is not None:
        changes["page_size"] = page_size
    wanted = replace(default_axes(name), **changes).shapes() if changes else default_shapes(name)
    with report.progress(hidden=as_json) as progress:
        result = run(wanted, name, rounds=rounds, seed=seed, progress=progress)
    if as_json:
        document = {"schema": "kvcupy.bench/1", "device": result.device, "gpu": None, "modelled": False}
        document |= {key: value for key, value in asdict(result).items() if key != "device"}
        print(json.dumps(document, indent=2))
        return
    counted = result.read_bandwidth_bytes_per_s is None
    verb = "Counted" if counted else "Measured"
    report.say(f"{verb} on {result.device}: {result.device_description}")
    (_print_counts if counted else _print_times)(result)


def _heads(text: str) -> tuple[int, int]:
    q_heads, _, kv_heads = text.partition("/")
    if not (q_heads.isdecimal() and kv_heads.isdecimal() and int(kv_heads) and int(q_heads) % int(kv_heads) == 0):
        raise ValueError(f"--heads must be query heads, a slash and KV heads that divide them, got {text!r}")
    return int(q_heads), int(kv_heads)


# Seconds


def _print_times(result: BenchResult) -> None:
    assert result.read_bandwidth_bytes_per_s is not None and result.working_set_bytes is not None
    report.say(
        f"Memory reads at {result.read_bandwidth_bytes_per_s / 1e9:.1f} GB/s; working sets of at least "
        f"{result.working_set_bytes / 2**30:.1f} GiB"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("dtype", "layout"):
        table.add_column(column)
    for column in ("batch ×\ntokens", "heads ×\ndim", "decode\nms", "\nGB/s", "of\nread", "append\nGB/s"):
        table.add_column(column, justify="right")
    decodes = [row for row in result.rows if row.op == "decode"]
    appends = [row for row in result.rows if row.op == "append"]
    for row, append in zip(decodes, appends, strict=True):
        assert row.seconds is not None and row.bytes_per_s is not None and append.bytes_per_s is not None
        table.add_row(
            row.dtype,
            row.layout,
            f"{row.batch}×{row.context}",
            f"{row.num_q_heads}/{row.num_kv_heads}×{row.head_dim}",
            f"{row.seconds * 1e3:.3g}",
            f"{row.bytes_per_s / 1e9:.1f}",
            f"{row.share_of_read_bandwidth:.0%}",
            f"{append.bytes_per_s / 1e9:.1f}",
        )
    report.console.print(table)
    shares = [row.share_of_read_bandwidth or 0.0 for row in decodes]
    report.say(
        f"Decode reads K and V at {min(shares):.0%} to {max(shares):.0%} of what memory delivered to a plain sum in "
        "the same rounds. Append is what it writes: all tokens of a batch at once."
    )


# Counts


def _print_counts(result: BenchResult) -> None:
    report.say(
        "Of requests for K and V alone: 32-byte sectors over the fewest that hold their elements, and the share of "
        "those bytes that is useful. Memory: each sector once. K|V: 128-byte lines that hold both."
    )
    groups: dict[str, list[Row]] = {}
    for row in result.rows:
        title = (
            f"Decode of {row.batch} sequences of {row.context} tokens, {row.num_q_heads} query and "
            f"{row.num_kv_heads} KV heads, pages of {row.page_size}:"
        )
        groups.setdefault(title, []).append(row)
    for title, rows in groups.items():
        report.say(title)
        _print_tables(rows)
        report.say(" ".join(_claims(rows)))


def _print_tables(rows: Sequence[Row]) -> None:
    """A table for each dtype; dtypes with the same numbers share one."""
    tables: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for dtype in _distinct(row.dtype for row in rows):
        lines = _lines([row for row in rows if row.dtype == dtype])
        tables.setdefault(lines, []).append(dtype)
    for lines, dtypes in tables.items():
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=", ".join(dtypes), title_justify="left")
        for column in ("head\ndim", "row\nbytes"):
            table.add_column(column, justify="right")
        for column in ("padding", "layout"):
            table.add_column(column)
        for column in ("sectors", "useful", "memory", "K|V"):
            table.add_column(column, justify="right")
        for line in lines:
            table.add_row(*line)
        report.console.print(table)


def _lines(rows: Sequence[Row]) -> tuple[tuple[str, ...], ...]:
    """Cells of the table; what differs in padding or layout alone and shows the same numbers is one line."""
    groups: dict[tuple[int, int, tuple[str, ...]], list[Row]] = {}
    for row in rows:
        assert row.kv_footprint_sectors is not None
        numbers = (
            f"{row.kv_sectors_over_minimum:.3f}",
            f"{row.kv_useful_share:.1%}",
            f"{row.kv_footprint_sectors * SECTOR_BYTES / row.kv_bytes:.3f}",
            f"{_share_of_lines(row):.0%}",
        )
        groups.setdefault((row.head_dim, row.row_bytes, numbers), []).append(row)
    layouts, paddings = _distinct(row.layout for row in rows), _distinct(row.row_align for row in rows)

    def choice(some: Sequence[int | str], every: Sequence[int | str]) -> str:
        return "all" if len(every) > 1 and len(some) == len(every) else ", ".join(map(str, some))

    return tuple(
        (
            str(head_dim),
            str(row_bytes),
            choice(_distinct(row.row_align for row in group), paddings),
            choice(_distinct(row.layout for row in group), layouts),
            *numbers,
        )
        for (head_dim, row_bytes, numbers), group in groups.items()
    )


def _share_of_lines(row: Row) -> float:
    assert row.kv_lines is not None and row.kv_lines_with_k_and_v is not None
    return row.kv_lines_with_k_and_v / row.kv_lines


def _claims(rows: Sequence[Row]) -> Iterable[str]:
    """What the numbers say about padding to 128 elements, and about K and V in one line."""
    variants: dict[tuple[str, str, int], dict[int | str, Row]] = {}
    for row in rows:
        variants.setdefault((row.dtype, row.layout, row.head_dim), {})[row.row_align] = row
    standard = [row for row in rows if row.row_align == 16]
    if standard:
        worst = min(standard, key=lambda row: row.kv_useful_share or 0.0)
        yield (
            f"With rows padded to 16 bytes, the default, at least {worst.kv_useful_share:.1%} of the bytes that "
            f"requests for K and V move are useful (head_dim {worst.head_dim} in {worst.dtype}, {worst.layout})."
        )
    for start in (1, 16):
        pairs = [(v[start], v["128-elements"]) for v in variants.values() if {start, "128-elements"} <= v.keys()]
        if pairs:
            yield _padding_claim("unpadded rows" if start == 1 else f"rows padded to {start} bytes", pairs)
    unpadded = [v[min(v, key=lambda align: v[align].row_bytes)] for v in variants.values()]
    interleaved = [row for row in unpadded if row.layout in ("interleaved", "token_major")]
    if interleaved:
        shares: dict[int, list[float]] = {}
        for row in interleaved:
            shares.setdefault(row.row_bytes, []).append(_share_of_lines(row))
        both = {size: max(values) for size, values in shares.items() if max(values)}
        words = ", ".join(f"{share:.0%} with rows of {size} bytes" for size, share in sorted(both.items()))
        none = [str(size) for size in sorted(shares) if size not in both]
        yield (
            "K and V side by side share 128-byte lines where a row is not whole lines: "
            + "; ".join(
                [*([words] if both else []), *([f"none with rows of {', '.join(none)} bytes"] if none else [])]
            )
            + "."
        )


def _padding_claim(before: str, pairs: Sequence[tuple[Row, Row]]) -> str:
    """pairs: (without, with) padding to 128 elements."""
    saved: dict[int, float] = {}
    added: dict[int, float] = {}
    for row, padded in pairs:
        assert row.kv_sectors is not None and padded.kv_sectors is not None
        change = padded.kv_sectors / row.kv_sectors - 1
        if change:
            known = added if change > 0 else saved
            known[row.head_dim] = max(known.get(row.head_dim, 0.0), abs(change))
    unchanged = [
        head_dim for head_dim in _distinct(row.head_dim for row, _ in pairs) if head_dim not in saved | added
    ]
    parts = []
    if saved:
        parts.append(f"saves up to {max(saved.values()):.0%} of the sectors at head_dim {_join(saved)}")
    if added:
        parts.append(f"moves up to {max(added.values()):.0%} more sectors at head_dim {_join(added)}")
    if unchanged:
        parts.append(f"changes nothing at head_dim {_join(unchanged)}")
    memory = max((padded.kv_footprint_sectors or 0) / (row.kv_footprint_sectors or 1) for row, padded in pairs) - 1
    size = max(padded.row_bytes / row.row_bytes for row, padded in pairs) - 1
    return (
        f"Against {before}, padding head_dim to 128 elements {'; '.join(parts)}. It takes up to {size:.0%} more "
        f"room, and memory has to deliver up to {memory:.1%} more."
    )


def _join(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))

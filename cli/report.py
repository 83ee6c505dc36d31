"""What people see (tables, a paragraph, progress on standard error) and what machines read (JSON)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvcupy.backends.base import Cost
from kvcupy.simulate.engine import Percentiles, Replay
from kvcupy.simulate.experiment import ExperimentResult, Row
from kvcupy.simulate.gpus import GPU
from kvcupy.simulate.trace import Trace
from kvcupy.spec import KVSpec

SCHEMA = "kvcupy.simulate/1"

console = Console(highlight=False, soft_wrap=False)


@contextmanager
def progress(hidden: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A live bar on standard error, if that is a terminal, gone when it is done: call it with (what, done, total)."""
    stderr = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=stderr,
        transient=True,
        disable=hidden or not stderr.is_terminal,
    )
    with bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def _bytes(number: float) -> str:
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while number >= 1000 and len(units) > 1:
        number /= 1024
        units.pop(0)
    return f"{number:.3g} {units[0]}"


def _gb_per_s(number: float | None) -> str:
    return "-" if number is None else f"{number / 1e9:.1f}"


# The experiment


def experiment_json(result: ExperimentResult) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "device": result.device,
        "gpu": None,
        "modelled": False,
        "read_bandwidth_bytes_per_s": result.read_bandwidth_bytes_per_s,
        "working_set_bytes": result.working_set_bytes,
        "rows": [asdict(row) for row in result.rows],
    }


def print_experiment(result: ExperimentResult, title: str, spec: KVSpec) -> None:
    console.print(f"Executed on {result.device}: {result.device_description}", markup=False)
    console.print(f"{title}, {spec.dtype}, {spec.layout}, pages of {spec.page_size}", markup=False)
    lengths = f"{len(result.lengths)} sequences of {min(result.lengths)} to {max(result.lengths)} tokens"
    timed = result.read_bandwidth_bytes_per_s is not None
    console.print(
        f"{lengths}; working set {_bytes(result.working_set_bytes)}; memory reads at "
        f"{_gb_per_s(result.read_bandwidth_bytes_per_s)} GB/s"
        if timed
        else f"{lengths}; counted, not timed",
        markup=False,
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("strategy")
    measured = ("KV\nGB/s", "of\nread", "tokens\n/s") if timed else ("sectors", "bytes\nmoved", "warp\ninstr.")
    for column in (*measured, "bytes\n/token", "pad\nwaste", "int.\nfrag.", "ext.\nfrag."):
        table.add_column(column, justify="right")
    for row in result.rows:
        table.add_row(
            row.strategy,
            *_measured(row),
            f"{row.bytes_per_token:,}",
            f"{row.padding_waste:.1%}",
            f"{row.internal_fragmentation:.1%}",
            f"{row.external_fragmentation:.1%}",
        )
    console.print(table)
    console.print(_in_words(result, spec), markup=False)


def _measured(row: Row) -> tuple[str, str, str]:
    if row.bytes_moved is not None:
        return f"{row.sectors:,}", _bytes(row.bytes_moved), f"{row.warp_instructions:,}"
    return (
        _gb_per_s(row.kv_bandwidth_bytes_per_s),
        f"{row.share_of_read_bandwidth:.0%}",
        f"{row.tokens_per_s:.1f}",
    )


def _in_words(result: ExperimentResult, spec: KVSpec) -> str:
    rows = {row.strategy: row for row in result.rows}
    contiguous, paged = rows["contiguous"], rows["paged"]
    padded = rows["paged + padding"]
    if paged.bytes_moved is None:
        cost = f"at {paged.share_of_read_bandwidth:.0%} of what this machine's memory delivers to a plain sum"
    else:
        cost = f"append and decode move {paged.bytes_moved / paged.kv_bytes:.2f} bytes for each byte of K and V"
    sentences = [
        f"Decode reads every stored K and V for each token: here {cost}.",
        f"Pages {_compare(paged, contiguous)} a contiguous cache. "
        f"In a churn of 2,000 requests, contiguous reservations left {contiguous.internal_fragmentation:.1%} of "
        f"what they held unused and {contiguous.external_fragmentation:.1%} of the free memory out of reach; "
        f"pages {paged.internal_fragmentation:.1%} and {paged.external_fragmentation:.1%}.",
    ]
    if padded.bytes_per_token == paged.bytes_per_token:
        sentences.append(
            f"Padding changes nothing: a row of head_dim {spec.head_dim} in {spec.dtype} is already aligned "
            "(try --head-dim 120 or 125)."
        )
    else:
        sentences.append(
            f"Padding costs {padded.padding_waste:.1%} of the memory; padded rows {_compare(padded, paged)} "
            "unpadded ones."
        )
    return " ".join(sentences)


def _compare(row: Row, other: Row) -> str:
    if row.sectors is not None and other.sectors is not None:
        if row.sectors == other.sectors:
            return "move as many sectors as"
        change = row.sectors / other.sectors - 1
        return f"move {abs(change):.1%} {'more' if change > 0 else 'fewer'} sectors than"
    assert row.tokens_per_s is not None and other.tokens_per_s is not None
    ratio = row.tokens_per_s / other.tokens_per_s - 1
    if abs(ratio) < 0.05:
        return f"run as fast ({ratio:+.1%} tokens/s) as"
    return f"run {abs(ratio):.0%} {'faster' if ratio > 0 else 'slower'} than"


# A stream of requests


@dataclass
class ReplayReport:
    """One stream, replayed on a device, or on a model of a GPU, or on both."""

    title: str
    spec: KVSpec
    trace: Trace
    gpu: GPU | None
    device: str | None
    measured: Replay | None = None
    costs: Sequence[Cost] = ()
    """Of the steps that were executed."""
    modelled: Replay | None = None

    @property
    def counted(self) -> Cost | None:
        """The sum of the costs, if they are counts and not seconds."""
        total = Cost.total(self.costs)
        return None if total.sectors is None else total


def replay_json(report: ReplayReport) -> dict[str, Any]:
    """Figures are the measured ones if something ran; then the modelled ones, if any, stand apart."""
    first = report.measured or report.modelled
    assert first is not None
    document = {
        "schema": SCHEMA,
        "device": report.device,
        "gpu": report.gpu.name if report.gpu else None,
        "modelled": report.measured is None,
        "read_bandwidth_bytes_per_s": None,
        "working_set_bytes": None,
        "rows": [],
        "trace": report.trace.name,
        "requests_skipped": dict(report.trace.skipped),
        **_figures(first),
        **dict.fromkeys(("sectors", "bytes_moved", "warp_instructions")),
    }
    if counted := report.counted:
        document |= dict.fromkeys(("makespan_s", "tokens_per_s", "ttft_s", "tpot_s"))
        document |= {
            "sectors": counted.sectors,
            "bytes_moved": 32 * (counted.sectors or 0),
            "warp_instructions": counted.warp_instructions,
        }
    if report.measured and report.modelled:
        document["modelled_figures"] = _figures(report.modelled)
    return document


def _figures(replay: Replay) -> dict[str, Any]:
    figures = asdict(replay)
    for per_request in ("first_token_s", "finish_s"):
        del figures[per_request]
    return figures


def print_replay(report: ReplayReport) -> None:
    columns: list[tuple[str, Replay]] = []
    if report.measured:
        console.print(f"Executed on {report.device}: the cache's part of each step, no model around it", markup=False)
        columns.append((f"{'counted' if report.counted else 'measured'}, {report.device}", report.measured))
    if report.gpu and report.modelled:
        console.print(
            f"Modelled for {report.gpu.name}: a roofline of {report.gpu.bandwidth_bytes_per_s / 1e12:.2f} TB/s and "
            f"{report.gpu.fp16_flops / 1e12:.0f} TFLOP/s, a bound and not a forecast",
            markup=False,
        )
        columns.append((f"modelled, {report.gpu.name}", report.modelled))
    spec, pool = report.spec, columns[0][1].pool
    console.print(f"{report.title}, {spec.dtype}, {spec.layout}", markup=False)
    console.print(
        f"{len(report.trace):,} requests of {report.trace.name}; {pool.total_pages:,} pages of {spec.page_size} "
        f"tokens, {_bytes(pool.total_pages * spec.page_bytes)}",
        markup=False,
    )
    for reason, count in report.trace.skipped.items():
        console.print(f"{count:,} rows skipped: {reason}", markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name, _ in columns:
        table.add_column(name, justify="right")
    for label, show in _LINES:
        cells = [show(replay) for _, replay in columns]
        if report.counted and label in _TIMES:
            cells[0] = "-"
        table.add_row(label, *cells)
    if counted := report.counted:
        for label, number in (("sectors of 32 bytes", counted.sectors), ("instructions", counted.warp_instructions)):
            table.add_row(label, f"{number:,}", *("-" for _ in columns[1:]))
    console.print(table)
    for rejection in columns[0][1].rejections[:3]:
        console.print(f"request {rejection.request} rejected: {rejection.reason}", markup=False)
    if len(columns[0][1].rejections) > 3:
        console.print(f"and {len(columns[0][1].rejections) - 3:,} more rejected", markup=False)


def _percentiles(values: Percentiles | None, scale: float, digits: int) -> str:
    if values is None:
        return "-"
    return " / ".join(f"{value * scale:.{digits}f}" for value in (values.p50, values.p90, values.p99))


_TIMES = (
    "makespan, s",
    "tokens/s",
    "time to first token, ms (p50 / p90 / p99)",
    "time per output token, ms",
)
"""Lines that mean nothing on a device that is not timed."""

_LINES: list[tuple[str, Callable[[Replay], str]]] = [
    ("requests finished", lambda r: f"{r.requests_finished:,}"),
    ("requests rejected", lambda r: f"{r.requests_rejected:,}"),
    ("preemptions", lambda r: f"{r.preemptions:,}"),
    ("output tokens", lambda r: f"{r.output_tokens:,}"),
    ("makespan, s", lambda r: f"{r.makespan_s:,.1f}"),
    ("tokens/s", lambda r: f"{r.tokens_per_s:,.1f}"),
    ("time to first token, ms (p50 / p90 / p99)", lambda r: _percentiles(r.ttft_s, 1e3, 1)),
    ("time per output token, ms", lambda r: _percentiles(r.tpot_s, 1e3, 2)),
    ("pages used, peak", lambda r: f"{r.pool.peak_pages:,} ({r.pool.peak_pages / r.pool.total_pages:.1%})"),
    ("pages used, mean", lambda r: f"{r.pool.mean_pages:,.1f} ({r.pool.mean_pages / r.pool.total_pages:.1%})"),
    ("internal fragmentation", lambda r: f"{r.internal_fragmentation:.2%}"),
]

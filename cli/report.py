"""What people see (tables, a paragraph, progress on standard error) and what machines read (JSON)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from textwrap import fill
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvcupy.backends.base import Cost
from kvcupy.simulate.engine import Percentiles, Replay
from kvcupy.simulate.experiment import CHURN_REQUESTS, ExperimentResult, Row
from kvcupy.simulate.gpus import GPU
from kvcupy.simulate.models import ModelPreset
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


def experiment_json(result: ExperimentResult, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "device": result.device,
        "gpu": None,
        "modelled": False,
        "settings": settings,
        "read_bandwidth_bytes_per_s": result.read_bandwidth_bytes_per_s,
        "working_set_bytes": result.working_set_bytes,
        "rows": [asdict(row) for row in result.rows],
        "comparisons": [asdict(comparison) for comparison in result.comparisons],
    }


def say(text: str) -> None:
    """A line of prose, wrapped at words to the width of the terminal, 80 columns in a pipe."""
    print(fill(text, console.width, break_on_hyphens=False))


def _title(model: ModelPreset, spec: KVSpec) -> str:
    return (
        f"{model.name}: {_count(spec.num_layers, 'layer')}, {model.num_q_heads} query and {spec.num_kv_heads} KV "
        f"heads, head_dim {spec.head_dim}, {spec.dtype}, {spec.layout}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def print_experiment(result: ExperimentResult, model: ModelPreset, spec: KVSpec, padding: int | str) -> None:
    timed = result.read_bandwidth_bytes_per_s is not None
    shortest, longest = min(result.lengths), max(result.lengths)
    lengths = f"{shortest}" if shortest == longest else f"{shortest} to {longest}"
    say(f"Executed on {result.device}: {result.device_description}")
    say(_title(model, spec))
    say(
        f"{_count(len(result.lengths), 'sequence')} of {lengths} tokens, pages of {spec.page_size}, "
        + (
            f"going round {_bytes(result.working_set_bytes)} of K and V; "
            f"memory reads at {_gb_per_s(result.read_bandwidth_bytes_per_s)} GB/s"
            if timed
            else "counted, not timed"
        )
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("strategy", no_wrap=True)
    measured = ("KV\nGB/s", "read\nshare", "tokens\n/s") if timed else ("sectors", "bytes\nmoved", "warp\ninstr.")
    for column in (*measured, "bytes\n/token", "pad-\nding", "inter-\nnal", "exter-\nnal"):
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
    if timed:
        say("read share: of the speed at which this machine reads memory. tokens/s: of attention alone.")
    say(
        "padding, internal, external: memory that is row padding, that is reserved but holds no token, and that is "
        f"free but out of reach; the last two from {CHURN_REQUESTS:,} simulated requests that come and go."
    )
    console.print()
    say(_in_words(result, spec, padding))


def _measured(row: Row) -> tuple[str, str, str]:
    if row.bytes_moved is not None:
        return f"{row.sectors:,}", _bytes(row.bytes_moved), f"{row.warp_instructions:,}"
    return (
        _gb_per_s(row.kv_bandwidth_bytes_per_s),
        f"{row.share_of_read_bandwidth:.0%}",
        f"{row.tokens_per_s:.1f}",
    )


def _in_words(result: ExperimentResult, spec: KVSpec, padding: int | str) -> str:
    rows = {row.strategy: row for row in result.rows}
    contiguous, paged, padded = rows["contiguous"], rows["paged"], rows["paged + padding"]
    if paged.share_of_read_bandwidth is not None:
        shares = [row.share_of_read_bandwidth or 0.0 for row in result.rows]
        cost = f"at {min(shares):.0%} to {max(shares):.0%} of what this machine's memory delivers"
    else:
        moved = (paged.bytes_moved or 0) / paged.kv_bytes
        cost = f"append and decode move {moved:.2f} bytes for each byte of K and V"
    sentences = [
        f"Decode reads every stored K and V for each token: here {cost}.",
        f"Pages against a contiguous cache: {_difference(result, paged, contiguous)}. "
        f"Contiguous reservations leave {contiguous.internal_fragmentation:.1%} of what they hold unused and "
        f"{contiguous.external_fragmentation:.1%} of the free memory out of reach; pages "
        f"{paged.internal_fragmentation:.1%} and {paged.external_fragmentation:.1%}.",
    ]
    if padded.bytes_per_token == paged.bytes_per_token:
        sentences.append(
            f"Padding to {padding} changes nothing here: a row of head_dim {spec.head_dim} is "
            f"{spec.head_dim * spec.itemsize} bytes either way, so the padded rows of the table repeat the others."
        )
    else:
        sentences.append(
            f"Padding to {padding} costs {padded.padding_waste:.1%} of the memory; against rows without it: "
            f"{_difference(result, padded, paged)}."
        )
    return " ".join(sentences)


def _difference(result: ExperimentResult, row: Row, baseline: Row) -> str:
    if row.sectors is not None and baseline.sectors is not None:
        return f"{row.sectors / baseline.sectors - 1:+.1%} sectors"
    (comparison,) = (c for c in result.comparisons if (c.strategy, c.baseline) == (row.strategy, baseline.strategy))
    speed = f"{comparison.speed - 1:+.1%} speed, give or take {comparison.spread:.1%}"
    return speed if comparison.certain else f"no difference that this run can tell ({speed})"


# A stream of requests


@dataclass
class ReplayReport:
    """One stream, replayed on a device, or on a model of a GPU, or on both."""

    model: ModelPreset
    spec: KVSpec
    trace: Trace
    gpu: GPU | None = None
    device: str | None = None
    measured: Replay | None = None
    costs: Sequence[Cost] = ()
    """Of the steps that were executed."""
    modelled: Replay | None = None

    @property
    def counted(self) -> Cost | None:
        """The sum of the costs, if they are counts and not seconds."""
        total = Cost.total(self.costs)
        return None if total.sectors is None else total


def replay_json(report: ReplayReport, settings: dict[str, Any]) -> dict[str, Any]:
    """Figures are the measured ones if something ran; then the modelled ones, if any, stand apart."""
    first = report.measured or report.modelled
    assert first is not None
    document = {
        "schema": SCHEMA,
        "device": report.device,
        "gpu": report.gpu.name if report.gpu else None,
        "modelled": report.measured is None,
        "settings": settings,
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
        say(f"Executed on {report.device}: append and attention, without the model around them")
        columns.append((f"{'counted' if report.counted else 'measured'}, {report.device}", report.measured))
    if report.gpu and report.modelled:
        gpu, model = report.gpu, report.model
        say(
            f"Modelled for {gpu.name}: a roofline of {gpu.bandwidth_bytes_per_s / 1e12:.2f} TB/s and "
            f"{gpu.fp16_flops / 1e12:.0f} TFLOP/s, a bound and not a forecast; with the model's "
            f"{model.num_parameters / 1e9:.3g} billion weights"
        )
        columns.append((f"modelled, {gpu.name}", report.modelled))
        needed = 2 * model.num_parameters + report.modelled.pool.total_pages * report.spec.page_bytes
        if needed > gpu.memory_bytes:
            say(f"Note: 16-bit weights and this pool are {_bytes(needed)}; {gpu.name} has {_bytes(gpu.memory_bytes)}")
    spec, pool = report.spec, columns[0][1].pool
    say(_title(report.model, spec))
    say(
        f"{_count(len(report.trace), 'request')} ({report.trace.name}); {_count(pool.total_pages, 'page')} of "
        f"{spec.page_size} tokens, {_bytes(pool.total_pages * spec.page_bytes)}"
    )
    for reason, count in report.trace.skipped.items():
        say(f"{_count(count, 'row')} skipped: {reason}")
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
        say(f"request {rejection.request} rejected: {rejection.reason}")
    if len(columns[0][1].rejections) > 3:
        say(f"and {len(columns[0][1].rejections) - 3:,} more rejected")


def _percentiles(values: Percentiles | None, scale: float, digits: int) -> str:
    if values is None:
        return "-"
    return " / ".join(f"{value * scale:,.{digits}f}" for value in (values.p50, values.p90, values.p99))


_TIMES = (
    "makespan, s",
    "tokens/s",
    "first token, ms: p50 / p90 / p99",
    "per output token, ms: likewise",
)
"""Lines that mean nothing on a device that is not timed."""

_LINES: list[tuple[str, Callable[[Replay], str]]] = [
    ("requests finished", lambda r: f"{r.requests_finished:,}"),
    ("requests rejected", lambda r: f"{r.requests_rejected:,}"),
    ("preemptions", lambda r: f"{r.preemptions:,}"),
    ("output tokens", lambda r: f"{r.output_tokens:,}"),
    ("makespan, s", lambda r: f"{r.makespan_s:,.1f}"),
    ("tokens/s", lambda r: f"{r.tokens_per_s:,.1f}"),
    ("first token, ms: p50 / p90 / p99", lambda r: _percentiles(r.ttft_s, 1e3, 1)),
    ("per output token, ms: likewise", lambda r: _percentiles(r.tpot_s, 1e3, 2)),
    ("pages used, peak", lambda r: f"{r.pool.peak_pages:,} ({r.pool.peak_pages / r.pool.total_pages:.1%})"),
    ("pages used, mean", lambda r: f"{r.pool.mean_pages:,.1f} ({r.pool.mean_pages / r.pool.total_pages:.1%})"),
    ("internal fragmentation", lambda r: f"{r.internal_fragmentation:.2%}"),
]

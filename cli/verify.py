"""`kvcupy verify`: is this device right?"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from kvcupy.backends import get_backend
from kvcupy.cli import report


def verify(
    device: Annotated[str, typer.Option("--device", help="What to verify.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A part of the matrix, with short sequences.")] = False,
    seed: Annotated[int, typer.Option("--seed", help="Of the random values.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare a device with attention in float64, over a matrix of shapes, dtypes and layouts.

    The exit code is 0 if every case is within its bound, else 1.
    """
    from kvcupy.verify import Outcome
    from kvcupy.verify import verify as run

    backend = get_backend(device)
    with report.progress(hidden=as_json) as progress:
        outcomes = run(device, quick, seed, lambda done, total: progress("verifying", done, total))
    failed = [outcome for outcome in outcomes if not outcome.passed]
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.case.spec.dtype, outcome.case.spec.layout), []).append(outcome)
    rows: list[dict[str, Any]] = [
        {
            "dtype": dtype,
            "layout": layout,
            "cases": len(group),
            "failed": sum(not outcome.passed for outcome in group),
            "stored_exactly": all(outcome.stored_exactly for outcome in group),
            "error": max(outcome.error for outcome in group),
            "lse_error": max(outcome.lse_error for outcome in group),
            "bound": group[0].bound,
        }
        for (dtype, layout), group in groups.items()
    ]
    if as_json:
        document = {
            "schema": "kvcupy.verify/1",
            "device": backend.name,
            "gpu": None,
            "modelled": False,
            "passed": not failed,
            "rows": rows,
            "failures": [str(outcome.case) for outcome in failed],
        }
        print(json.dumps(document, indent=2))
    else:
        report.say(f"Verified on {backend.name}: {backend.describe()}")
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in ("dtype", "layout"):
            table.add_column(column)
        for column in ("cases", "append", "error", "bound", ""):
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(
                row["dtype"],
                row["layout"],
                str(row["cases"]),
                "exact" if row["stored_exactly"] else "wrong",
                f"{row['error']:.1e}",
                f"{row['bound']:.1e}",
                "ok" if not row["failed"] else f"{row['failed']} failed",
            )
        report.console.print(table)
        for outcome in failed:
            report.say(f"failed: {outcome.case}: error {outcome.error:.1e}")
        report.say(f"{len(outcomes) - len(failed)} cases passed, {len(failed)} failed")
    if failed:
        raise typer.Exit(1)

"""`kvcupy inspect`: what the compiler makes of the kernels, without a GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvcupy.cli import report

if TYPE_CHECKING:
    from kvcupy.inspect import Inspected

ALL = "all"


def _filter(name: str, help: str) -> Any:
    return typer.Option(name, help=f'{help} Several with commas, or "{ALL}".')


def inspect(
    kernel: Annotated[str, _filter("--kernel", "A kernel, such as decode_attention.")] = ALL,
    arch: Annotated[str, _filter("--arch", "An architecture, such as sm_120.")] = "sm_80,sm_90,sm_100",
    dtype: Annotated[str, _filter("--dtype", "How K and V are stored.")] = "float16",
    head_dim: Annotated[str, _filter("--head-dim", "Elements of a head.")] = "128",
    group: Annotated[str, _filter("--group", "Query heads per KV head.")] = "4",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compile kernels for GPUs that need not be here, and print what each takes.

    Registers and spilled bytes are a thread's, shared bytes a block's. Loads are
    from global memory, in bytes. Loads and instructions are read from the machine
    code by nvidia-cuda-nvdisasm, where it is installed, for sm_75 and up.
    """
    # The interpreter comes with these: other commands do not wait for it.
    from kvcupy.backends.ptx.nvrtc import architectures, version
    from kvcupy.inspect import ARCHITECTURES, DISASSEMBLER, Disassembler, compile_all, inspected, shapes

    known = list(shapes())
    dtypes = _chosen("--dtype", dtype, (shape.spec.dtype for shape in known))
    head_dims = _chosen("--head-dim", head_dim, map(str, sorted(shape.spec.head_dim for shape in known)))
    groups = _chosen("--group", group, map(str, sorted(shape.group for shape in known)))
    wanted = [
        shape
        for shape in known
        if shape.spec.dtype in dtypes and str(shape.spec.head_dim) in head_dims and str(shape.group) in groups
    ]
    if not wanted:
        raise ValueError(f"no shape of the list has dtype {dtype}, head_dim {head_dim} and group {group}")
    launches = inspected(wanted)
    kernels = _chosen("--kernel", kernel, (launch.kernel for launch in launches))
    launches = [launch for launch in launches if launch.kernel in kernels]
    archs = _chosen("--arch", arch, ARCHITECTURES)
    for lacking in [each for each in archs if each not in architectures()]:
        print(f"NVRTC {version()} makes no code for {lacking}: left out", file=sys.stderr)
        archs.remove(lacking)
    disassembler = Disassembler.find()
    if disassembler is None:
        print(f"instructions need the package {DISASSEMBLER}, which is not installed", file=sys.stderr)

    jobs = [(variant, each) for variant in dict.fromkeys(launch.variant for launch in launches) for each in archs]
    compiled = {}
    with report.progress(hidden=as_json) as progress:
        progress("compiling", 0, len(jobs))
        for job, codes in zip(jobs, compile_all(jobs, disassembler), strict=True):
            compiled[job] = codes
            progress("compiling", len(compiled), len(jobs))
    rows: list[dict[str, Any]] = []
    for launch in launches:
        for each in archs:
            code = compiled[launch.variant, each][launch.kernel]
            occupancy = ARCHITECTURES[each].occupancy(code.registers, code.shared_bytes, launch.threads)
            rows.append({**_named(launch), "arch": each, **asdict(code), "occupancy": occupancy})
    if as_json:
        document = {"schema": "kvcupy.inspect/1", "device": None, "gpu": None, "modelled": False, "variants": rows}
        print(json.dumps(document, indent=2))
    else:
        report.say(f"Compiled by NVRTC {version()}; nothing was executed")
        for name in kernels:
            _print_kernel(name, [row for row in rows if row["kernel"] == name])


def _chosen(option: str, text: str, known: Iterable[str]) -> list[str]:
    """The values that an option names, in the order of what is known."""
    choices = list(dict.fromkeys(known))
    wanted = choices if text == ALL else text.split(",")
    for value in wanted:
        if value not in choices:
            raise ValueError(f"{option} must be {ALL} or some of {', '.join(choices)}, got {value!r}")
    return [value for value in choices if value in wanted]


def _named(launch: Inspected) -> dict[str, Any]:
    spec = launch.shape.spec
    return {
        "kernel": launch.kernel,
        "dtype": spec.dtype,
        "head_dim": spec.head_dim,
        "group": launch.shape.group,
        "page_size": spec.page_size,
        "row_align": spec.row_align,
        "threads": launch.threads,
        "constants": asdict(launch.variant),
    }


def _print_kernel(name: str, rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), title=name, title_justify="left")
    columns = "dtype", "dim", "group", "page", "align", "arch", "regs", "spill", "shared", "occup.", "load", "instr."
    for column in columns:
        table.add_column(column, justify="left" if column in ("dtype", "arch") else "right")
    for row in rows:
        instructions, widest = row["instructions"], row["widest_load_bytes"]
        table.add_row(
            row["dtype"],
            str(row["head_dim"]),
            str(row["group"]),
            str(row["page_size"]),
            str(row["row_align"]),
            row["arch"],
            str(row["registers"]),
            str(row["spill_bytes"]),
            str(row["shared_bytes"]),
            f"{row['occupancy']:.0%}",
            "-" if widest is None else str(widest),
            "-" if instructions is None else str(instructions),
        )
    report.console.print()
    report.console.print(table)

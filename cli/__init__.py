"""The `kvcupy` command: one module per subcommand, reports in their own module, errors in one line."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvcupy import __version__
from kvcupy.cli import bench, info, inspect, simulate, verify
from kvcupy.errors import KVCupyError

__all__ = ["app", "main", "run"]

# What Typer raises for bad usage; its own module for that has moved between versions.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="kvcupy",
    help="Paged KV caches for LLM decode: simulate workloads, measure layouts.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"kvcupy {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


app.command("simulate")(simulate.simulate)
app.command("bench")(bench.bench)
app.command("verify")(verify.verify)
app.command("inspect")(inspect.inspect)
app.command("info")(info.info)


def run(arguments: list[str]) -> int:
    """Run one command line; its exit code. What goes wrong is one line on standard error, and 2."""
    try:
        code = app(arguments, prog_name="kvcupy", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (typer.Abort, KeyboardInterrupt):
        print("kvcupy: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, MemoryError, KVCupyError) as error:
        message = str(error) or type(error).__name__
    except Exception as error:
        if not isinstance(error, _UsageError):
            raise
        message = error.format_message()  # type: ignore[attr-defined]
    print(f"kvcupy: {' '.join(message.split())}", file=sys.stderr)
    return 2


def main() -> None:
    """Entry point of the `kvcupy` command."""
    sys.exit(run(sys.argv[1:]))

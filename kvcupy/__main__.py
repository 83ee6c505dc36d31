"""`python -m kvcupy` is the `kvcupy` command."""

from kvcupy.cli import main

main()

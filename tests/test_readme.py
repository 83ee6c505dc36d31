"""What the README shows runs as shown."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_library_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    done = subprocess.run([sys.executable, "-W", "error", "-c", example], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("(2, 32, 128) CacheStats(device=")


def test_each_command_is_one_line() -> None:
    for name in ("simulate", "test"):
        (command,) = re.findall(rf"<!-- {name} -->\n```sh\n(.*?)```\n<!-- /{name} -->", README, re.DOTALL)
        assert command.count("\n") == 1
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install ")

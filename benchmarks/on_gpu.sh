#!/usr/bin/env bash
# All that needs a GPU, in at most 8 minutes: tests, verify, compute-sanitizer, simulate, bench.
#
#     benchmarks/on_gpu.sh [RESULT.json]
#
# Runs from the checkout, without a network and without installing anything; PYTHON names the interpreter (python3),
# and what PYTHONPATH holds is kept. Each step has its own time limit, and one that fails stops no other. All of it
# goes into one JSON file, by default benchmarks/results/<gpu>-<date>.json. The exit code is 0 if no step failed.
set -u

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
result=${1:-}
[[ -z $result || $result == /* ]] || result=$PWD/$result
cd "$root" || exit
python=${PYTHON:-python3}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} LC_ALL=C.UTF-8 PYTHONUNBUFFERED=1 NO_COLOR=1 COLUMNS=120
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

kvcupy() { "$python" -c "from kvcupy.cli import main; main()" "$@"; }
export -f kvcupy
export python

# step NAME SECONDS COMMAND...: run it, keep what it prints, its exit code (124: out of time) and its seconds.
step() {
    local name=$1 limit=$2 started=$EPOCHREALTIME
    shift 2
    echo "== $name"
    timeout --kill-after=5 "$limit" bash -c '"$@"' - "$@" >"$logs/$name.out" 2>"$logs/$name.err"
    local code=$?
    echo "$code $started $EPOCHREALTIME" >"$logs/$name.step"
    echo "   exit code $code"
    ((code == 0)) || tail -n 3 "$logs/$name.err" "$logs/$name.out"
}

skip() {
    echo "== $1: $2"
    echo "$2" >"$logs/$1.skip"
}

# Test files whose imports are missing here are left out, and named.
"$python" - "$logs/ignored" <<'EOF'
import ast
import sys
from importlib.util import find_spec
from pathlib import Path

files = {path: ast.parse(path.read_text()) for path in Path("tests").rglob("*.py")}
own = {path.stem for path in files}
with open(sys.argv[1], "w") as ignored:
    for path, tree in files.items():
        names = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
        missing = {name.partition(".")[0] for name in names - own if find_spec(name.partition(".")[0]) is None}
        if missing and path.name.startswith("test_"):
            print(path, *sorted(missing), file=ignored)
EOF
mapfile -t ignored < <(sed 's/ .*//; s/^/--ignore=/' "$logs/ignored")

sanitized='
from kvcupy.verify import cases, verify_case
outcomes = [verify_case(case, "cuda") for case in list(cases(quick=True))[::5]]
assert all(outcome.passed for outcome in outcomes), outcomes
'

step info 20 kvcupy info --json
step pytest 140 "$python" -m pytest -q -k cuda -p no:cacheprovider ${ignored[@]+"${ignored[@]}"} tests
step verify 75 kvcupy verify --device cuda --json
for tool in memcheck racecheck; do
    if command -v compute-sanitizer >/dev/null; then
        step "$tool" 50 compute-sanitizer --tool "$tool" --error-exitcode 1 "$python" -c "$sanitized"
    else
        skip "$tool" "compute-sanitizer is not installed"
    fi
done
step simulate 55 kvcupy simulate --device cuda --json
step bench 75 kvcupy bench --device cuda --rounds 5 --json

"$python" - "$logs" "$result" <<'EOF'
import json
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

logs, result = Path(sys.argv[1]), sys.argv[2]


def output_of(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def report_of(text):
    try:
        return json.loads(text)
    except ValueError:
        return text[-4000:]


gpu, _, driver = output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").partition(", ")
now = datetime.now(timezone.utc)
steps = {}
for path in sorted(logs.glob("*.step"), key=lambda path: float(path.read_text().split()[1])):
    code, started, ended = path.read_text().split()
    steps[path.stem] = {
        "exit_code": int(code),
        "seconds": round(float(ended) - float(started), 1),
        "output": report_of(path.with_suffix(".out").read_text(errors="replace")),
        "errors": path.with_suffix(".err").read_text(errors="replace")[-4000:],
    }
for path in logs.glob("*.skip"):
    steps[path.stem] = {"skipped": path.read_text().strip()}
ignored = [line.split() for line in (logs / "ignored").read_text().splitlines()]
document = {
    "schema": "kvcupy.on_gpu/1",
    "date": now.isoformat(timespec="seconds"),
    "gpu": gpu or None,
    "driver": driver.splitlines()[0] if driver else None,
    "commit": output_of("git", "rev-parse", "HEAD") or None,
    "python": platform.python_version(),
    "test_files_left_out": {name: missing for name, *missing in ignored},
    "passed": not any(step.get("exit_code") for step in steps.values()),
    "steps": steps,
}
name = "-".join(gpu.splitlines()[0].lower().split()) if gpu else "no-gpu"
path = Path(result) if result else Path("benchmarks/results") / f"{name}-{now:%Y-%m-%d}.json"
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text(json.dumps(document, indent=2) + "\n")
print(path)
sys.exit(not document["passed"])
EOF

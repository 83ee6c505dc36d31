"""The package as it is shipped: its layers, what importing it costs, and what lands in site-packages."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "kvcupy"

LAYERS = [
    "errors",
    "spec",
    "allocator",
    "backends",
    "pool",
    "ops",
    "cache",
    "verify",
    "inspect",
    "measure",
    "bench",
    "simulate",
    "cli",
    "__main__",
]
"""Each imports only from those before it, and from itself."""

LAZY = {"numba", "cupy", "llvmlite", "torch"}


def modules() -> list[Path]:
    # rglob does not enter links before Python 3.13.
    found = {path for folder in (PACKAGE, PACKAGE / "cli") for path in folder.rglob("*.py")}
    return sorted(found - {PACKAGE / "__init__.py"})


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, at the top of the file?) of every import statement."""
    tree = ast.parse(path.read_text())
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) not in inside) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append((node.module or "", id(node) not in inside))
            found += [(f"{node.module}.{alias.name}", id(node) not in inside) for alias in node.names]
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_layers_import_downwards(path: Path) -> None:
    layer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    for module, _ in imports(path):
        parts = module.split(".")
        if parts[0] == "kvcupy" and len(parts) > 1 and parts[1] in LAYERS:
            assert parts[1] in allowed, f"{layer} imports {module}"
        elif parts == ["kvcupy"] or (parts[0] == "kvcupy" and len(parts) == 2):
            # The top of the package imports the library's layers: only what stands above them may use it.
            assert layer in LAYERS[LAYERS.index("verify") :] or module == "kvcupy", f"{layer} imports {module}"
        if parts[0] in LAZY:
            assert layer == "backends", f"{layer} imports {module}: only backends may"
        if layer in ("errors", "spec", "allocator"):
            assert parts[0] not in ("numpy", "ml_dtypes"), f"{layer} imports {module}: it is plain integers"
        if parts[0] in ("typer", "rich"):
            assert layer == "cli", f"{layer} imports {module}: only the command line may"


def test_import_is_light() -> None:
    code = (
        "import sys, numpy; before = set(sys.modules); import kvcupy; "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not LAZY & set(result.stdout.split())


def test_version_is_one() -> None:
    import kvcupy

    assert f'version = "{kvcupy.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_wheel_and_sdist_hold_kvcupy_alone(tmp_path: Path) -> None:
    pytest.importorskip("build")
    # A copy, since setuptools leaves its own folders in the tree that it builds.
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(tree)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    (sdist,) = tmp_path.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"kvcupy", wheel.name.partition("-py3")[0] + ".dist-info"}
    expected = {
        f"kvcupy/{path.relative_to(PACKAGE)}"
        for pattern in ("*.py", "py.typed", "*.cu", "*.cuh")
        for folder in (PACKAGE, PACKAGE / "cli", PACKAGE / "cuda")
        for path in folder.rglob(pattern)
    }
    assert expected <= set(names)
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert expected <= packed

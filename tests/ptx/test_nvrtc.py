"""The compiler behind the interpreter, and what the interpreter says when it does not know an instruction."""

import subprocess
import sys

import numpy as np
import pytest

import kvcupy.backends.ptx.nvrtc as nvrtc
from kvcupy.backends.ptx import CompileError, Module, UnknownInstruction, compile_cubin, compile_ptx
from kvcupy.errors import DeviceUnavailable

SOURCE = 'extern "C" __global__ void k(float* x) { x[threadIdx.x] *= 2.f; }'


@pytest.mark.parametrize("arch", [70, 80, 90])
def test_every_architecture_compiles_and_runs(run, arch):
    assert f".target sm_{arch}" in compile_ptx(SOURCE, f"compute_{arch}")
    x = np.arange(32, dtype=np.float32)
    run(SOURCE, 1, 32, x, arch=f"compute_{arch}")
    np.testing.assert_array_equal(x, np.arange(32) * 2)


@pytest.mark.parametrize("arch", [70, 90])
def test_machine_code_and_its_log(run, arch):
    code, log = compile_cubin(SOURCE, f"sm_{arch}")
    assert code.startswith(b"\x7fELF")
    assert "registers" in log
    assert "0 bytes spill stores" in log


def test_a_source_is_compiled_once(run):
    before = nvrtc._compile_ptx.cache_info().hits
    assert compile_ptx(SOURCE) is compile_ptx(SOURCE)
    assert nvrtc._compile_ptx.cache_info().hits > before


def test_errors_come_with_the_log(run):
    with pytest.raises(CompileError, match=r"identifier .nonsense. is undefined"):
        compile_ptx('extern "C" __global__ void k() { nonsense(); }')


def test_options_reach_the_compiler(run):
    assert "fma.rn" in compile_ptx('extern "C" __global__ void k(float* x) { x[0] = x[1] * x[2] + x[3]; }')
    assert "fma.rn" not in compile_ptx(
        'extern "C" __global__ void k(float* x) { x[0] = x[1] * x[2] + x[3]; }', options=["--fmad=false"]
    )


def test_a_missing_wheel_is_named(monkeypatch):
    monkeypatch.setattr(nvrtc, "_nvidia_folders", list)
    with pytest.raises(DeviceUnavailable, match="needs the package nvidia-cuda-nvrtc-cu12, which is not installed"):
        nvrtc._library.__wrapped__()
    with pytest.raises(DeviceUnavailable, match="nvidia-cuda-runtime-cu12"):
        nvrtc.include_folder.__wrapped__()


@pytest.mark.parametrize("layout", ["cuda_nvrtc/lib/libnvrtc.so.12", "cu13/lib/libnvrtc.so.13"])
@pytest.mark.skipif(sys.platform == "win32", reason="Linux names")
def test_both_layouts_of_the_wheels_are_found(monkeypatch, tmp_path, layout):
    library = tmp_path / layout
    library.parent.mkdir(parents=True)
    library.touch()
    include = tmp_path / ("cu13" if "cu13" in layout else "cuda_runtime") / "include"
    include.mkdir(parents=True)
    (include / "cuda_fp16.h").touch()
    loaded = []

    class Loaded:
        def __init__(self, path):
            loaded.append(path)
            self.nvrtcGetErrorString = type("function", (), {})()

    monkeypatch.setattr(nvrtc, "_nvidia_folders", lambda: [tmp_path])
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", Loaded)
    nvrtc._library.__wrapped__()
    assert loaded == [str(library)]
    assert nvrtc.include_folder.__wrapped__() == include


def test_an_unknown_instruction_is_named_with_its_line(run):
    source = """#line 1 "mine.cu"
extern "C" __global__ void k(unsigned* x) {
  asm volatile("vabsdiff4.u32.u32.u32 %0, %0, %0, %0;" : "+r"(x[0]));
}"""
    with pytest.raises(UnknownInstruction, match=r"mine\.cu:2: k: unknown instruction: vabsdiff4") as caught:
        Module.compile(source)["k"]
    assert caught.value.line.number == 2


def test_a_function_that_is_not_inlined_is_refused(run):
    source = """
    __device__ __noinline__ int f(int x) { return x > 0 ? x * 3 : 7; }
    extern "C" __global__ void k(int* x) { x[0] = f(x[1]); }
    extern "C" __global__ void other(int* x) { x[0] = 1; }"""
    module = Module.compile(source)
    assert set(module.names) == {"k", "other"}
    with pytest.raises(UnknownInstruction, match="call"):
        module["k"]
    assert module["other"].name == "other"


def test_importing_kvcupy_leaves_this_package_alone():
    code = "import sys, kvcupy; sys.exit(any(name.startswith('kvcupy.backends.ptx') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""The kernels compiled for every architecture, and what the compiler says of them."""

from __future__ import annotations

import itertools
import json
import random
import struct

import pytest

from kvcupy import DeviceUnavailable
from kvcupy.backends.base import STORAGE_DTYPES
from kvcupy.backends.ptx.nvrtc import CompileError, architectures, compile_cubin, version
from kvcupy.backends.source import CopyPagesVariant
from kvcupy.cli import run
from kvcupy.inspect import (
    ARCHITECTURES,
    Code,
    Disassembler,
    Inspected,
    compile_all,
    compile_code,
    inspected,
    random_shapes,
    shapes,
)
from kvcupy.inspect.machine_code import parse_log, parse_sass

try:
    MISSING = ""
    version()
except DeviceUnavailable as error:
    MISSING = str(error)

needs_compiler = pytest.mark.skipif(bool(MISSING), reason=MISSING)
needs_disassembler = pytest.mark.skipif(Disassembler.find() is None, reason="nvidia-cuda-nvdisasm is not installed")

KERNELS = {"append", "gather", "copy_pages", "decode_attention", "merge_partials", "merge_states"}
RANDOM_VARIANTS = 20


def assert_compile_without_spills(launches: list[Inspected], archs: list[str]) -> None:
    jobs = [(variant, arch) for variant in {launch.variant: None for launch in launches} for arch in archs]
    compiled = dict(zip(jobs, compile_all(jobs), strict=True))
    spilling = [
        f"{launch.kernel} on {arch} spills {code.spill_bytes} bytes: {launch.shape}"
        for launch in launches
        for arch in archs
        if launch.shape.spec.head_dim <= 256 and (code := compiled[launch.variant, arch][launch.kernel]).spill_bytes
    ]
    assert not spilling, "\n".join(spilling)


# The list


@needs_compiler
def test_the_list_holds_what_people_serve() -> None:
    launches = inspected(shapes())
    assert len({launch.variant for launch in launches}) <= 150
    assert {launch.kernel for launch in launches} == KERNELS
    decode = [launch.shape for launch in launches if launch.kernel == "decode_attention"]
    assert {shape.spec.dtype for shape in decode} == set(STORAGE_DTYPES)
    assert {shape.spec.head_dim for shape in decode} >= {1, 64, 80, 96, 112, 125, 128, 256, 512}
    assert {shape.group for shape in shapes()} == {1, 2, 4, 5, 7, 8, 16}
    for width in (2, 4, 8, 16):
        assert any(getattr(launch.variant, "load_bytes", 0) == width for launch in launches)
        assert any(getattr(launch.variant, "copy_bytes", 0) == width for launch in launches)


@needs_compiler
@pytest.mark.parametrize("arch", list(ARCHITECTURES))
def test_the_list_compiles_without_spills(arch: str) -> None:
    if arch not in architectures():
        pytest.skip(f"NVRTC {version()} makes no code for {arch}")
    assert_compile_without_spills(inspected(shapes()), [arch])


@needs_compiler
def test_random_variants_compile_without_spills() -> None:
    """One variant of each of many shapes that the list has not; other ones in every run."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    listed = {launch.variant for launch in inspected(shapes())}
    drawn = (rng.choice(inspected([shape])) for shape in random_shapes(seed))
    fresh = (launch for launch in drawn if launch.variant not in listed)
    archs = [arch for arch in ARCHITECTURES if arch in architectures()]
    assert_compile_without_spills(list(itertools.islice(fresh, RANDOM_VARIANTS)), archs)


@needs_compiler
def test_faults_of_the_compiler_reach_the_caller() -> None:
    with pytest.raises(CompileError, match="architecture"):
        list(compile_all([(CopyPagesVariant(16), "sm_1")]))


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_machine_code_is_whole(arch: str) -> None:
    """The ELF header's tables end with the file: no byte is lost on the way."""
    code, _ = compile_cubin(CopyPagesVariant(16).source(), arch)
    program_table, section_table = struct.unpack_from("<QQ", code, 32)
    sizes = struct.unpack_from("<HHHH", code, 54)
    assert max(program_table + sizes[0] * sizes[1], section_table + sizes[2] * sizes[3]) == len(code)


# What is read from the compiler's words

LOG = """\
ptxas info    : 84 bytes gmem, 168 bytes cmem[4]
ptxas info    : Compiling entry function 'merge_partials' for 'sm_80'
ptxas info    : Function properties for merge_partials
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 376 bytes cmem[0]
ptxas info    : Compile time = 94.302 ms
ptxas info    : Compiling entry function 'decode_attention' for 'sm_80'
ptxas info    : Function properties for decode_attention
ptxas         .     24 bytes stack frame, 20 bytes spill stores, 36 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 24 bytes cumulative stack size, 1240 bytes smem
ptxas info    : Compile time = 1134.775 ms
"""


def test_the_log_of_ptxas() -> None:
    assert parse_log(LOG) == {"merge_partials": Code(32, 0, 0), "decode_attention": Code(168, 56, 1240)}
    with pytest.raises(CompileError, match="nothing of the registers of k"):
        parse_log("ptxas info    : Compiling entry function 'k' for 'sm_80'\nptxas info    : something new")


SASS = """\
	.headerflags	@"EF_CUDA_SM80 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM80)"
//--------------------- .text.narrow              --------------------------
	.section	.text.narrow,"ax",@progbits
	.sectioninfo	@"SHI_REGISTERS=24"
        .global         narrow
narrow:
.text.narrow:
        /*0000*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;
.L_x_4:
        /*0010*/               @P0 EXIT ;
        /*0020*/                   LDG.E.U16.CONSTANT R10, [R10.64] ;
        /*0030*/                   LDS.128 R4, [R2] ;
        /*0040*/              @!P0 BRA `(.L_x_0) ;
.L_x_7:
        /*0050*/                   BRA `(.L_x_7);
        /*0060*/                   NOP;
        /*0070*/                   NOP;
.L_x_8:
//--------------------- .text.wide                --------------------------
	.section	.text.wide,"ax",@progbits
wide:
        /*0000*/                   LDG.E R0, desc[UR22][R4.64+0x8] ;
        /*0010*/              @!P0 LDG.E.LTC128B.64 R6, [R10.64] ;
        /*0020*/             @!UP0 LDGSTS.E.BYPASS.LTC128B.128 [R4], [R4.64] ;
        /*0030*/             @!UPT UIADD3 URZ, URZ, URZ, URZ ;
        /*10040*/                  EXIT ;
"""


def test_the_listing_of_nvdisasm() -> None:
    assert parse_sass(SASS) == {"narrow": (6, 2), "wide": (5, 16)}


@needs_compiler
@needs_disassembler
@pytest.mark.parametrize("arch", list(ARCHITECTURES))
def test_instructions_are_counted_where_they_can_be(arch: str) -> None:
    if arch not in architectures():
        pytest.skip(f"NVRTC {version()} makes no code for {arch}")
    code = compile_code(CopyPagesVariant(16), arch, Disassembler.find())["copy_pages"]
    assert code.registers <= 40
    if arch == "sm_70":
        assert (code.instructions, code.widest_load_bytes) == (None, None)
    else:
        assert code.instructions is not None
        assert 50 < code.instructions < 500
        assert code.widest_load_bytes == 16


# Occupancy


def test_occupancy_as_published() -> None:
    """CUDA C++ Best Practices Guide, "Calculating Occupancy": 37 registers on compute capability 7.0."""
    volta = ARCHITECTURES["sm_70"]
    assert (volta.resident_blocks(37, 0, 128), volta.occupancy(37, 0, 128)) == (12, 0.75)
    assert (volta.resident_blocks(37, 0, 320), volta.occupancy(37, 0, 320)) == (4, 0.625)
    assert ARCHITECTURES["sm_75"].occupancy(32, 0, 1024) == 1.0


@pytest.mark.parametrize(
    ("arch", "registers", "shared_bytes", "threads", "blocks"),
    [
        ("sm_70", 16, 0, 64, 32),
        ("sm_70", 225, 47_291, 480, 0),
        ("sm_75", 155, 11_874, 84, 4),
        ("sm_75", 67, 44_373, 128, 1),
        ("sm_80", 182, 0, 448, 0),
        ("sm_80", 113, 42_092, 183, 2),
        ("sm_86", 90, 29_435, 51, 3),
        ("sm_86", 66, 27_107, 224, 3),
        ("sm_89", 20, 0, 32, 24),
        ("sm_90", 102, 0, 352, 1),
        ("sm_90", 167, 8_576, 128, 3),
        ("sm_100", 211, 37_861, 18, 6),
        ("sm_100", 179, 16_580, 76, 2),
        ("sm_120", 33, 0, 53, 24),
        ("sm_120", 46, 13_717, 157, 6),
    ],
)
def test_occupancy_as_cuda_computes_it(
    arch: str, registers: int, shared_bytes: int, threads: int, blocks: int
) -> None:
    """Values of cuda_occupancy.h, cudaOccMaxActiveBlocksPerMultiprocessor, with the largest carveout."""
    assert ARCHITECTURES[arch].resident_blocks(registers, shared_bytes, threads) == blocks


# The command

FAST = ["inspect", "--kernel", "append,merge_states"]


@needs_compiler
@needs_disassembler
def test_inspect_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*FAST, "--arch", "sm_75,sm_90", "--dtype", "bfloat16", "--head-dim", "256", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    report = json.loads(captured.out)
    rows = report.pop("variants")
    assert report == {"schema": "kvcupy.inspect/1", "device": None, "gpu": None, "modelled": False}
    assert [(row["kernel"], row["arch"]) for row in rows] == [
        (kernel, arch) for kernel in ("append", "merge_states") for arch in ("sm_75", "sm_90")
    ]
    for row in rows:
        assert (row["dtype"], row["head_dim"], row["group"]) == ("bfloat16", 256, 4)
        assert (row["spill_bytes"], row["shared_bytes"]) == (0, 0)
        assert 10 < row["registers"] < 64
        assert 0.5 < row["occupancy"] <= 1
        assert row["instructions"] > 50
    assert rows[0]["widest_load_bytes"] == 16
    assert rows[0]["constants"] == {"page_size": 16, "row_bytes": 512, "padding_bytes": 0, "copy_bytes": 16}


@needs_compiler
def test_inspect_as_a_table_without_disassembler(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(Disassembler, "find", lambda: None)
    assert run([*FAST, "--arch", "sm_120"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "instructions need the package nvidia-cuda-nvdisasm, which is not installed\n"
    lines = captured.out.splitlines()
    assert lines[0].startswith("Compiled by NVRTC")
    assert max(map(len, lines)) <= 80
    row = next(line.split() for line in lines if line.startswith("float16"))
    assert row[:6] == ["float16", "128", "4", "16", "16", "sm_120"]
    assert row[-2:] == ["-", "-"]


@needs_compiler
def test_an_architecture_that_the_compiler_dropped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcupy.backends.ptx.nvrtc.architectures", lambda: ["sm_75"])
    assert run([*FAST, "--arch", "sm_70,sm_75", "--json"]) == 0
    captured = capsys.readouterr()
    assert "makes no code for sm_70: left out" in captured.err
    assert {row["arch"] for row in json.loads(captured.out)["variants"]} == {"sm_75"}


@needs_compiler
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kernel", "apend"], "--kernel must be all or some of append, gather"),
        (["--arch", "sm_60"], "--arch must be all or some of sm_70, sm_75"),
        (["--dtype", "int8"], "--dtype must be all or some of float16, bfloat16, float32, got 'int8'"),
        (["--head-dim", "3"], "--head-dim must be all or some of 1, 40, 64, 80"),
        (["--group", "x"], "--group must be all or some of 1"),
        (["--head-dim", "40", "--group", "16"], "no shape of the list has dtype float16, head_dim 40 and group 16"),
    ],
)
def test_bad_filters_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert words in captured.err

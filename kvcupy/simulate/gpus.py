"""GPU data sheets: what a modelled run may assume of the hardware. Published peaks, nothing measured."""

from __future__ import annotations

from dataclasses import dataclass

from kvcupy.simulate.names import find

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class GPU:
    """One GPU as its maker describes it.

    name: a lower-case slug.
    memory_bytes: device memory; the data sheet's "GB" are GiB on these boards.
    bandwidth_bytes_per_s: peak DRAM bandwidth.
    fp16_flops: peak dense FP16 tensor-core FLOP/s with FP32 accumulation, without structured sparsity.
    multiprocessors: streaming multiprocessors that are enabled.
    l2_bytes: L2 cache.
    clock_hz: maximum boost clock.
    source: where the numbers were published.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    fp16_flops: float
    multiprocessors: int
    l2_bytes: int
    clock_hz: float
    source: str


def _gpu(
    name: str,
    memory_gib: int,
    bandwidth_gb_per_s: float,
    fp16_tflops: float,
    multiprocessors: int,
    l2_mib: int,
    clock_mhz: float,
    source: str,
) -> GPU:
    return GPU(
        name=name,
        memory_bytes=memory_gib * GIB,
        bandwidth_bytes_per_s=bandwidth_gb_per_s * 1e9,
        fp16_flops=fp16_tflops * 1e12,
        multiprocessors=multiprocessors,
        l2_bytes=l2_mib * MIB,
        clock_hz=clock_mhz * 1e6,
        source=source,
    )


# Columns: GiB, GB/s, dense FP16 TFLOP/s, multiprocessors, L2 MiB, boost MHz.
GPUS: dict[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        _gpu("v100", 32, 900, 125, 80, 6, 1530, "NVIDIA Tesla V100 (SXM2) architecture white paper"),
        _gpu("t4", 16, 320, 65, 40, 4, 1590, "NVIDIA T4 data sheet, Turing white paper"),
        _gpu("a10", 24, 600, 125, 72, 6, 1695, "NVIDIA A10 data sheet"),
        _gpu("a30", 24, 933, 165, 56, 24, 1440, "NVIDIA A30 data sheet"),
        _gpu("a100-40gb", 40, 1555, 312, 108, 40, 1410, "NVIDIA A100 (SXM4) architecture white paper"),
        _gpu("a100-80gb", 80, 2039, 312, 108, 40, 1410, "NVIDIA A100 80GB (SXM4) data sheet"),
        _gpu("l4", 24, 300, 121, 58, 48, 2040, "NVIDIA L4 data sheet, Ada white paper"),
        _gpu("l40s", 48, 864, 362, 142, 96, 2520, "NVIDIA L40S data sheet"),
        _gpu("h100-sxm", 80, 3350, 989, 132, 50, 1980, "NVIDIA H100 SXM5 data sheet, Hopper white paper"),
        _gpu("h100-pcie", 80, 2039, 756, 114, 50, 1755, "NVIDIA H100 PCIe data sheet, Hopper white paper"),
        _gpu("h200", 141, 4800, 989, 132, 50, 1980, "NVIDIA H200 SXM data sheet"),
        _gpu("b200", 180, 8000, 2250, 148, 126, 1965, "NVIDIA HGX B200 data sheet"),
        _gpu("rtx-3090", 24, 936, 71, 82, 6, 1695, "NVIDIA GA102 white paper"),
        _gpu("rtx-4090", 24, 1008, 165, 128, 72, 2520, "NVIDIA Ada white paper"),
        _gpu("rtx-5090", 32, 1792, 209, 170, 96, 2407, "NVIDIA RTX Blackwell white paper"),
        _gpu("rtx-pro-6000", 96, 1792, 503, 188, 128, 2617, "NVIDIA RTX PRO Blackwell white paper"),
    )
}

_ALIASES = {
    "h100": "h100-sxm",
    "a100": "a100-80gb",
    "a100-40": "a100-40gb",
    "a100-80": "a100-80gb",
    "3090": "rtx-3090",
    "4090": "rtx-4090",
    "5090": "rtx-5090",
}


def find_gpu(name: str) -> GPU:
    """The data sheet of a GPU; case and punctuation do not matter. "h100" is the SXM board, "a100" the 80 GB.

    An unknown name is a ValueError that lists close ones.

    >>> find_gpu("H100").name
    'h100-sxm'
    """
    return find("gpu", name, GPUS, _ALIASES)

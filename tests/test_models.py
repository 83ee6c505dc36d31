"""Presets of models and GPUs, and the roofline made of them."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvcupy.simulate.gpus import GPUS, find_gpu
from kvcupy.simulate.models import MODELS, find_model
from kvcupy.simulate.timing import RooflineClock

SHAPES = Path(__file__).parents[2] / "shared" / "models.json"


def test_presets_agree_with_the_collected_shapes():
    if not SHAPES.exists():
        pytest.skip("needs ../shared/models.json")
    for shape in json.loads(SHAPES.read_text()):
        preset = MODELS[shape["name"].lower()]
        assert preset.num_layers == shape["kv_layers"], preset.name
        assert preset.num_q_heads == shape["q_heads"], preset.name
        assert preset.num_kv_heads == shape["kv_heads"], preset.name
        assert preset.head_dim == shape["head_dim"], preset.name
        assert preset.max_context == shape["max_context"], preset.name
        if preset.unsupported is None:
            assert preset.spec(row_align=1).bytes_per_token == shape["kv_bytes_per_token_fp16"]
            assert shape["mla"] is shape["sliding_window"] is shape["layer_groups"] is None
            assert shape["v_head_dim"] == shape["head_dim"]


def test_every_preset_gives_a_spec_or_a_reason():
    assert len(MODELS) >= 60
    for name, preset in MODELS.items():
        assert name == preset.name == name.lower()
        assert preset.num_q_heads % preset.num_kv_heads == 0
        assert 0 < preset.active_parameters <= preset.num_parameters
        assert preset.source
        if preset.unsupported is None:
            assert preset.spec().num_layers == preset.num_layers
        else:
            with pytest.raises(ValueError, match=f"model {name} is not supported: ") as error:
                preset.spec()
            assert "\n" not in str(error.value)


def test_parameter_counts():
    assert find_model("llama-3-8b").num_parameters == 8_030_000_000
    mixtral = find_model("mixtral-8x7b")
    assert (mixtral.num_parameters, mixtral.active_parameters) == (46_700_000_000, 12_900_000_000)


@pytest.mark.parametrize("name", ["llama-3-8b", "Llama 3 8B", "LLAMA_3_8B", "meta-llama/Llama-3-8B"])
def test_names_as_people_type_them(name):
    assert find_model(name).name == "llama-3-8b"


def test_unknown_names_list_close_ones():
    with pytest.raises(ValueError, match=r"unknown model 'lama-3-8b'; did you mean llama-3-8b, "):
        find_model("lama-3-8b")
    with pytest.raises(ValueError, match=r"unknown model '\?\?'; `kvcupy info` lists all"):
        find_model("??")
    with pytest.raises(ValueError, match=r"unknown gpu 'h1000'; did you mean .*h100"):
        find_gpu("h1000")


def test_gpus():
    assert find_gpu("H100") is find_gpu("h100 SXM") is GPUS["h100-sxm"]
    assert find_gpu("RTX PRO 6000").multiprocessors == 188
    names = [
        "v100",
        "t4",
        "a10",
        "a30",
        "a100-40",
        "a100-80",
        "l4",
        "l40s",
        "h100-pcie",
        "b200",
        "3090",
        "5090",
    ]
    assert all(find_gpu(name).name in GPUS for name in names)
    assert find_gpu("h200").bandwidth_bytes_per_s == 4.8e12
    for gpu in GPUS.values():
        # A board without structured sparsity, in units that were not mixed up: FLOPs per byte.
        assert 50 < gpu.fp16_flops / gpu.bandwidth_bytes_per_s < 500
        # 256 to 4,096 dense FP16 FLOPs per multiprocessor and cycle, from Turing to Blackwell.
        per_cycle = gpu.fp16_flops / gpu.multiprocessors / gpu.clock_hz
        assert 450 < per_cycle < 8400
        assert 16 << 30 <= gpu.memory_bytes <= 180 << 30
        assert 4 << 20 <= gpu.l2_bytes <= 128 << 20


def clock(model="llama-3-8b", **options):
    return RooflineClock(gpu=find_gpu("h100"), model=find_model(model), kv_bytes_per_token=131_072, **options)


def test_decode_is_bound_by_bytes():
    # 16.06 GB of weights, 1,000 tokens read, one written.
    (seconds,) = clock().decode_s(np.array([1000]), 1)
    assert seconds == pytest.approx((16.06e9 + 1001 * 131_072) / 3.35e12, rel=1e-12)
    (halved,) = clock(bandwidth_efficiency=0.5).decode_s(np.array([1000]), 1)
    assert halved == pytest.approx(2 * seconds)
    (weights8,) = clock(weight_bytes_per_parameter=1).decode_s(np.array([1000]), 1)
    assert weights8 == pytest.approx((8.03e9 + 1001 * 131_072) / 3.35e12)


def test_prefill_is_bound_by_arithmetic_when_long_and_by_weights_when_short():
    flops = 2 * 8.03e9 * 4096 + 4 * 32 * 32 * 128 * (4096 * 4097 // 2)
    assert clock().prefill_s(np.array([4096])) == pytest.approx(flops / 989e12, rel=1e-12)
    assert clock().prefill_s(np.array([1])) == pytest.approx((16.06e9 + 131_072) / 3.35e12, rel=1e-12)
    assert clock(compute_efficiency=0.5).prefill_s(np.array([4096])) == pytest.approx(2 * flops / 989e12)


def test_many_steps_at_once_have_the_bits_of_single_steps():
    contexts = np.array([17, 1000, 4095])
    at_once = clock().decode_s(contexts, 50)
    assert at_once.tolist() == [clock().decode_s(contexts + step, 1)[0] for step in range(50)]


def test_mixture_of_experts_reads_the_active_weights_for_one_token_and_all_for_many():
    mixtral = clock("mixtral-8x7b")
    assert mixtral.weight_bytes(1) == pytest.approx(2 * 12.9e9)
    assert 2 * 12.9e9 < mixtral.weight_bytes(2) < 2 * 2 * 12.9e9
    assert mixtral.weight_bytes(256) == pytest.approx(2 * 46.7e9)
    assert clock().weight_bytes(1) == clock().weight_bytes(256) == 16.06e9


@pytest.mark.parametrize(
    "options", [{"bandwidth_efficiency": 0}, {"compute_efficiency": 1.1}, {"weight_bytes_per_parameter": 0}]
)
def test_bad_clock_options_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        clock(**options)

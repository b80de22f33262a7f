import numpy as np
import pytest
from attrs import evolve

from alpa_interchange.cluster import DeviceSpec
from cost_model.kernel import (
    KERNEL_KINDS,
    KernelEfficiency,
    matmul_share,
    peak_flops,
    seconds,
    wave_share,
)

DEVICE = DeviceSpec(
    name="d", memory=1e10, memory_bandwidth=1e12, launch_latency=5e-6, num_units=4,
    peak_flops={"float32": 1e13, "float16": 1e14, "float64": 5e12},
)  # fmt: skip
PLAIN = KernelEfficiency(
    compute={"matmul": 0.5}, memory={"matmul": 0.5, "elementwise": 0.5}, half_bytes=0.0,
    half_depth=0.0,
)  # fmt: skip


def test_the_slower_of_arithmetic_and_memory_decides():
    assert seconds(DEVICE, PLAIN, 1e12, 8.0, "float16") == pytest.approx(5e-6 + 1e12 / 5e13)
    assert seconds(DEVICE, PLAIN, 1.0, 1e9, "float16") == pytest.approx(5e-6 + 1e9 / 5e11)


def test_nine_tiles_on_four_units_use_three_quarters_of_three_waves():
    assert wave_share(9, 4) == pytest.approx(9 / 12)
    assert wave_share(8, 4) == 1.0
    # 3 x 3 tiles of 128: the same through a matmul's shape
    assert matmul_share((384, 384, 1024), 4, PLAIN) == pytest.approx(9 / 12)


def test_partly_filled_tiles_waste_their_rest():
    assert matmul_share((64, 128, 512), 1, PLAIN) == pytest.approx(0.5)


def test_short_contractions_are_slow():
    deep = KernelEfficiency(half_depth=64.0)
    assert matmul_share((128, 128, 64), 1, deep) == pytest.approx(0.5)


def test_small_kernels_do_not_reach_the_memory_bandwidth():
    ramp = KernelEfficiency(memory={"elementwise": 1.0}, half_bytes=1e6)
    time = seconds(DEVICE, ramp, 0.0, 1e6, "float32", "elementwise") - DEVICE.launch_latency
    assert time == pytest.approx(2 * 1e6 / 1e12)


def test_arrays_give_what_their_numbers_give():
    flops, sizes = np.array([1e6, 1e12, 0.0]), np.array([1e9, 8.0, 0.0])
    each = [seconds(DEVICE, PLAIN, f, b, "float16") for f, b in zip(flops, sizes, strict=True)]
    assert seconds(DEVICE, PLAIN, flops, sizes, "float16") == pytest.approx(each)


def test_every_kind_of_kernel_has_a_time():
    for kind in KERNEL_KINDS:
        assert seconds(DEVICE, KernelEfficiency(), 1e9, 1e6, "float32", kind) > 0


def test_unlisted_dtypes_run_as_the_nearest_wider_one():
    assert peak_flops(DEVICE, "bfloat16") == 1e14
    assert peak_flops(DEVICE, "int32") == 1e13
    assert peak_flops(DEVICE, "complex128") == 5e12


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2fnuz", "float4_e2m1fn"])
def test_eight_and_four_bit_products_need_units_for_them(dtype):
    with pytest.raises(ValueError, match=rf"products of {dtype} need matrix units that device 'd'"):
        seconds(DEVICE, PLAIN, 1e9, 1e6, dtype)
    # a conversion is no product
    assert seconds(DEVICE, PLAIN, 1e9, 1e6, dtype, "elementwise") > 0


def test_formats_of_one_width_run_at_one_rate():
    device = evolve(DEVICE, peak_flops={**DEVICE.peak_flops, "float8_e4m3fn": 2e14})
    assert peak_flops(device, "float8_e5m2") == 2e14
    with pytest.raises(ValueError, match="float4_e2m1fn"):
        peak_flops(device, "float4_e2m1fn")


def test_cpus_compute_eight_bit_products_in_float32():
    assert peak_flops(evolve(DEVICE, platform="cpu"), "float8_e4m3fn") == 1e13


def test_without_a_shape_products_reach_the_mean_share_of_measured_ones():
    mean = evolve(PLAIN, unshaped={"matmul": 0.5})
    with_shape = seconds(DEVICE, mean, 1e12, 0.0, "float16", shape=(512, 512, 512))
    assert seconds(DEVICE, mean, 1e12, 0.0, "float16") == pytest.approx(2 * with_shape, rel=1e-2)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kernel kind must be one of"):
        seconds(DEVICE, PLAIN, 1.0, 1.0, "float32", "magic")

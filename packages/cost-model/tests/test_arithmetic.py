"""Which peak a product runs at, by what is asked of it."""

import pytest

from cost_model import CostModel, cluster, product_arithmetic
from cost_model.kernel import peak_flops


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("h100:1", "default", 494.7e12),
        ("h100:1", "high", 494.7e12),
        ("h100:1", "highest", 66.9e12),
        ("v100-16gb:1", "default", 15.7e12),  # has no tensorfloat32 units
        ("tpu-v4:1", "default", 275e12),
        ("tpu-v4:1", "high", 275e12 / 3),
        ("tpu-v4:1", "highest", 275e12 / 6),
        ("h100:1", "TF32_TF32_F32_X3", 494.7e12 / 3),
        ("h100:1", "BF16_BF16_F32", 989.4e12),
        ("h100:1", "BF16_BF16_F32_X6", 989.4e12 / 6),
        ("h100:1", "F32_F32_F32", 66.9e12),
    ],
)
def test_a_float32_product_runs_at_the_peak_of_the_precision_asked_for(name, precision, peak):
    device = CostModel(cluster(name)).device()
    dtype, passes = product_arithmetic("float32", precision, device.platform)
    assert peak_flops(device, dtype) / passes == pytest.approx(peak)


@pytest.mark.parametrize("precision", ["default", "high", "highest", "BF16_BF16_F32_X3"])
def test_a_cpu_computes_in_the_dtype_of_the_operands(precision):
    assert product_arithmetic("float32", precision, "cpu") == ("float32", 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("precision", ["default", "highest"])
def test_precision_is_of_float32_products_only(dtype, precision):
    assert product_arithmetic(dtype, precision, "gpu") == (dtype, 1)


def test_a_float8_algorithm_keeps_the_operands_dtype():
    found = product_arithmetic("float8_e5m2", "ANY_F8_ANY_F8_F32_FAST_ACCUM", "gpu")
    assert found == ("float8_e5m2", 1)


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="must be one of .* got 'exact'"):
        product_arithmetic("float32", "exact", "gpu")

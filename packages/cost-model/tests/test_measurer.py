import importlib.util
from typing import Any

import pytest

from cost_model import JaxMeasurer

needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is missing")


@pytest.fixture(scope="module")
def measurer():
    return JaxMeasurer(repeats=2, seconds=0.01)


@needs_jax
def test_the_machine_is_described(measurer):
    platform, kind, versions, memory = measurer.describe()
    assert platform in ("cpu", "gpu", "cuda", "tpu") and kind and "jax" in versions
    assert memory >= 0 and measurer.num_devices() >= 1


@needs_jax
def test_programs_take_time(measurer):
    assert 0 < measurer.matmul(64, 32, 16, "bfloat16", 1) < 10
    assert 0 < measurer.elementwise(1 << 10, "float32") < 10
    assert 0 < measurer.to_device(1 << 12) < 10
    forward, both = measurer.layer(64, 32, 1, "float32")
    assert 0 < forward < 10 and 0 < both < 10


@needs_jax
@pytest.mark.parametrize(
    "kind", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]
)
def test_every_collective_runs(measurer, kind):
    assert 0 < measurer.collective(kind, 1 << 12, measurer.num_devices()) < 10


@pytest.mark.gpu
@needs_jax
def test_a_gpu_is_calibrated_by_the_same_calls(measurer):
    if measurer.describe()[0] not in ("gpu", "cuda", "rocm"):
        pytest.skip("needs a GPU that jax can use")
    assert measurer.matmul(4096, 4096, 4096, "bfloat16", 1) < 0.1


def test_without_jax_the_extra_is_named(monkeypatch):
    def refuse(name, *args):
        raise ImportError(name)

    monkeypatch.setattr("cost_model.measurer.importlib.import_module", refuse)
    with pytest.raises(ImportError, match=r"cost-model\[calibrate\]"):
        JaxMeasurer()


@needs_jax
def test_kernels_are_repeated_in_their_programs_on_accelerators(measurer, monkeypatch):
    monkeypatch.setattr(JaxMeasurer, "_on_cpu", False)
    small: list[tuple[str, tuple[Any, ...]]]
    small = [("matmul", (64, 32, 16, dtype, 1)) for dtype in ("tensorfloat32", "float8_e4m3fn")]
    small += [("elementwise", (1 << 10, "float32")), ("layer", (64, 32, 1, "float8_e4m3fn"))]
    measurer.prepare(small)
    for method, arguments in small:
        taken = getattr(measurer, method)(*arguments)
        assert all(0 < each < 10 for each in (taken if method == "layer" else (taken,)))

import pytest
from attrs import evolve

from cost_model.catalogue import DEVICES
from cost_model.kernel import KernelEfficiency, seconds
from cost_model.kernel_fit import fit_kernels
from cost_model.kernel_rows import read_kernels

TRUE = KernelEfficiency(
    compute={"matmul": 0.6, "attention": 0.3, "convolution": 0.5},
    memory=dict(KernelEfficiency().memory) | {"elementwise": 0.5, "softmax": 0.9},
    half_bytes=1e6,
    half_depth=64.0,
)
OPERATORS = (
    "enc-attention-qkv", "enc-MLP-GEMM-1", "enc-attention-score", "enc-attention-softmax",
    "enc-1st-layernorm", "enc-MLP-gelu",
)  # fmt: skip
MODELS = ("gpt_350M", "gpt_1_3B", "gpt_13B")


def test_efficiencies_that_made_the_times_are_found(operator_archive):
    device = evolve(DEVICES["v100-32gb"], launch_latency=1e-5)
    rows = [
        evolve(
            row,
            seconds=seconds(device, TRUE, row.flops, row.bytes, "float16", row.kind, row.shape),
        )
        for row in read_kernels(operator_archive("aceso_v100", MODELS, OPERATORS))
    ]
    fit = fit_kernels(rows, "made up")
    assert (fit.device, fit.num_rows) == ("v100-32gb", 72)
    assert fit.efficiency.compute["matmul"] == pytest.approx(0.6, rel=0.1)
    assert fit.efficiency.memory["softmax"] == pytest.approx(0.9, rel=0.1)
    assert fit.median_error["softmax"] < 0.05
    # without their shapes products are known less well, and the deviation says so
    assert 0.02 <= fit.efficiency.error("matmul") < 0.2 < 0.3 < fit.default_error["attention"]


def test_kernels_that_change_from_model_to_model_are_uncertain(operator_archive):
    slow = {"gpt_350M": 1.0, "gpt_1_3B": 1.5, "gpt_13B": 2.5}
    rows = [
        evolve(row, seconds=1e-12 * row.bytes * slow[row.model])
        for row in read_kernels(operator_archive("aceso_v100", MODELS, OPERATORS))
    ]
    assert fit_kernels(rows, "made up").efficiency.error("softmax") > 0.2

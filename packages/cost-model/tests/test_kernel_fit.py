import pytest
from attrs import evolve

from cost_model.catalogue import DEVICES
from cost_model.kernel import KernelEfficiency, seconds
from cost_model.kernel_fit import fit_kernels, operator_rows

TRUE = KernelEfficiency(
    compute={"matmul": 0.6, "attention": 0.3, "convolution": 0.5},
    memory=dict(KernelEfficiency().memory) | {"elementwise": 0.5, "softmax": 0.9},
    half_bytes=1e6,
    half_depth=64.0,
)


def profile(tmp_path, time):
    names = (
        "enc-attention-qkv", "enc-MLP-GEMM-1", "enc-attention-score", "enc-attention-softmax",
        "enc-1st-layernorm", "enc-MLP-gelu", "unknown-operator",
    )  # fmt: skip
    for model in ("350M", "1_3B", "13B"):
        for batch in (1, 4):
            for tensor in (1, 4):
                path = tmp_path / f"gpt_{model}_mbs{batch}_tp{tensor}_algo0.csv"
                path.write_text("op_name,forward-compute\n" + "".join(f"{n},1\n" for n in names))
    rows = list(operator_rows(tmp_path))
    return [evolve(row, seconds=time(row)) for row in rows]


def test_efficiencies_that_made_the_times_are_found(tmp_path):
    device = evolve(DEVICES["v100-32gb"], launch_latency=1e-5)
    rows = profile(
        tmp_path,
        lambda row: seconds(device, TRUE, row.flops, row.bytes, "float16", row.kind, row.shape),
    )
    fit = fit_kernels(rows, "v100-32gb", "made up")
    assert fit.efficiency.compute["matmul"] == pytest.approx(0.6, rel=0.1)
    assert fit.efficiency.memory["softmax"] == pytest.approx(0.9, rel=0.1)
    assert fit.test_mape < 0.05


def test_the_largest_model_is_held_out(tmp_path):
    rows = profile(tmp_path, lambda row: 1e-3)
    fit = fit_kernels(rows, "v100-32gb", "made up")
    assert (fit.num_rows, fit.test_rows) == (48, 24)
    assert {row.name for row in rows}.isdisjoint({"unknown-operator"})

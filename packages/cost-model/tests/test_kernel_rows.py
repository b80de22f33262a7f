import json

import pytest

from cost_model.kernel_rows import read_kernels


def test_operators_are_read_from_an_archive_by_device(operator_archive):
    names = ("enc-attention-qkv", "enc-MLP-GEMM-2", "unknown-operator")
    rows = list(read_kernels(operator_archive("aceso_v100", ("gpt_350M",), names)))
    assert {row.device for row in rows} == {"v100-32gb"}
    # row-parallel operators hold an all-reduce where tensor parallelism is more than 1
    assert [row.name for row in rows].count("enc-MLP-GEMM-2") == 2
    assert [row.name for row in rows].count("enc-attention-qkv") == 4
    assert "unknown-operator" not in {row.name for row in rows}
    assert rows[0].shape == (2048, 3072, 1024) and rows[0].flops == 2.0 * 2048 * 3072 * 1024


def test_efficiencies_by_shape_are_read_as_seconds(tmp_path):
    # MooreThreads/SimuMax v1.2, Apache-2.0
    shape = "b=1, m=4096, k=8192, n=10240, layout=TN, accumulate=False, out_dtype=bf16"
    table = {"tflops": 2250.0, "accurate_efficient_factor": {shape: 0.6451614102335537}}
    path = tmp_path / "b200.json"
    path.write_text(json.dumps({"accelerator": {"op": {"matmul": table}}}))
    (row,) = read_kernels(path)
    assert row.device == "b200" and row.shape == (4096, 10240, 8192)
    assert row.seconds == pytest.approx(2.0 * 4096 * 10240 * 8192 / (0.64516 * 2250e12), rel=1e-4)

"""Measured kernels of transformer layers, read from published profiles.

`operator_rows` reads Aceso's format, forward microseconds per operator of a layer in half precision
(PyTorch): V100 by microsoft/SuperScaler (MIT), six GPU kinds by eth-easl/sailor (MIT).
`product_rows` reads SimuMax's efficiencies by shape (MooreThreads/SimuMax, Apache-2.0).
"""

from __future__ import annotations

import csv
import io
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

# hidden size and heads of the profiled models; sequence length 2048 (Aceso, table 3; Zhang et al.
# 2022; GPT-Neo, EleutherAI)
_MODELS = {
    "gpt_350M": (1024, 16), "gpt_1_3B": (2048, 32), "gpt_2_6B": (2560, 32), "gpt_6_7B": (4096, 32),
    "gpt_13B": (5120, 40), "OPT-350": (1024, 16), "OPT-30": (7168, 56), "GPT-Neo-2.7": (2560, 20),
}  # fmt: skip
_SEQ = 2048
_FOLDERS = {  # folder of a profile -> the device it was measured on
    "aceso_v100": "v100-32gb", "GH-96": "gh200", "A100-40": "a100-40gb", "V100-16": "v100-16gb",
    "RTX-3090": "rtx-3090", "RTX-2080": "rtx-2080ti", "Titan-RTX": "rtx-titan",
}  # fmt: skip

_OUT_OF_MEMORY = 1e7  # microseconds, which stand for operators that found no memory


@frozen(kw_only=True)
class OperatorRow:
    """One measured operator."""

    device: str
    name: str
    kind: str
    flops: float
    bytes: float
    shape: tuple[int, ...] | None
    seconds: float
    model: str  # rows of one model are fitted on or held out together
    micro_batch: int = 1
    dtype: str = "float16"


def operator_rows(archive: Path) -> Iterator[OperatorRow]:
    """Yield the forward operators of the profiles in a tar file that the model can describe.

    Row-parallel operators are taken at t = 1 only, since their times contain the all-reduce. The
    profiles of GPT-Neo on GH200 repeat those of OPT-350 and are left out.
    """
    pattern = r"(?P<folder>[\w-]+)/(?:profiled-data-fp16/)?(?P<model>.+)_mbs(\d+)_tp(\d)_algo0.csv"
    with tarfile.open(archive) as files:
        for member in sorted(files.getmembers(), key=lambda member: member.name):
            found = re.fullmatch(pattern, member.name)
            if found is None or found["folder"] not in _FOLDERS or found["model"] not in _MODELS:
                continue
            if (found["folder"], found["model"]) == ("GH-96", "GPT-Neo-2.7"):
                continue
            file = files.extractfile(member)
            if file is None:
                continue
            described = _describe(int(found[3]), int(found[4]), *_MODELS[found["model"]])
            for row in csv.DictReader(io.TextIOWrapper(file, encoding="utf-8")):
                measured = float(row["forward-compute"])
                if row["op_name"] in described and 0 < measured < _OUT_OF_MEMORY:
                    kind, flops, bytes, shape = described[row["op_name"]]
                    yield OperatorRow(
                        device=_FOLDERS[found["folder"]], name=row["op_name"], kind=kind,
                        flops=flops, bytes=bytes, shape=shape, seconds=measured * 1e-6,
                        model=found["model"], micro_batch=int(found[3]),
                    )  # fmt: skip


def _describe(
    micro_batch: int, tensor: int, hidden: int, heads: int
) -> dict[str, tuple[str, float, float, tuple[int, ...] | None]]:
    """Return operator name -> (kind, FLOPs, bytes, matmul shape) on one device, half precision."""
    tokens = micro_batch * _SEQ
    depth, local = hidden // heads, micro_batch * heads // tensor

    def matmul(m: int, n: int, k: int) -> tuple[str, float, float, tuple[int, ...] | None]:
        return "matmul", 2.0 * m * n * k, 2.0 * (m * k + n * k + m * n), (m, n, k)

    scores = float(local * _SEQ * _SEQ)
    states = float(tokens * hidden)
    found = {
        "enc-attention-qkv": matmul(tokens, 3 * hidden // tensor, hidden),
        "enc-MLP-GEMM-1": matmul(tokens, 4 * hidden // tensor, hidden),
        "enc-attention-score": ("attention", 2 * scores * depth, 2 * scores,
                                (local, _SEQ, _SEQ, depth)),
        "enc-attention-context": ("attention", 2 * scores * depth, 2 * scores,
                                  (local, _SEQ, depth, _SEQ)),
        "enc-attention-softmax": ("softmax", 5 * scores, 4 * scores, None),
        "enc-attention-dropout": ("elementwise", scores, 5 * scores, None),
        "enc-1st-layernorm": ("normalisation", 8 * states, 4 * states, None),
        "enc-MLP-gelu": ("elementwise", 32 * states / tensor, 16 * states / tensor, None),
        "enc-post-attention-dropout": ("elementwise", 2 * states, 11 * states, None),
    }  # fmt: skip
    if tensor == 1:
        found["enc-attention-dense"] = matmul(tokens, hidden, hidden)
        found["enc-MLP-GEMM-2"] = matmul(tokens, hidden, 4 * hidden)
    return found


def product_rows(path: Path) -> Iterator[OperatorRow]:
    """Yield the matmuls of SimuMax's table for B200; shapes that share m are held out together."""
    table = json.loads(path.read_text("utf-8"))["accelerator"]["op"]["matmul"]
    for described, share in table["accurate_efficient_factor"].items():
        fields = dict(part.split("=") for part in described.split(", "))
        m, n, k = (int(fields[name]) for name in "mnk")
        width = 4 if fields["out_dtype"] == "fp32" else 2
        flops = 2.0 * m * n * k
        yield OperatorRow(
            device="b200", name=described, kind="matmul", flops=flops,
            bytes=2.0 * (m * k + n * k) + width * (1 + (fields["accumulate"] == "True")) * m * n,
            shape=(m, n, k), seconds=flops / (share * table["tflops"] * 1e12),
            model=f"m={m}", dtype="bfloat16",
        )  # fmt: skip


def read_kernels(path: Path) -> Iterator[OperatorRow]:
    """Yield the rows of a profile: an archive in Aceso's format or SimuMax's JSON."""
    return product_rows(path) if path.suffix == ".json" else operator_rows(path)

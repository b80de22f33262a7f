"""Fits kernel efficiencies to measured operators of transformer layers.

    python -m cost_model.kernel_fit OPERATORS_DIRECTORY [OUT]

reads the Aceso profile `gpt_<size>_mbs<b>_tp<t>_algo0.csv` (forward microseconds per operator,
PyTorch 1.12, V100-32GB, float16) and writes one `KernelEfficiency` per device kind. Row-parallel
operators are used at t = 1 only, since their times contain the all-reduce.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from attrs import evolve, frozen

from alpa_interchange.cluster import DeviceSpec
from alpa_interchange.document import save
from cost_model.catalogue import DEVICES
from cost_model.kernel import KernelEfficiency, seconds
from cost_model.kernel_table import KernelFit, KernelTable
from cost_model.least_squares import fit_parameters

# hidden size and heads of the profiled models; sequence length 2048 (Aceso, table 3)
_MODELS = {
    "350M": (1024, 16), "1_3B": (2048, 32), "2_6B": (2560, 32), "6_7B": (4096, 32),
    "13B": (5120, 40),
}  # fmt: skip
_SEQ = 2048


@frozen(kw_only=True)
class OperatorRow:
    """One measured operator."""

    name: str
    kind: str
    flops: float
    bytes: float
    shape: tuple[int, ...] | None
    seconds: float
    model: str


def operator_rows(directory: Path) -> Iterator[OperatorRow]:
    """Yield the forward operators of the profile in `directory` that the model can describe."""
    for path in sorted(directory.glob("gpt_*_algo0.csv")):
        name = re.fullmatch(r"gpt_(\w+)_mbs(\d)_tp(\d)_algo0", path.stem)
        if not name or name[1] not in _MODELS:
            continue
        hidden, heads = _MODELS[name[1]]
        described = _describe(int(name[2]), int(name[3]), hidden, heads)
        with path.open(encoding="utf-8") as stream:
            for row in csv.DictReader(stream):
                if row["op_name"] in described:
                    kind, flops, bytes, shape = described[row["op_name"]]
                    yield OperatorRow(
                        name=row["op_name"], kind=kind, flops=flops, bytes=bytes, shape=shape,
                        seconds=float(row["forward-compute"]) * 1e-6, model=name[1],
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


def fit_kernels(rows: list[OperatorRow], device_name: str, source: str) -> KernelFit:
    """Return the efficiencies that explain `rows` on `device_name`; 13B rows are not fitted on."""
    device = DEVICES[device_name]
    fitted = [row for row in rows if row.model != "13B"]
    held = [row for row in rows if row.model == "13B"]
    start = {
        "compute.matmul": 0.8, "compute.attention": 0.4, "memory.matmul": 0.85,
        "memory.attention": 0.8, "memory.normalisation": 0.7, "memory.elementwise": 0.7,
        "memory.softmax": 0.7,
        "half_bytes": 2e6, "half_depth": 96.0, "launch": 3e-5,
    }  # fmt: skip
    bounds = {name: (0.05, 0.98) for name in start if name.startswith(("compute", "memory"))}
    bounds |= {"half_bytes": (1e4, 1e8), "half_depth": (1.0, 1000.0), "launch": (1e-6, 2e-4)}

    def predict(values: Mapping[str, float], rows: list[OperatorRow]) -> np.ndarray:
        efficiency = _efficiency(values, source)
        timed = evolve(device, launch_latency=values["launch"])
        return np.log([_seconds(timed, efficiency, row) for row in rows])

    measured = np.array([row.seconds for row in fitted])
    values = fit_parameters(lambda x: predict(x, fitted), measured, start, bounds, prior=0.5)
    errors = np.abs(np.exp(predict(values, held) - np.log([row.seconds for row in held])) - 1)
    return KernelFit(
        device=device_name,
        efficiency=_efficiency(values, source),
        launch_latency=values["launch"],
        num_rows=len(fitted),
        test_rows=len(held),
        test_mape=float(errors.mean()),
        by_kind={
            kind: float(
                np.mean([e for e, row in zip(errors, held, strict=True) if row.kind == kind])
            )
            for kind in dict.fromkeys(row.kind for row in held)
        },
    )


def _efficiency(values: Mapping[str, float], source: str) -> KernelEfficiency:
    default = KernelEfficiency()
    compute, memory = dict(default.compute), dict(default.memory)
    for name, value in values.items():
        group, _, kind = name.partition(".")
        if group == "compute":
            compute[kind] = value
        elif group == "memory":
            memory[kind] = value
    return KernelEfficiency(
        compute=compute,
        memory=memory,
        half_bytes=values["half_bytes"],
        half_depth=values["half_depth"],
        source=source,
    )


def _seconds(device: DeviceSpec, efficiency: KernelEfficiency, row: OperatorRow) -> float:
    time = seconds(
        device,
        efficiency,
        row.flops,
        row.bytes,
        "float16",
        row.kind,
        row.shape,
    )
    return float(time)


def main(arguments: list[str]) -> None:
    """Fit the operators in the directory `arguments[0]` and write them to `arguments[1]`."""
    default = Path(__file__).parent / "data" / "kernels.json"
    rows = list(operator_rows(Path(arguments[0])))
    fit = fit_kernels(
        rows, "v100-32gb", "microsoft/SuperScaler (Aceso) operator profile, PyTorch 1.12, float16"
    )
    save(KernelTable(fits=(fit,)), Path(arguments[1]) if len(arguments) > 1 else default)
    print(
        f"{fit.device}: {fit.num_rows} operators fitted, MAPE {fit.test_mape:.1%} on "
        f"{fit.test_rows} of a model not fitted on; launch {fit.launch_latency * 1e6:.0f} us"
    )
    for kind, error in fit.by_kind.items():
        print(f"  {kind:14} MAPE {error:.1%}")
    for kind, share in fit.efficiency.compute.items():
        print(f"  compute {kind:12} {share:.2f} of peak")
    for kind, share in fit.efficiency.memory.items():
        print(f"  memory  {kind:12} {share:.2f} of bandwidth")


if __name__ == "__main__":
    main(sys.argv[1:])

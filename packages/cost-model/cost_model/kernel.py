"""Time of one kernel on one device: a roofline with measured efficiencies.

    seconds = launch + max(flops / (peak * c * w), bytes / (bandwidth * m * r))    -> seconds()

with c and m the shares of peak that large kernels of a kind reach (`KernelEfficiency`), w the share
of useful work in the last wave of tiles of a matmul (-> wave_share()), and r = bytes / (bytes +
half) the ramp of small kernels that do not fill the memory system. Without a shape w is the mean of
the shapes that were measured (`unshaped`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from attrs import field, frozen

from alpa_interchange.cluster import DeviceSpec

KERNEL_KINDS = (
    "matmul",
    "convolution",
    "attention",
    "normalisation",
    "softmax",
    "elementwise",
    "gather",
    "scatter",
    "optimizer",
)

_NARROW = re.compile(r"float(4|6|8)_\w+")
DATA_SHEET = "data sheet only"
# log error of the default shares, the mean over the device kinds with measured operators of what
# `python -m cost_model.kernel_fit` prints for them
UNMEASURED = 0.3


@frozen(kw_only=True)
class KernelEfficiency:
    """Shares of a device's peaks that kernels reach, by kernel kind; sizes in flop and bytes."""

    compute: Mapping[str, float] = field(
        factory=lambda: {"matmul": 0.80, "convolution": 0.55, "attention": 0.50}
    )
    memory: Mapping[str, float] = field(
        factory=lambda: {
            "matmul": 0.85,
            "convolution": 0.80,
            "attention": 0.80,
            "normalisation": 0.70,
            "softmax": 0.80,
            "elementwise": 0.85,
            "gather": 0.50,
            "scatter": 0.40,
            "optimizer": 0.80,
        }
    )
    half_bytes: float = 2e6  # bytes at which a kernel reaches half of its memory bandwidth
    half_depth: float = 96.0  # contracted size at which a matmul reaches half of its peak
    tile: tuple[int, int] = (128, 128)  # rows and columns of one tile of a matmul's result
    # shares of `compute` that products reach on average where no shape is given
    unshaped: Mapping[str, float] = field(factory=dict)
    # log error to expect by kind, 1 standard deviation; what is not listed has `UNMEASURED`
    deviation: Mapping[str, float] = field(factory=dict)
    source: str = f"{DATA_SHEET}: shares typical of current GPUs"

    def error(self, kind: str) -> float:
        """Return the standard deviation of log(measured / predicted) seconds of kernels."""
        return self.deviation.get(kind, UNMEASURED)


def wave_share(num_tiles: float, num_units: int) -> float:
    """Return the share of useful work when `num_tiles` tiles run in waves of `num_units`.

    9 tiles on 4 units take 3 waves and use 9 / 12 of them.
    """
    if num_units <= 1 or num_tiles <= 0:
        return 1.0
    return num_tiles / (math.ceil(num_tiles / num_units) * num_units)


def matmul_share(shape: tuple[int, ...], num_units: int, efficiency: KernelEfficiency) -> float:
    """Return the share of its best rate that a matmul of `shape` ([batch,] m, n, k) reaches.

    Product of the useful share of edge tiles, of the last wave, and of the contraction's pipeline
    fill k / (k + half_depth).
    """
    *batch, m, n, k = shape
    rows, columns = efficiency.tile
    tiles_m, tiles_n = math.ceil(m / rows), math.ceil(n / columns)
    edges = (m / (tiles_m * rows)) * (n / (tiles_n * columns))
    waves = wave_share(math.prod(batch) * tiles_m * tiles_n, num_units)
    return max(edges * waves, 0.02) * k / (k + efficiency.half_depth)


def seconds(
    device: DeviceSpec,
    efficiency: KernelEfficiency,
    flops: Any,
    bytes: Any,
    dtype: str,
    kind: str = "matmul",
    shape: tuple[int, ...] | None = None,
) -> Any:
    """Return the seconds of a kernel of `kind`; `flops` and `bytes` are numbers or equal arrays."""
    memory_share = efficiency.memory.get(kind)
    if memory_share is None:
        raise ValueError(f"kernel kind must be one of {KERNEL_KINDS}, got {kind!r}")
    compute_share = efficiency.compute.get(kind, 0.5)
    if kind in ("matmul", "convolution", "attention"):
        peak = peak_flops(device, dtype) * device.sustained
        if shape is not None:
            compute_share *= matmul_share(shape, device.num_units, efficiency)
        else:
            compute_share *= efficiency.unshaped.get(kind, 1.0)
    else:
        peak = device.peak_flops.get("float32") or peak_flops(device, dtype)
    compute = flops / (peak * compute_share)
    memory = (bytes + efficiency.half_bytes * (bytes != 0)) / (
        device.memory_bandwidth * memory_share
    )
    if isinstance(compute, np.ndarray) or isinstance(memory, np.ndarray):
        return device.launch_latency + np.maximum(compute, memory)
    return device.launch_latency + (compute if compute > memory else memory)


def peak_flops(device: DeviceSpec, dtype: str) -> float:
    """Return the dense flop/s of `device` in `dtype`; unlisted dtypes run as the next wider.

    Eight- and four-bit floats do not: where a GPU or TPU has no units for them, compilers widen the
    operands and the product is slower than in half precision, so asking for it is a ValueError.
    CPUs compute them in float32.
    """
    peaks = device.peak_flops
    if dtype in peaks:
        return peaks[dtype]
    narrow = _NARROW.fullmatch(dtype)
    if narrow is not None and device.platform != "cpu":
        # one rate for all formats of a width; the catalogue lists the common ones
        same = [peak for name, peak in peaks.items() if name.startswith(f"float{narrow[1]}_")]
        if same:
            return same[0]
        raise ValueError(
            f"products of {dtype} need matrix units that device {device.name!r} does not have; it "
            f"has peak flop/s for {', '.join(sorted(peaks))}: cast the operands to one of these, "
            "or plan for a device with such units"
        )
    if dtype.startswith(("complex", "float64", "int64", "uint64")):
        return peaks.get("float64", min(peaks.values()))
    if dtype in ("bfloat16", "float16"):
        return peaks.get("float16", peaks.get("float32", min(peaks.values())))
    return peaks.get("float32", min(peaks.values()))

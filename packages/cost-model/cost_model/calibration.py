"""Measures a machine and fits a profile to it.

The measurements are a fixed list of small programs (`measurements`), scaled by a first matmul so
that the whole takes under a minute on a CPU and less on an accelerator. The profile keeps every
sample; `layer` samples are not fitted on, they say how well the fit predicts something real.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from attrs import evolve

from alpa_interchange.cluster import DeviceSpec, LinkSpec
from cost_model.catalogue import catalogue_device
from cost_model.host import HOST_PROFILE, host_memory
from cost_model.kernel import KernelEfficiency, seconds
from cost_model.least_squares import fit_parameters
from cost_model.link_table import bus_factor, fit_line
from cost_model.measurer import Measurement, Measurer
from cost_model.profile import Profile, Sample

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
DTYPES = ("float32", "bfloat16")
ON_ACCELERATORS = ("tensorfloat32",)  # float32 products at less than highest precision
NARROW = "float8_e4m3fn"  # where the catalogue's device has units for it

Progress = Callable[[str, int, int], None]  # (what runs next, position, how many)
_PEAK_SHARE = 0.9  # of a fitted peak that large matmuls reach; the peak is fitted to go with it


def calibrate(
    measurer: Measurer, name: str | None = None, progress: Progress | None = None
) -> Profile:
    """Return the profile of the machine that `measurer` times programs on."""
    platform, kind, versions, memory = measurer.describe()
    known = catalogue_device(kind)
    narrow = known is not None and NARROW in known.peak_flops
    samples = tuple(_measure(measurer, platform, narrow, memory, progress))
    count = measurer.num_devices()
    shared = platform == "cpu"
    base = known or DeviceSpec(
        name="cpu" if shared else re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-") or platform,
        memory=memory or host_memory() * 0.8,
        memory_bandwidth=1e10,
        peak_flops={"float32": 1e10},
        platform=platform if platform in ("cpu", "tpu") else "gpu",
    )
    device, efficiency = _fit_device(base, samples, shared)
    device = evolve(device, memory=memory or device.memory, source=f"measured: {kind}, {versions}")
    default = HOST_PROFILE if shared else device.name
    return Profile(
        name=name or default,
        date=datetime.date.today().isoformat(),
        driver=versions,
        device=device,
        devices_per_host=count,
        intra_host=_fit_link(samples, count, device, shared),
        efficiency=efficiency,
        host_link=_fit_host_link(samples),
        shared_compute=shared,
        samples=samples,
    )


def measurements(
    unit: int, platform: str, num_devices: int, narrow: bool = False, memory: float = 0.0
) -> list[Measurement]:
    """Return (method, arguments) of everything that is timed; `unit` scales matmul sizes, `narrow`
    adds float8, layers that may not fit in `memory` bytes are left out (0: not known)."""
    todo: list[Measurement] = []
    more = (NARROW,) if narrow else ()
    for dtype in (*DTYPES, *(() if platform == "cpu" else ON_ACCELERATORS), *more):
        for m, n, k in (
            (unit, unit, unit), (unit // 2, unit // 2, unit // 2), (unit, unit, unit // 8),
            (unit, unit // 8, unit), (unit // 4, unit, unit), (unit // 4, unit // 4, unit // 4),
        ):  # fmt: skip
            todo.append(("matmul", (max(m, 16), max(n, 16), max(k, 16), dtype, 1)))
    if num_devices > 1:
        todo.append(("matmul", (unit, unit, unit, "float32", num_devices)))
    largest = 24 if platform == "cpu" else 28
    for power in range(16, largest + 1, 2):
        todo.append(("elementwise", (1 << power, "float32")))
    if num_devices > 1:
        for kind in COLLECTIVES:
            for power in (12, 16, 20, 22 if platform == "cpu" else 26):
                todo.append(("collective", (kind, 1 << power, num_devices)))
    if platform != "cpu":  # there, host memory is device memory and nothing is copied
        todo += [("to_device", (1 << power,)) for power in (16, 20, 24)]
    hidden = max(64, unit // 4 // 64 * 64)
    widths: tuple[int, ...] = (hidden, 2 * hidden)
    if platform != "cpu":
        widths = (hidden // 2, hidden, 2 * hidden, 4 * hidden)
        widths = tuple(w for w in widths if not memory or _layer_bytes(w, 2048) < memory / 2)
    for dtype in (*DTYPES, *more):
        for width in widths:
            todo.append(("layer", (width, 256 if platform == "cpu" else 2048, 1, dtype)))
    return todo


def _layer_bytes(hidden: int, seq: int) -> float:
    """Return about what a float32 layer takes with its gradients: weights twice, and scores, their
    softmax and the gradients of both."""
    return 4.0 * (2 * 12 * hidden**2 + 4 * max(1, hidden // 64) * seq**2)


def _measure(
    measurer: Measurer, platform: str, narrow: bool, memory: float, progress: Progress | None
) -> Iterator[Sample]:
    probe = measurer.matmul(512, 512, 512, "float32", 1)
    # a cube of `unit` takes about 60 ms at the rate of the probe
    unit = int(512 * min(16.0, max(1.0, (0.06 / probe) ** (1 / 3))) / 64) * 64
    todo = measurements(unit, platform, measurer.num_devices(), narrow, memory)
    if progress is not None:
        progress("compiling", 0, len(todo))
    measurer.prepare(todo)
    for position, (method, arguments) in enumerate(todo):
        if progress is not None:
            progress(f"{method} {' '.join(map(str, arguments))}", position, len(todo))
        yield from _sample(measurer, method, arguments)
    if progress is not None:
        progress("done", len(todo), len(todo))


def _sample(measurer: Measurer, method: str, arguments: tuple[Any, ...]) -> Iterator[Sample]:
    taken = getattr(measurer, method)(*arguments)
    if method == "matmul":
        m, n, k, dtype, count = arguments
        shape = (m, n, k)
        width = {"bfloat16": 2, NARROW: 1}.get(dtype, 4)
        bytes = width * (m * k + k * n) + max(width, 2) * m * n
        yield Sample(
            name="matmul", seconds=taken, dtype=dtype, shape=shape,
            flops=2.0 * math.prod(shape), num_devices=count, bytes=float(bytes),
        )  # fmt: skip
    elif method == "elementwise":
        size = arguments[0]
        yield Sample(
            name="elementwise", seconds=taken, dtype="float32", shape=(size,), bytes=12.0 * size
        )
    elif method == "collective":
        kind, buffer, group = arguments
        yield Sample(
            name=kind, seconds=taken, dtype="float32", bytes=float(buffer),
            num_devices=group,
        )  # fmt: skip
    elif method == "to_device":
        yield Sample(name="host-to-device", seconds=taken, bytes=float(arguments[0]))
    else:
        hidden, seq, batch = (value for value in arguments[:3])
        for name, value in zip(("layer-forward", "layer-both"), taken, strict=True):
            yield Sample(name=name, seconds=value, dtype=arguments[3], shape=(batch, seq, hidden))


def _fit_device(
    base: DeviceSpec, samples: tuple[Sample, ...], shared: bool
) -> tuple[DeviceSpec, KernelEfficiency]:
    """Return the device and efficiencies that explain the matmul and elementwise samples.

    On a host whose devices share the cores, a matmul on all devices at once says what the cores do.
    """
    rows = [s for s in samples if s.name in ("matmul", "elementwise") and s.num_devices == 1]
    rates = {
        dtype: max(s.flops / s.seconds for s in rows if s.dtype == dtype and s.flops)
        for dtype in sorted({s.dtype for s in rows if s.name == "matmul"})
    }
    copies = max(s.bytes / s.seconds for s in rows if s.name == "elementwise")
    start = {f"peak.{dtype}": rate / _PEAK_SHARE for dtype, rate in rates.items()}
    start |= {"bandwidth": copies / 0.85, "half_bytes": 1e6, "half_depth": 32.0, "launch": 1e-5}
    bounds = {"half_bytes": (1e3, 1e8), "half_depth": (0.5, 1000.0), "launch": (1e-7, 1e-2)}
    tile = (1, 1) if shared else (128, 128)

    def built(values: Mapping[str, float]) -> tuple[DeviceSpec, KernelEfficiency]:
        peaks = dict(base.peak_flops) | {d: values[f"peak.{d}"] for d in rates}
        device = evolve(
            base, peak_flops=peaks, memory_bandwidth=values["bandwidth"],
            launch_latency=values["launch"], sustained=1.0,
        )  # fmt: skip
        default = KernelEfficiency()
        efficiency = KernelEfficiency(
            compute=dict(default.compute) | {"matmul": _PEAK_SHARE},
            half_bytes=values["half_bytes"],
            half_depth=values["half_depth"],
            tile=tile,
            source="measured by calibration",
        )
        return device, efficiency

    def predict(values: Mapping[str, float]) -> np.ndarray:
        device, efficiency = built(values)
        shapes = [s.shape if s.name == "matmul" else None for s in rows]
        return np.log([
            seconds(device, efficiency, s.flops, s.bytes, s.dtype, s.name, shape)
            for s, shape in zip(rows, shapes, strict=True)
        ])  # fmt: skip

    measured = np.array([s.seconds for s in rows])
    device, efficiency = built(
        fit_parameters(predict, measured, start, bounds, prior=0.2, delta=0.3)
    )
    together = [s for s in samples if s.name == "matmul" and s.num_devices > 1]
    if shared and together:
        alone = {s.shape: s.seconds for s in rows if s.name == "matmul" and s.dtype == "float32"}
        factor = together[0].num_devices * alone[together[0].shape] / together[0].seconds
        peaks = {dtype: peak * min(factor, 1.0) for dtype, peak in device.peak_flops.items()}
        device = evolve(device, peak_flops=peaks)
    return device, efficiency


def _fit_link(
    samples: tuple[Sample, ...], count: int, device: DeviceSpec, shared: bool
) -> LinkSpec:
    rows = [s for s in samples if s.name in COLLECTIVES]
    if not rows:
        return LinkSpec(
            name="memory" if shared else "device",
            bandwidth=device.memory_bandwidth / 2,
            latency=1e-5,
            source="no collective measured on one device: half of the memory bandwidth",
        )
    # one line through all kinds, bytes on the link per device on the horizontal axis
    moved = np.array([
        s.bytes * (1.0 if s.name == "collective-permute" else bus_factor(s.name, count))
        for s in rows
    ])  # fmt: skip
    latency, slope, error = fit_line(moved, np.array([s.seconds for s in rows]))
    bandwidth = 1 / max(slope, 1e-15)
    return LinkSpec(
        name="measured",
        # devices that share the memory bus get their part of it: see host.host_group
        bandwidth=bandwidth * count if shared else bandwidth,
        latency=latency / (count if shared else count - 1),
        source=f"{len(rows)} collectives on {count} devices, MAPE {error:.0%}",
    )


def _fit_host_link(samples: tuple[Sample, ...]) -> LinkSpec | None:
    rows = [s for s in samples if s.name == "host-to-device"]
    if not rows:
        return None
    latency, slope, _ = fit_line(
        np.array([s.bytes for s in rows]), np.array([s.seconds for s in rows])
    )
    return LinkSpec(
        name="host-to-device", bandwidth=1 / max(slope, 1e-13), latency=latency, source="measured"
    )

"""Fits kernel efficiencies to measured operators of transformer layers.

    python -m cost_model.kernel_fit PROFILE... [--out OUT]

writes one `KernelEfficiency` per device kind of the profiles (`kernel_rows`). How far off kernels
may be is measured on models that were not fitted on (on other microbatches, where two models were
profiled): every part is predicted by a fit to the others, and `deviation` is what the log errors
stay within for kernels of 80 % of the time, as a standard deviation.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from attrs import evolve

from alpa_interchange.document import save
from cost_model.catalogue import DEVICES
from cost_model.kernel import KernelEfficiency, matmul_share, seconds
from cost_model.kernel_rows import OperatorRow, read_kernels
from cost_model.kernel_table import KernelFit, KernelTable
from cost_model.least_squares import fit_parameters

_START = {
    "compute.matmul": 0.8, "compute.attention": 0.4, "memory.matmul": 0.85,
    "memory.normalisation": 0.7, "memory.elementwise": 0.7, "memory.softmax": 0.7,
    "half_bytes": 2e6, "half_depth": 96.0, "launch": 3e-5,
}  # fmt: skip
# peaks of consumer GPUs are given at a clock that they exceed
_BOUNDS = {name: (0.05, 1.2) for name in _START if name.startswith("compute")}
_BOUNDS |= {name: (0.05, 0.98) for name in _START if name.startswith("memory")}
_BOUNDS |= {"half_bytes": (1e4, 1e8), "half_depth": (1.0, 1000.0), "launch": (1e-6, 2e-4)}
_EIGHTY_PERCENT = 1.2816  # standard deviations that hold 80 % of a normal distribution
_FOLDS = 8  # at most; profiles of shapes have more groups than that


def fit_kernels(rows: Sequence[OperatorRow], source: str) -> KernelFit:
    """Return the efficiencies that explain `rows` of one device, and their errors out of fold."""
    (device,) = {row.device for row in rows}
    # with two models a fit to the smaller one, all launches, says nothing about the larger
    by_model = len({row.model for row in rows}) > 2
    parts = [row.model if by_model else f"{row.model} {row.micro_batch}" for row in rows]
    models = sorted(set(parts))
    fold = {model: rank % min(_FOLDS, len(models)) for rank, model in enumerate(models)}
    place = [fold[part] for part in parts]
    errors: dict[str, list[tuple[float, float]]] = {}
    for number in sorted(set(place)):
        rest = [row for row, of in zip(rows, place, strict=True) if of != number]
        held = [row for row, of in zip(rows, place, strict=True) if of == number]
        values = _fit(rest)
        efficiency = _efficiency(values, rest, source)
        for error, row in zip(_errors(values, efficiency, held), held, strict=True):
            errors.setdefault(row.kind, []).append((abs(float(error)), row.seconds))
    values = _fit(rows)
    deviation = {kind: max(0.02, _deviation(found)) for kind, found in errors.items()}
    efficiency = evolve(_efficiency(values, rows, source), deviation=deviation)
    return KernelFit(
        device=device,
        efficiency=efficiency,
        launch_latency=values["launch"],
        num_rows=len(rows),
        median_error={
            kind: float(np.median([error for error, _ in found])) for kind, found in errors.items()
        },
        default_error=_default_errors(values, rows),
    )


def _fit(rows: Sequence[OperatorRow]) -> dict[str, float]:
    measured = np.array([row.seconds for row in rows])

    def predict(values: Mapping[str, float]) -> np.ndarray:
        return np.log(
            [_seconds(row, _efficiency(values, (), ""), values["launch"]) for row in rows]
        )

    return fit_parameters(predict, measured, _START, _BOUNDS, prior=0.5)


def _errors(
    values: Mapping[str, float], efficiency: KernelEfficiency, rows: Sequence[OperatorRow]
) -> np.ndarray:
    """Return log(measured / predicted) without shapes, as the planner asks."""
    found = [_seconds(evolve(row, shape=None), efficiency, values["launch"]) for row in rows]
    return np.log([row.seconds for row in rows]) - np.log(found)


def _default_errors(values: Mapping[str, float], rows: Sequence[OperatorRow]) -> dict[str, float]:
    """Return the deviation of the default shares by kind, to expect where none is fitted."""
    errors: dict[str, list[tuple[float, float]]] = {}
    for error, row in zip(_errors(values, KernelEfficiency(), rows), rows, strict=True):
        errors.setdefault(row.kind, []).append((abs(float(error)), row.seconds))
    return {kind: _deviation(found) for kind, found in errors.items()}


def _deviation(errors: Sequence[tuple[float, float]]) -> float:
    """Return the standard deviation behind (error, seconds) of kernels, by their share of time."""
    sizes, seconds = np.array(sorted(errors)).T
    share = (np.cumsum(seconds) - seconds / 2) / seconds.sum()
    return float(np.interp(0.8, share, sizes)) / _EIGHTY_PERCENT


def _efficiency(
    values: Mapping[str, float], rows: Sequence[OperatorRow], source: str
) -> KernelEfficiency:
    """Return the efficiencies of fitted values; `rows` are the shapes whose mean share counts.

    Batched products run from memory at the rate of plain ones. Kinds that no profile has keep the
    default's ratio to matmuls.
    """
    default = KernelEfficiency()
    compute, memory = dict(default.compute), dict(default.memory)
    for name, value in values.items():
        group, _, kind = name.partition(".")
        if group == "compute":
            compute[kind] = value
        elif group == "memory":
            memory[kind] = value
    memory["attention"] = memory["matmul"]
    scale = compute["matmul"] / default.compute["matmul"]
    compute["convolution"] = default.compute["convolution"] * scale
    found = KernelEfficiency(
        compute=compute,
        memory=memory,
        half_bytes=values["half_bytes"],
        half_depth=values["half_depth"],
        source=source,
    )
    shares: dict[str, list[float]] = {}
    for row in rows:
        if row.shape is not None:
            share = matmul_share(row.shape, DEVICES[row.device].num_units, found)
            shares.setdefault(row.kind, []).append(share)
    return evolve(found, unshaped={kind: float(np.mean(of)) for kind, of in shares.items()})


def _seconds(row: OperatorRow, efficiency: KernelEfficiency, launch: float) -> float:
    device = evolve(DEVICES[row.device], launch_latency=launch)
    time = seconds(device, efficiency, row.flops, row.bytes, row.dtype, row.kind, row.shape)
    return float(time)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("profiles", type=Path, nargs="+", help="archives and tables of operators")
    default = Path(__file__).parent / "data" / "kernels.json"
    parser.add_argument("--out", type=Path, default=default, help="file of the fits")
    options = parser.parse_args()
    by_device: dict[str, list[OperatorRow]] = {}
    sources: dict[str, str] = {}
    for path in options.profiles:
        for row in read_kernels(path):
            by_device.setdefault(row.device, []).append(row)
            sources[row.device] = f"measured operators ({path.name.split('.')[0]})"
    fits = tuple(fit_kernels(rows, sources[device]) for device, rows in by_device.items())
    save(KernelTable(fits=fits), options.out)
    for fit in fits:
        print(f"{fit.device}: {fit.num_rows} operators, launch {fit.launch_latency * 1e6:.0f} us")
        for kind, error in fit.median_error.items():
            efficiency = fit.efficiency
            rate = efficiency.compute.get(kind), efficiency.memory[kind]
            shares = ", ".join(f"{share:.2f}" for share in rate if share is not None)
            print(
                f"  {kind:14} shares {shares:10}  median error {error:5.1%}, deviation "
                f"{efficiency.deviation[kind]:.2f}, of defaults {fit.default_error[kind]:.2f}"
            )
    kinds = dict.fromkeys(kind for fit in fits for kind in fit.default_error)
    for kind in kinds:
        found = [fit.default_error[kind] for fit in fits if kind in fit.default_error]
        print(f"default shares, {kind}: deviation {np.mean(found):.2f}")


if __name__ == "__main__":
    main()

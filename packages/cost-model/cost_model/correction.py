"""What measured runs of similar shape deviate by: a Gaussian process over configurations.

The analytic model of `training_run` leaves a residual that repeats for equal layer shapes (kernel
selection, alignment, launch behaviour). With X the measured cells, y their mean log residuals, and

    k(x, x') = s^2 exp(-1/2 sum_d ((x_d - x'_d) / l_d)^2) on equal devices, 0 on different ones
    A = k(X, X) + diag(noise^2 / count + floor^2)        noise: larger for runs over several hosts

the correction of a run is  mean = k(x, X) A^-1 y,  variance = s^2 - k(x, X) A^-1 k(X, x)
(Rasmussen and Williams 2006, equations 2.25-2.26). Far from every cell it is 0 with variance s^2.
                                                                                  -> Correction
"""

from __future__ import annotations

import functools
import math

import numpy as np
from attrs import field, frozen

from cost_model.training_run import LOW_PRECISION, TrainingRun

FEATURES = (
    "log2 hidden",
    "log2 tensor",
    "log2 microbatch",
    "log2 sequence",
    "log2 pipeline",
    "stack",
)


def features(run: TrainingRun) -> tuple[float, ...]:
    """Return the run's coordinates, in the order of FEATURES.

    The stack code keeps software stacks apart: recomputation and fused kernels change what runs.
    """
    stack = 8.0 * run.fused_elementwise + 16.0 * run.fused_attention
    stack += {"none": 0.0, "selective": 2.0, "full": 4.0}[run.recompute]
    # stages on several hosts wait for messages that nothing else waits for
    stack += 128.0 * (run.pipeline > 1 and run.cluster.host_groups[0].num_hosts > 1)
    stack += 32.0 * bool(run.model.experts) + 64.0 * (run.dtype in LOW_PRECISION)
    return (
        math.log2(run.model.hidden),
        math.log2(run.tensor),
        math.log2(run.micro_batch),
        math.log2(run.model.seq),
        math.log2(run.pipeline),
        stack,
    )


Table = tuple[np.ndarray, np.ndarray, np.ndarray]  # points [n, d], A^-1 y [n], A^-1 [n, n]


@frozen(kw_only=True)
class Cell:
    """Runs of equal features on one device kind: how far measurements are from the model."""

    device: str
    features: tuple[float, ...]
    residual: float  # median of log(measured / predicted)
    count: int
    many_hosts: bool = False


@frozen(kw_only=True)
class Correction:
    """Measured cells and the process' settings; lengths in units of the features."""

    cells: tuple[Cell, ...] = ()
    scale: float = 0.14  # s: log residual of the analytic model at shapes not measured
    noise: float = 0.012  # log scatter of single runs of equal shape on one host
    noise_hosts: float = 0.09  # the same over several hosts: networks and slow hosts differ
    floor: float = 0.01
    unseen: float = 0.15  # log residual on devices that no cell was measured on
    lengths: tuple[float, ...] = field(default=(0.8, 0.6, 0.6, 0.7, 2.0, 1.0))

    def at(self, run: TrainingRun) -> tuple[float, float]:
        """Return (mean, standard deviation) of log(measured / predicted) for `run`."""
        return self.at_point(run.cluster.host_groups[0].device.name, features(run))

    def knows(self, run: TrainingRun) -> bool:
        """Return whether any run was measured on the device of `run`."""
        return run.cluster.host_groups[0].device.name in self._tables

    def scatter(self, many_hosts: bool) -> float:
        """Return the log scatter of single runs."""
        return self.noise_hosts if many_hosts else self.noise

    def at_point(self, device: str, point: tuple[float, ...]) -> tuple[float, float]:
        """Return (mean, standard deviation) for a device kind and features."""
        table = self._tables.get(device)
        if table is None:
            return 0.0, self.unseen
        points, weights, inverse = table
        scaled = np.asarray(point) / np.asarray(self.lengths)
        near = self.scale**2 * np.exp(-0.5 * ((points - scaled) ** 2).sum(axis=1))
        # sums instead of `@`: starting BLAS threads costs more than these small products
        explained = float(((inverse * near).sum(axis=1) * near).sum())
        variance = max(self.scale**2 - explained, self.floor**2)
        return float((near * weights).sum()), math.sqrt(variance)

    @functools.cached_property
    def _tables(self) -> dict[str, Table]:
        """Return the solved system of every device kind; points are divided by the lengths."""
        tables = {}
        for device in dict.fromkeys(cell.device for cell in self.cells):
            cells = [cell for cell in self.cells if cell.device == device]
            points = np.array([cell.features for cell in cells]) / np.asarray(self.lengths)
            distance = ((points[:, None, :] - points[None, :, :]) ** 2).sum(axis=-1)
            counts = np.array([cell.count for cell in cells])
            noise = np.array([self.scatter(cell.many_hosts) for cell in cells])
            covariance = self.scale**2 * np.exp(-0.5 * distance)
            covariance += np.diag(noise**2 / counts + self.floor**2)
            inverse = np.linalg.inv(covariance)
            residuals = np.array([cell.residual for cell in cells])
            tables[device] = (points, inverse @ residuals, inverse)
        return tables

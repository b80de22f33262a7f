"""How far a parallel run is from the same run on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from alpa_meta.checkpoints.leaves import named_leaves
from alpa_meta.trainer.loop import OneDeviceStep, run_steps
from alpa_meta.trainer.settings import TrainSettings
from alpa_meta.types import PyTree
from mesh_runtime import HostBatches

if TYPE_CHECKING:
    from alpa_meta.trainer.metrics import StepMetrics


@frozen(kw_only=True)
class Comparison:
    """Differences between two runs of the same steps; `loss` in nats per byte.

    The relative difference of a parameter tensor is the norm of the difference over the norm of the
    one-device tensor.
    """

    num_steps: int
    loss_difference: float  # largest over the steps
    parameter_difference: float  # largest absolute difference of one element
    parameter_magnitude: float  # largest absolute element
    relative_difference: float  # largest over the tensors
    worst_parameter: str  # the tensor of `relative_difference`


def compare_with_one_device(
    settings: TrainSettings,
    batches: HostBatches,
    state: PyTree,
    *,
    start: int,
    losses: Sequence[float],
    params: PyTree,
    on_step: Callable[[int], None] = lambda done: None,
) -> Comparison:
    """Return how far `losses` and `params`, of the steps from `start` on, are from one device.

    `state` is the state before those steps, on the host; the steps are run again here from it.
    """
    found: list[float] = []

    def note(metrics: StepMetrics, _: PyTree) -> None:
        found.append(metrics.loss)
        on_step(len(found))

    final = run_steps(
        OneDeviceStep(),
        state,
        batches,
        settings,
        start=start,
        stop=start + len(losses),
        on_step=note,
    )
    return difference(found, jax.device_get(final.params), losses, params)


def difference(
    losses: Sequence[float], params: PyTree, other_losses: Sequence[float], other_params: PyTree
) -> Comparison:
    """Return how far the second run is from the first; parameters are pytrees of host arrays."""
    expected, got = dict(named_leaves(params)[0]), dict(named_leaves(other_params)[0])
    absolute, magnitude = 0.0, 0.0
    relative, worst = 0.0, ""
    for path, array in expected.items():
        gap = gaps(array, got[path])
        size = np.abs(np.nan_to_num(np.asarray(array, np.float64), posinf=0.0, neginf=0.0))
        absolute = float(np.maximum(absolute, gap.max(initial=0.0)))
        magnitude = max(magnitude, float(size.max(initial=0.0)))
        share = float(
            np.linalg.norm(gap) / max(float(np.linalg.norm(size)), np.finfo(np.float64).tiny)
        )
        if share > relative or np.isnan(share):
            relative, worst = share, path
    return Comparison(
        num_steps=len(losses),
        loss_difference=float(gaps(losses, other_losses).max()),
        parameter_difference=absolute,
        parameter_magnitude=magnitude,
        relative_difference=relative,
        worst_parameter=worst,
    )


def gaps(one: PyTree, other: PyTree) -> NDArray[np.float64]:
    """Return how far numbers are apart, each from its counterpart: nan where one alone is NaN, 0
    where both are or both are the same infinity."""
    a, b = np.asarray(one).astype(np.float64), np.asarray(other).astype(np.float64)
    with np.errstate(invalid="ignore"):
        return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))

"""The training loop: the same for a parallel step and for one device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import jax
import numpy as np
from attrs import frozen

from alpa_meta.trainer.metrics import StepMetrics
from alpa_meta.trainer.settings import TrainSettings
from alpa_meta.trainer.step import Batch, learning_rates, train_step
from alpa_meta.trainer.text import Bytes, batch_at
from alpa_meta.types import PyTree
from mesh_runtime import HostBatches


class Step(Protocol):
    """What the loop calls: `alpa_meta.parallelize(train_step)` or `OneDeviceStep`."""

    def __call__(self, state: PyTree, batch: Batch) -> tuple[PyTree, dict[str, PyTree]]: ...


class OneDeviceStep:
    """The training step compiled for one device: what a parallel run is compared with."""

    def __init__(self) -> None:
        self._step = jax.jit(train_step, donate_argnums=0)
        self._device = jax.local_devices()[0]

    def init(self, make_state: Callable[[jax.Array], PyTree], key: jax.Array) -> PyTree:
        """Return the initial state."""
        with jax.default_device(self._device):
            return jax.jit(make_state)(key)

    def __call__(self, state: PyTree, batch: Batch) -> tuple[PyTree, dict[str, PyTree]]:
        with jax.default_device(self._device):
            after: tuple[PyTree, dict[str, PyTree]] = self._step(
                state, jax.tree.map(np.asarray, batch)
            )
            return after


@frozen(eq=False)
class TextRows:
    """Reads rows of the batches of training on a text; every host of a run has one."""

    part: Bytes
    seed: int
    batch_size: int
    length: int

    def __call__(self, step: int, start: int, stop: int) -> Batch:
        """Return rows start..stop of the batch of step `step` (0 is the first): int32 [row,
        position] each."""
        windows = batch_at(
            self.part,
            step,
            seed=self.seed,
            batch_size=self.batch_size,
            length=self.length,
            rows=slice(start, stop),
        ).astype(np.int32)
        return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}


def host_batches(part: Bytes, settings: TrainSettings) -> HostBatches:
    """Return the batches of training on a text, which the hosts read from their copies of it."""
    size, length = settings.batch_size, settings.model.context
    tokens = jax.ShapeDtypeStruct((size, length), np.int32)
    read = TextRows(part, settings.seed, size, length)
    return HostBatches(read, {"inputs": tokens, "targets": tokens})


def run_steps(
    step: Step,
    state: PyTree,
    batches: HostBatches,
    settings: TrainSettings,
    *,
    start: int,
    stop: int,
    on_step: Callable[[StepMetrics, PyTree], None],
    stopped: Callable[[], bool] = lambda: False,
    look: Callable[[], dict[str, float]] = dict,
) -> PyTree:
    """Return the state after the steps start..stop, or where `stopped` says so between two;
    `on_step(metrics, state)` sees each one, with the parts of its time that `look` returns."""
    rates = learning_rates(settings.optimiser)
    for number in range(start, stop):
        if stopped():
            break
        began = time.perf_counter()
        state, metrics = step(state, batches[number])
        loss = float(metrics["loss"])
        seconds = time.perf_counter() - began
        shown = StepMetrics(
            step=number + 1,
            loss=loss,
            gradient_norm=float(metrics["gradient_norm"]),
            learning_rate=float(rates(number)),
            step_seconds=seconds,
            tokens_per_second=settings.tokens_per_step / seconds,
            parts=look(),
        )
        on_step(shown, state)
    return state

"""`alpa train --step module:function`: a user's program, planned, run, compared and kept."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from attrs import frozen
from rich.console import Console

from alpa_interchange import load, save_plan
from alpa_interchange.amounts import format_seconds
from alpa_interchange.plan import ParallelPlan
from alpa_meta.checkpoints.restoring import Checkpoint, read_settings
from alpa_meta.errors import NonFiniteError, OtherProgramError, PlanError
from alpa_meta.named_cluster import named_cluster
from alpa_meta.own_step import OwnStep, Runnable, after_step, load_step
from alpa_meta.report.chrome_trace import write_trace
from alpa_meta.report.cluster import cluster_table
from alpa_meta.report.loss_figure import draw_loss
from alpa_meta.report.plan_figure import draw_plan
from alpa_meta.report.plan_table import print_plan
from alpa_meta.report.progress import stages_progress
from alpa_meta.report.timeline_figure import draw_last_step
from alpa_meta.step.pure_call import OneDevice
from alpa_meta.trainer.comparison import gaps
from alpa_meta.trainer.host_devices import check_devices
from alpa_meta.trainer.metrics import OwnMetrics, read_metrics
from alpa_meta.trainer.monitor import Monitor
from alpa_meta.trainer.planning import Parallelism, compile_step, parallel_step
from alpa_meta.trainer.recorder import RunRecorder
from alpa_meta.trainer.run_folder import RunFolder
from alpa_meta.trainer.signals import StopSignals
from alpa_meta.types import PyTree
from alpa_meta.writable import check_file
from mesh_runtime import HostLeaf, RayOptions

if TYPE_CHECKING:
    from alpa_meta.api import AnyStep

STEPS = 20  # of a run, and what resuming one adds
_END = object()  # of the batches, which may be None: a step may take none
_STEP = "step"  # the setting of a checkpoint that names the program


@frozen(kw_only=True)
class OwnRequest:
    """What the user asked `alpa train --step` for."""

    step: str
    cluster: str = "host:8"
    parallelism: Parallelism = Parallelism()
    plan: Path | None = None
    out: Path = Path("run")
    resume: Path | None = None
    steps: int | None = None
    comparison_steps: int = 20
    checkpoint_every: int = 100
    ray: RayOptions | None = None  # None: on the devices of this process
    on_nan: str | None = None
    metrics: Path | None = None  # where the newest step is written for collectors


@frozen(kw_only=True)
class _Start:
    """Where a run begins: at step 0, or after a checkpoint's steps with its state."""

    program: Runnable
    checkpoint: Checkpoint | None
    step: int
    stop: int
    plan: ParallelPlan | None

    def state_of(self, step: AnyStep) -> PyTree:
        """Return the state that the run begins with, to be overwritten: made or read where the plan
        of `step` has it, if an initialiser or a checkpoint makes it."""
        if self.checkpoint is not None:
            return step.restore(self.checkpoint, self.program.state)
        make = getattr(self.program, "make", None)
        return self.program.arguments()[0] if make is None else step.init(make)

    def state_on_one_device(self) -> PyTree:
        """Return the state that the run begins with, whole, to be overwritten."""
        state = self.program.arguments()[0]
        return state if self.checkpoint is None else self.checkpoint.restore(state)


def own_program(run: Path) -> str | None:
    """Return the program, as module:function, of the run in a folder; None if it is another's."""
    place = read_settings(RunFolder(run).checkpoints).get(_STEP)
    return None if place is None else str(place)


def run_own_training(request: OwnRequest, console: Console) -> list[OwnMetrics]:
    """Return the metrics of each step, having shown them and written the run's folder."""
    folder = RunFolder(request.resume or request.out)
    start = _start_of(request, console)
    folder.check_writable()
    check_file(request.metrics, "--metrics")
    if request.resume is None:
        folder.check_new()
    program = start.program
    cluster = named_cluster(request.cluster)
    note = check_devices(cluster) if request.ray is None else None
    console.print(cluster_table(cluster))
    if note is not None:
        console.print(note)
    batches = _batches_from(start)
    with stages_progress(console) as progress:
        batch = next(batches)

        def planned(given: ParallelPlan | None) -> tuple[AnyStep, ParallelPlan]:
            step = parallel_step(
                program.train_step,
                cluster,
                request.parallelism,
                plan=given,
                progress=progress,
                exact=program.exact,
                ray=request.ray,
                on_nan=request.on_nan,
                checkpoints=folder.checkpoints,
            )
            return step, step.plan_for(program.state, batch)

        try:
            step, plan = planned(start.plan)
        except OtherProgramError:
            if request.plan is not None:
                raise
            console.print(f"{folder.plan} is of another program than {request.step} is now")
            step, plan = planned(None)
    print_plan(plan, console)
    recorder = RunRecorder(
        folder=folder,
        start=start.step,
        write_plan=lambda folder: save_plan(plan, folder.plan, step.menu),
        settings={_STEP: request.step},
        checkpoint_every=request.checkpoint_every,
        metrics=OwnMetrics.of,
        say=console.print,
        begin_saving=step.save,
    )
    compile_step(step, request.ray, console)
    state = start.state_of(step)
    monitor = Monitor(step, request.metrics or folder.samples, console.print)
    with StopSignals() as signals, contextlib.closing(monitor):
        try:
            given = itertools.chain([batch], batches)
            _train(request, start, step, state, given, recorder, monitor, signals, console)
        except NonFiniteError as error:
            if recorder.steps:
                recorder.state, _ = after_step(recorder.state, error.result)
            raise
        finally:
            recorder.close()
        recorder.end_if_stopped(signals)
    if step.plan is not plan:  # planned anew for the nodes that were left
        plan = step.plan
        save_plan(plan, folder.plan, step.menu)
    draw_plan(folder.plan_picture, plan)
    draw_last_step(folder.timeline_picture, step.last_trace, plan)
    write_trace(folder.timeline, {"executed": step.last_trace})
    step.close()
    history = read_metrics(folder.metrics, OwnMetrics.of)
    pictures = "plan.png, timeline.png"
    if all(metrics.loss is not None for metrics in history):
        draw_loss(folder.loss_picture, history, unit="")
        pictures += ", loss.png"
    console.print(
        f"wrote {folder.path}/: plan.json, metrics.jsonl, {pictures}, checkpoint/\n"
        f"go on with: alpa train --resume {folder.path}"
    )
    return recorder.steps


def _start_of(request: OwnRequest, console: Console) -> _Start:
    """Return where the run begins, from the request or from the checkpoint it resumes."""
    plan = None if request.plan is None else load(request.plan, ParallelPlan)
    if request.resume is None:
        stop = request.steps or STEPS
        program = load_step(request.step)
        return _Start(program=program, checkpoint=None, step=0, stop=stop, plan=plan)
    folder = RunFolder(request.resume)
    checkpoint = folder.read_checkpoint(console.print)
    stop = request.steps or checkpoint.step + STEPS
    if stop <= checkpoint.step:
        raise PlanError(
            f"--steps must be above {checkpoint.step}, the steps {request.resume} has already "
            f"done, got {stop}"
        )
    if plan is None and request.parallelism.is_free and folder.plan.exists():
        plan = load(folder.plan, ParallelPlan)
    program = load_step(request.step)
    checkpoint.check(program.state)
    console.print(f"resuming {request.resume} after step {checkpoint.step}")
    return _Start(
        program=program,
        checkpoint=checkpoint,
        step=checkpoint.step,
        stop=stop,
        plan=plan,
    )


def _train(
    request: OwnRequest,
    start: _Start,
    step: AnyStep,
    state: PyTree,
    batches: Iterator[PyTree],
    recorder: RunRecorder[OwnMetrics],
    monitor: Monitor,
    signals: StopSignals,
    console: Console,
) -> None:
    """Run the steps, the first ones also on one device."""
    step.num_steps = start.step
    plain, other = OneDevice(start.program.train_step), None
    if request.comparison_steps:
        other = start.state_on_one_device()
    apart, compared = list[float](), 0
    for number in range(start.step, start.stop):
        if signals.received is not None:
            return
        if (batch := next(batches, _END)) is _END:
            console.print(f"the batches ended after {number} steps")
            break
        began = time.perf_counter()
        state, found = after_step(state, jax.block_until_ready(step(state, batch)))
        seconds = time.perf_counter() - began
        values = OwnMetrics.named(_scalars(found))
        metrics = OwnMetrics(
            step=number + 1, step_seconds=seconds, values=values, parts=monitor.look()
        )
        recorder.record(metrics, state)
        monitor.note(metrics.step, seconds, values)
        console.print(_line(metrics))
        if compared < request.comparison_steps:
            other, expected = after_step(other, plain(other, _read(batch)))
            apart += [float(gaps(*pair).max(initial=0.0)) for pair in _numbers(found, expected)]
            compared += 1
    if apart:
        console.print(
            f"the same {compared} steps on one device: what the step returns differs by at most "
            f"{np.max(apart):.1e}"
        )


def _batches_from(start: _Start) -> Iterator[PyTree]:
    """Return the batches that the run has not had; those of an iterator come in its order."""
    batches = _batches(start.program)
    if isinstance(start.program, OwnStep) and start.program.later is not None:
        for had in range(start.step):
            if next(batches, _END) is _END:
                raise PlanError(
                    f"the run has had {start.step} batches, but the iterator of --step "
                    f"{start.program.name} ended after {had}; it must give those again, and more"
                )
    first = next(batches, _END)
    if first is _END:
        raise PlanError(
            f"the iterator of --step {start.program.name} has no batch after the {start.step} that "
            "the run has had; let it give more"
        )
    return itertools.chain([first], batches)


def _batches(program: Runnable) -> Iterator[PyTree]:
    """Return the batches of a program: those of its iterator, or its one batch for ever."""
    yield program.arguments()[1]
    if isinstance(program, OwnStep) and program.later is not None:
        yield from program.later
        return
    while True:
        yield program.arguments()[1]


def _scalars(found: PyTree) -> dict[str, float]:
    """Return the numbers among what a step returned beside its state, by their path."""
    named = jax.tree_util.tree_flatten_with_path(found)[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator=".") or "loss": float(leaf)
        for path, leaf in named
        if np.ndim(leaf) == 0 and _is_real(leaf)
    }


def _read(batch: PyTree) -> PyTree:
    """Return a batch with what hosts would read of it read here."""
    return jax.tree.map(lambda x: np.asarray(x) if isinstance(x, HostLeaf) else x, batch)


def _line(metrics: OwnMetrics) -> str:
    values = ", ".join(f"{name} {value:.6g}" for name, value in metrics.values.items())
    shown = f"{values} in " if values else ""
    return f"step {metrics.step}: {shown}{format_seconds(metrics.step_seconds)}"


def _numbers(found: PyTree, expected: PyTree) -> list[tuple[PyTree, PyTree]]:
    """Return the arrays of numbers that two runs of a step returned beside their states."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return [(one, other) for one, other in pairs if _is_real(other)]


def _is_real(leaf: PyTree) -> bool:
    """Return whether a leaf holds numbers, of jax's own dtypes as well (bfloat16, int4)."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    return jnp.issubdtype(dtype, np.floating) or jnp.issubdtype(dtype, np.integer)

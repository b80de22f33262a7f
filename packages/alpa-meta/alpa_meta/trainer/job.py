"""The main job, `alpa train`: plan, train, evaluate, compare with one device, write it all."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from attrs import frozen
from rich.console import Console

from alpa_interchange import load, save_plan
from alpa_interchange.amounts import format_duration, format_seconds
from alpa_interchange.plan import ParallelPlan
from alpa_meta.checkpoints.manifest import CheckpointError
from alpa_meta.checkpoints.restoring import Checkpoint
from alpa_meta.errors import NonFiniteError, PlanError
from alpa_meta.named_cluster import named_cluster
from alpa_meta.report.chrome_trace import write_trace
from alpa_meta.report.cluster import cluster_table
from alpa_meta.report.loss_figure import draw_loss
from alpa_meta.report.plan_figure import draw_plan
from alpa_meta.report.plan_table import print_plan
from alpa_meta.report.progress import stages_progress, training_progress
from alpa_meta.report.timeline_figure import draw_last_step
from alpa_meta.trainer.comparison import Comparison, compare_with_one_device
from alpa_meta.trainer.evaluation import HELD_OUT_BYTES, baseline_loss, held_out_loss
from alpa_meta.trainer.host_devices import check_devices
from alpa_meta.trainer.loop import OneDeviceStep, host_batches, run_steps
from alpa_meta.trainer.metrics import StepMetrics, read_metrics
from alpa_meta.trainer.monitor import Monitor
from alpa_meta.trainer.planning import Parallelism, batch_shapes, compile_step, parallel_step
from alpa_meta.trainer.recorder import RunRecorder
from alpa_meta.trainer.run_folder import RunFolder
from alpa_meta.trainer.settings import TrainSettings, settings_from_json, settings_to_json
from alpa_meta.trainer.signals import StopSignals
from alpa_meta.trainer.step import make_optimiser, make_state_maker, train_step
from alpa_meta.trainer.text import Text, read_text
from alpa_meta.types import PyTree
from alpa_meta.writable import check_file
from mesh_runtime import HostBatches, RayOptions

if TYPE_CHECKING:
    from alpa_meta.api import AnyStep

EXTRA_STEPS = 100  # what resuming a finished run adds


@frozen(kw_only=True)
class TrainRequest:
    """What the user asked `alpa train` for. With `resume`, `settings` come from the checkpoint."""

    settings: TrainSettings = TrainSettings()
    steps: int | None = None  # stop after so many; None: the length of the learning-rate schedule
    cluster: str = "host:8"
    parallelism: Parallelism = Parallelism()
    plan: Path | None = None
    out: Path = Path("run")
    resume: Path | None = None
    comparison_steps: int = 20
    checkpoint_every: int = 100
    ray: RayOptions | None = None  # None: on the devices of this process
    on_nan: str | None = None
    metrics: Path | None = None  # where the newest step is written for collectors


@frozen(kw_only=True)
class Start:
    """Where a run begins: fresh at step 0, or after the steps of a checkpoint."""

    settings: TrainSettings
    step: int
    stop: int
    plan: ParallelPlan | None
    checkpoint: Checkpoint | None = None

    @functools.cached_property
    def make_state(self) -> Callable[[jax.Array], PyTree]:
        """What makes the state of a fresh run."""
        settings = self.settings
        return make_state_maker(settings.model, make_optimiser(settings.optimiser))

    @property
    def key(self) -> jax.Array:
        """What the state of a fresh run is drawn with."""
        return jax.random.key(self.settings.seed)

    def shapes(self) -> PyTree:
        """Return the shapes of the state."""
        return jax.eval_shape(self.make_state, self.key)

    def state_of(self, step: AnyStep) -> PyTree:
        """Return the state that the run begins with, made or read where the plan of `step` has
        it."""
        if self.checkpoint is not None:
            return step.restore(self.checkpoint, self.shapes())
        return step.init(self.make_state, self.key)

    def state_on_one_device(self) -> PyTree:
        """Return the state that the run begins with, whole."""
        if self.checkpoint is not None:
            return self.checkpoint.restore(self.shapes())
        return OneDeviceStep().init(self.make_state, self.key)


@frozen(kw_only=True)
class TrainResult:
    """What a finished run showed; losses in nats per byte."""

    steps: tuple[StepMetrics, ...]
    trigram: float
    held_out: float
    comparison: Comparison | None
    folder: RunFolder


def run_training(request: TrainRequest, console: Console) -> TrainResult:
    """Return the result of the job, having shown it on `console` and written its folder."""
    began = time.perf_counter()
    folder = RunFolder(request.out if request.resume is None else request.resume)
    start = _start_of(request, console)
    folder.check_writable()
    check_file(request.metrics, "--metrics")
    if request.resume is None:
        folder.check_new()
    settings = start.settings
    text = read_text(max_train_bytes=settings.max_train_bytes)
    if start.checkpoint is not None:
        _check_text(start.checkpoint, text)
    cluster = named_cluster(request.cluster)
    note = check_devices(cluster) if request.ray is None else None
    console.print(cluster_table(cluster))
    if note is not None:
        console.print(note)
    trigram = baseline_loss(settings.model, text)
    console.print(
        f"text: the standard library's source, {len(text.train):,} bytes of {text.num_train_files} "
        f"files to train on, {len(text.held_out):,} bytes of {text.num_held_out_files} files held "
        f"out\nbaseline: a byte trigram (add-one smoothing) fitted on the same training part has "
        f"held-out loss {trigram:.3f} nats per byte"
    )
    with stages_progress(console) as progress:
        step = parallel_step(
            train_step,
            cluster,
            request.parallelism,
            plan=start.plan,
            progress=progress,
            ray=request.ray,
            on_nan=request.on_nan,
            checkpoints=folder.checkpoints,
        )
        shapes = (start.shapes(), batch_shapes(settings))
        plan = step.plan_for(*shapes)
    print_plan(plan, console)
    folder.check_room(sum(one.size * one.dtype.itemsize for one in jax.tree.leaves(shapes[0])))
    batches = host_batches(text.train, settings)
    compile_step(step, request.ray, console)
    state = start.state_of(step)
    recorder = RunRecorder(
        folder=folder,
        start=start.step,
        write_plan=lambda folder: save_plan(plan, folder.plan, step.menu),
        settings={"run": settings_to_json(settings), "text": text.fingerprint},
        checkpoint_every=request.checkpoint_every,
        metrics=StepMetrics.of,
        say=console.print,
        begin_saving=step.save,
    )
    compared, last = _train(request, start, step, state, batches, recorder, console)
    held_out = held_out_loss(settings.model, last, text)
    verdict = "beats" if held_out < trigram else "does not beat"
    console.print(
        f"held-out loss {held_out:.3f} nats per byte over {HELD_OUT_BYTES:,} bytes: {verdict} the "
        f"trigram's {trigram:.3f}"
    )
    comparison = _compare(request, start, recorder.steps, compared, text, console)
    history = read_metrics(folder.metrics, StepMetrics.of)
    draw_loss(folder.loss_picture, history, trigram=trigram, held_out=held_out)
    if step.plan is not plan:  # planned anew for the nodes that were left
        plan = step.plan
        save_plan(plan, folder.plan, step.menu)
    draw_plan(folder.plan_picture, plan)
    draw_last_step(folder.timeline_picture, step.last_trace, plan)
    write_trace(folder.timeline, {"executed": step.last_trace})
    step.close()
    console.print(
        f"wrote {folder.path}/: plan.json, plan.png, metrics.jsonl, loss.png, timeline.png, "
        "checkpoint/; "
        f"go on with: alpa train --resume {folder.path}\n"
        f"done in {format_duration(time.perf_counter() - began)}"
    )
    return TrainResult(
        steps=tuple(recorder.steps),
        trigram=trigram,
        held_out=held_out,
        comparison=comparison,
        folder=folder,
    )


def _start_of(request: TrainRequest, console: Console) -> Start:
    """Return where the run begins, from the request or from the checkpoint it resumes."""
    plan = None if request.plan is None else load(request.plan, ParallelPlan)
    if request.resume is None:
        settings = request.settings
        stop = request.steps or settings.optimiser.schedule_steps
        return Start(settings=settings, step=0, stop=stop, plan=plan)
    folder = RunFolder(request.resume)
    checkpoint = folder.read_checkpoint(console.print)
    settings = settings_from_json(checkpoint.settings.get("run", {}), str(checkpoint.path))
    stop = request.steps or settings.optimiser.schedule_steps
    if request.steps is None and stop <= checkpoint.step:
        stop = checkpoint.step + EXTRA_STEPS
        console.print(
            f"{request.resume} has done all its {checkpoint.step} steps; training {EXTRA_STEPS} "
            "more at the final learning rate (--steps says otherwise)"
        )
    if stop <= checkpoint.step:
        raise PlanError(
            f"--steps must be above {checkpoint.step}, the steps {request.resume} has already "
            f"done, got {stop}"
        )
    if plan is None and request.parallelism.is_free and folder.plan.exists():
        plan = load(folder.plan, ParallelPlan)
    start = Start(
        settings=settings,
        step=checkpoint.step,
        stop=stop,
        plan=plan,
        checkpoint=checkpoint,
    )
    checkpoint.check(start.shapes())
    console.print(f"resuming {request.resume} after step {checkpoint.step}")
    return start


def _check_text(checkpoint: Checkpoint, text: Text) -> None:
    written = checkpoint.settings.get("text")
    if written != text.fingerprint:
        raise CheckpointError(
            f"{checkpoint.path}: was trained on another text (SHA-256 {str(written)[:16]}..., here "
            f"{text.fingerprint[:16]}...); resume it with the Python whose standard library it read"
        )


def _train(
    request: TrainRequest,
    start: Start,
    step: AnyStep,
    state: PyTree,
    batches: HostBatches,
    recorder: RunRecorder[StepMetrics],
    console: Console,
) -> tuple[PyTree, PyTree]:
    """Return the parameters on the host: after the steps to compare, and after the last."""
    monitor = Monitor(step, request.metrics or recorder.folder.samples, console.print)
    compared_step = min(start.step + request.comparison_steps, start.stop)
    compared: list[PyTree] = [None]

    def note(metrics: StepMetrics, state: PyTree) -> None:
        recorder.record(metrics, state)
        monitor.note(metrics.step, metrics.step_seconds, metrics.values)
        show(metrics)
        if metrics.step == compared_step:
            compared[0] = step.gather(state.params)

    step.num_steps = start.step
    with StopSignals() as signals:
        try:
            with training_progress(console, start.step, start.stop) as show:
                last = run_steps(
                    step,
                    state,
                    batches,
                    start.settings,
                    start=start.step,
                    stop=start.stop,
                    on_step=note,
                    stopped=lambda: signals.received is not None,
                    look=monitor.look,
                )
        except NonFiniteError as error:
            recorder.state = error.result[0]
            raise
        finally:
            monitor.close()
            recorder.close()
        recorder.end_if_stopped(signals)
    steps = recorder.steps
    mean = sum(metrics.step_seconds for metrics in steps) / len(steps)
    console.print(
        f"trained {len(steps)} steps, loss {steps[0].loss:.3f} -> {steps[-1].loss:.3f}, "
        f"{format_seconds(mean)}/step, {start.settings.tokens_per_step / mean:,.0f} tokens/s"
    )
    return compared[0], step.gather(last.params)


def _compare(
    request: TrainRequest,
    start: Start,
    steps: list[StepMetrics],
    params: PyTree,
    text: Text,
    console: Console,
) -> Comparison | None:
    """Run the first steps again on one device, and say how far the parallel run was from them."""
    losses = [metrics.loss for metrics in steps[: request.comparison_steps]]
    if not losses:
        return None
    with stages_progress(console) as progress:
        stage = f"the same {len(losses)} steps on one device"
        progress(stage, 0, len(losses))
        found = compare_with_one_device(
            start.settings,
            host_batches(text.train, start.settings),
            start.state_on_one_device(),
            start=start.step,
            losses=losses,
            params=params,
            on_step=lambda done: progress(stage, done, len(losses)),
        )
    of_worst = f" ({found.worst_parameter})" if found.worst_parameter else ""  # none: all are equal
    console.print(
        f"the same {found.num_steps} steps on one device: losses differ by at most "
        f"{found.loss_difference:.1e} nats; parameters by at most {found.parameter_difference:.1e} "
        f"(the largest parameter is {found.parameter_magnitude:.2g}), by tensor at most "
        f"{found.relative_difference:.1e} of its norm{of_worst}"
    )
    return found

"""Planning without executing, `alpa plan`: the bundled GPT or a model of the corpus."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from attrs import astuple, field, frozen
from rich.console import Console

import alpa_meta as alpa
from alpa_interchange import ClusterSpec, save_plan
from alpa_interchange.plan import ParallelPlan
from alpa_meta.corpus.model import shapes_from_key
from alpa_meta.errors import PlanError
from alpa_meta.named_cluster import named_cluster
from alpa_meta.options import Options, Recomputation
from alpa_meta.own_step import Runnable, load_step, named_model
from alpa_meta.planning.memory_floor import check_arguments_fit
from alpa_meta.report.cluster import cluster_table
from alpa_meta.report.plan_table import print_plan
from alpa_meta.report.progress import stages_progress
from alpa_meta.types import Fields, Function, PyTree
from alpa_meta.writable import check_file
from mesh_runtime import RayOptions
from stage_dp import schedule_of, torch_csv

if TYPE_CHECKING:
    from alpa_meta.api import AnyStep

if TYPE_CHECKING:  # brings flax and optax, which other programs may not need
    from alpa_meta.trainer.settings import TrainSettings


@frozen(kw_only=True)
class Parallelism:
    """What the user fixes about a plan; None leaves it to the planner. `memory` is per device."""

    num_stages: int | None = None
    num_microbatches: int | None = None
    num_token_slices: int | None = None
    token_slices: tuple[int, ...] | None = None
    schedule: str | None = None
    recompute: Recomputation = None
    memory: float | None = None

    @property
    def is_free(self) -> bool:
        """Return whether nothing is fixed."""
        return all(choice is None for choice in astuple(self, recurse=False))


@frozen(kw_only=True)
class PlanRequest:
    """What the user asked `alpa plan` for: one of three programs.

    `settings` are of the bundled GPT, `model` is a published one, with `model_sizes` changed, or
    one of the corpus, as name or name:size; `step` a program, as module:function.
    """

    settings: TrainSettings | None = None
    model: str | None = None
    model_sizes: Mapping[str, object] = field(factory=dict)
    step: str | None = None
    cluster: str = "host:8"
    parallelism: Parallelism = Parallelism()


def parallel_step(
    step: Function[PyTree],
    cluster: ClusterSpec,
    parallelism: Parallelism,
    *,
    plan: ParallelPlan | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    exact: bool = True,
    ray: RayOptions | None = None,
    on_nan: str | None = None,
    checkpoints: Path | None = None,
) -> AnyStep:
    """Return `step` parallelised as asked for, not planned yet; to run on `ray`, if it is given,
    where it goes on from what is saved in `checkpoints` when workers fail."""
    folder = None if ray is None else checkpoints
    options = _options(parallelism, plan, progress, exact, ray, on_nan, folder)
    return alpa.parallelize(step, cluster=cluster, options=options)


def compile_step(step: AnyStep, ray: RayOptions | None, console: Console) -> None:
    """Compile a step that is planned; on Ray its workers are started for it."""
    stage = "compile" if ray is None else "start workers"
    with stages_progress(console) as progress:
        progress(stage, 0, 1)
        step.executable.prepare()
        progress(stage, 1, 1)


def _options(
    parallelism: Parallelism,
    plan: ParallelPlan | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    exact: bool = True,
    ray: RayOptions | None = None,
    on_nan: str | None = None,
    checkpoints: Path | None = None,
) -> Options:
    chosen: Fields = {
        "num_stages": parallelism.num_stages,
        "num_microbatches": parallelism.num_microbatches,
        "num_token_slices": parallelism.num_token_slices,
        "token_slices": parallelism.token_slices,
        "schedule": parallelism.schedule,
        "recompute": parallelism.recompute,
        "memory": parallelism.memory,
        "plan": plan,
        "progress": progress,
        "trace": "ready",
        "exact": exact,
        "runtime": ray,
        "on_nan": on_nan,
        "checkpoints": checkpoints,
        "checkpoint_every": 0,  # the recorder of the run saves
    }
    try:
        return Options(**{name: value for name, value in chosen.items() if value is not None})
    except (TypeError, ValueError) as error:
        raise PlanError(str(error)) from None


def make_plan(
    request: PlanRequest,
    console: Console,
    *,
    out: Path | None,
    picture: Path | None,
    schedule_csv: Path | None = None,
) -> ParallelPlan:
    """Return the plan that was asked for, having shown it and written it where asked."""
    check_file(out, "--out", makes_folder=True)
    check_file(picture, "--picture")
    check_file(schedule_csv, "--schedule-csv")
    cluster = named_cluster(request.cluster)
    step, state, batch, exact = _program(request)
    console.print(cluster_table(cluster))
    check_arguments_fit((state,), cluster, _options(request.parallelism))
    with stages_progress(console) as progress:
        parallel = parallel_step(step, cluster, request.parallelism, progress=progress, exact=exact)
        plan: ParallelPlan = parallel.plan_for(state, batch)
        menu = parallel.menu
    print_plan(plan, console)
    if out is not None:
        save_plan(plan, out, menu)
        console.print(f"wrote {out}")
    if picture is not None:
        from alpa_meta.report.plan_picture import write_picture

        write_picture(picture, plan, menu, console)
    if schedule_csv is not None:
        schedule_csv.write_text(torch_csv(schedule_of(plan.stage_plan)))
        console.print(f"wrote {schedule_csv}")
    return plan


def _program(request: PlanRequest) -> tuple[Function[PyTree], PyTree, PyTree, bool]:
    """Return the step, the shapes of its state and batch, and whether microbatches must be
    exact."""
    if request.model is not None or request.step is not None:
        program: Runnable
        if request.step is not None:
            program = load_step(request.step)
        else:
            program = named_model(request.model or "", "--model", **request.model_sizes)
        return program.train_step, program.state, program.batch, program.exact
    from alpa_meta.trainer.settings import TrainSettings
    from alpa_meta.trainer.step import make_optimiser, make_state_maker, train_step

    settings = request.settings or TrainSettings()
    make_state = make_state_maker(settings.model, make_optimiser(settings.optimiser))
    return train_step, shapes_from_key(make_state), batch_shapes(settings), True


def batch_shapes(settings: TrainSettings) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of one batch of the bundled GPT."""
    shape = (settings.batch_size, settings.model.context)
    tokens = jax.eval_shape(lambda: jnp.zeros(shape, jnp.int32))
    return {"inputs": tokens, "targets": tokens}

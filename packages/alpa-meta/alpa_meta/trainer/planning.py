"""Planning without executing, `alpa plan`: the bundled GPT or a model of the corpus."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from attrs import frozen
from rich.console import Console

import alpa_meta as alpa
from alpa_interchange import ClusterSpec, save
from alpa_interchange.plan import ParallelPlan
from alpa_meta.errors import PlanError
from alpa_meta.own_step import Runnable, corpus_model, load_step
from alpa_meta.report.cluster import cluster_table
from alpa_meta.report.plan_figure import draw_plan
from alpa_meta.report.plan_table import print_plan
from alpa_meta.report.progress import stages_progress
from alpa_meta.trainer.settings import TrainSettings
from alpa_meta.trainer.step import make_optimiser, make_state_maker, train_step
from cost_model import cluster as named_cluster


@frozen(kw_only=True)
class Parallelism:
    """What the user fixes about a plan; None leaves it to the planner. `memory` is per device."""

    num_stages: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    memory: float | None = None

    @property
    def is_free(self) -> bool:
        """Return whether nothing is fixed."""
        choices = (self.num_stages, self.num_microbatches, self.schedule, self.memory)
        return all(choice is None for choice in choices)


@frozen(kw_only=True)
class PlanRequest:
    """What the user asked `alpa plan` for.

    `model` is one of the corpus, as name or name:size; `step` a program, as module:function.
    """

    settings: TrainSettings = TrainSettings()
    model: str | None = None
    step: str | None = None
    cluster: str = "host:8"
    parallelism: Parallelism = Parallelism()


def find_cluster(name: str) -> ClusterSpec:
    """Return the cluster of a preset or TOML file; PlanError if there is none."""
    try:
        return named_cluster(name)
    except (ValueError, OSError) as error:
        raise PlanError(str(error)) from None


def parallel_step(
    step: Callable[..., Any],
    cluster: ClusterSpec,
    parallelism: Parallelism,
    *,
    plan: ParallelPlan | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Any:
    """Return `step` parallelised as asked for, not planned yet."""
    chosen: dict[str, Any] = {
        "num_stages": parallelism.num_stages,
        "num_microbatches": parallelism.num_microbatches,
        "schedule": parallelism.schedule,
        "memory": parallelism.memory,
        "plan": plan,
        "progress": progress,
        "trace": "ready",
    }
    try:
        options = alpa.Options(
            **{name: value for name, value in chosen.items() if value is not None}
        )
    except (TypeError, ValueError) as error:
        raise PlanError(str(error)) from None
    return alpa.parallelize(step, cluster=cluster, options=options)


def make_plan(
    request: PlanRequest, console: Console, *, out: Path | None, picture: Path | None
) -> ParallelPlan:
    """Return the plan that was asked for, having shown it and written it where asked."""
    cluster = find_cluster(request.cluster)
    step, state, batch = _program(request)
    console.print(cluster_table(cluster))
    with stages_progress(console) as progress:
        parallel = parallel_step(step, cluster, request.parallelism, progress=progress)
        plan: ParallelPlan = parallel.plan_for(state, batch)
    print_plan(plan, console)
    if out is not None:
        save(plan, out)
        console.print(f"wrote {out}")
    if picture is not None:
        draw_plan(picture, plan)
        console.print(f"wrote {picture}")
    return plan


def _program(request: PlanRequest) -> tuple[Callable[..., Any], Any, Any]:
    """Return the step and the shapes of its state and batch."""
    if request.model is not None or request.step is not None:
        program: Runnable
        if request.step is not None:
            program = load_step(request.step)
        else:
            program = corpus_model(request.model or "", "--model")
        return program.train_step, program.state, program.batch
    settings = request.settings
    make_state = make_state_maker(settings.model, make_optimiser(settings.optimiser))
    state = jax.eval_shape(make_state, jax.random.key(0))
    return train_step, state, batch_shapes(settings)


def batch_shapes(settings: TrainSettings) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of one batch of the bundled GPT."""
    shape = (settings.batch_size, settings.model.context)
    tokens = jax.eval_shape(lambda: jnp.zeros(shape, jnp.int32))
    return {"inputs": tokens, "targets": tokens}

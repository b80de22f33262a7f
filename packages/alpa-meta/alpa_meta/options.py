"""What a user may set about planning and running a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import field, frozen
from attrs.validators import ge, in_, instance_of, optional

from alpa_interchange import ParallelPlan
from alpa_meta.errors import PlanError
from alpa_meta.inter_op.meshes import AXIS_NAMES
from alpa_meta.presets import check_preset

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, how many parts are done, how many there are)."""

EXECUTORS = ("auto", "shard_map", "constraint")
SCHEDULES = ("1f1b", "gpipe", "eager-1f1b")


def _quiet(stage: str, done: int, total: int) -> None:
    """Report nothing."""


def _reporter(progress: Progress | None) -> Progress:
    return _quiet if progress is None else progress


def _known_preset(_: object, __: object, name: str) -> None:
    check_preset(name)


def _distinct(_: object, __: object, names: tuple[str, ...]) -> None:
    if not names or len(set(names)) != len(names):
        raise PlanError(f"axis_names must be at least one name, all different, got {names}")


@frozen(kw_only=True)
class Options:
    """Options of `parallelize`. None means: the planner chooses.

    `memory` is bytes per device that the plan may use (default: what the cluster says).
    `batch_argnums` are the arguments that microbatches split along their first dim (default: array
    arguments that are not returned as new state); `static_argnums` are not traced. `plan` runs a
    given plan.
    `exact` refuses microbatches for a step whose result would change with them (batch statistics,
    random numbers shaped by the batch). `pins` fixes input shardings: path -> PartitionSpec-like
    tuple, for all logical meshes that have the named axes. `preset` plans under the constraints of
    a named parallelism (`alpa_meta.presets`). `mesh_shape` allows only logical meshes of this
    shape; `axis_names` are the names of mesh axes that pins use. `dynamic_dims` marks the dims of
    the batch that may vary from call to call, as a pytree prefix of the batch (of the tuple of
    batch arguments if there are several) with a dim, a set of dims or None per leaf: batches that
    differ in nothing else share their choices, without another search
    (`alpa_meta.planning.shape_buckets`).
    `executor` is what runs the stages: shard_map with the planned collectives, or sharding
    constraints with collectives of XLA's choice; "auto" takes the latter for a stage that would
    gather operands for an operator without a sharding rule (`alpa_meta.planning.executor_choice`).
    `cache=False` searches even if the same program, cluster and options were planned before
    (`alpa_meta.planning.plan_cache`).
    """

    num_stages: int | None = field(default=None, validator=optional(ge(1)))
    num_microbatches: int | None = field(default=None, validator=optional(ge(1)))
    schedule: str = field(default="1f1b", validator=in_(SCHEDULES))
    num_layers: int | None = field(default=None, validator=optional(ge(1)))
    memory: float | None = None
    mesh_shape: tuple[int, ...] | None = None
    max_mesh_axes: int = field(default=2, validator=ge(1))
    plan: ParallelPlan | None = field(default=None, validator=optional(instance_of(ParallelPlan)))
    progress: Progress = field(default=None, converter=_reporter)
    batch_argnums: tuple[int, ...] | None = None
    static_argnums: tuple[int, ...] = ()
    donate: bool = True
    exact: bool = True
    solver_seconds: float = 30.0
    seed: int = 0
    trace: str = "none"
    pins: Mapping[str, Any] = field(factory=dict)
    preset: str | None = field(default=None, validator=optional(_known_preset))
    axis_names: tuple[str, ...] = field(default=AXIS_NAMES, validator=_distinct)
    dynamic_dims: Any = None
    executor: str = field(default="auto", validator=in_(EXECUTORS))
    cache: bool = field(default=True, validator=instance_of(bool))

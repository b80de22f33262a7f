"""The parallel plan: everything needed to run a training step on a cluster without searching
again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from attrs import field, frozen

from alpa_interchange.check import OneOf, non_empty, non_negative
from alpa_interchange.cluster import ClusterSpec
from alpa_interchange.layer import Layer
from alpa_interchange.mesh import DeviceMesh
from alpa_interchange.plan_text import one_line, plan_html, plan_text
from alpa_interchange.rule import Strategy
from alpa_interchange.schedule import PipelineSchedule, TaskGraph
from alpa_interchange.selection import ShardingSolution
from alpa_interchange.stage import StagePlan
from alpa_interchange.tensor import ShardingSpec


@frozen(kw_only=True)
class InputSummary:
    """One array input of a step: the path a user would write, its whole shape, its role, and the
    memory it is in between steps, the device's or that of its host."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    role: str = "state"
    memory: str = field(default="device", validator=OneOf("device", "pinned_host"))


@frozen(kw_only=True)
class ProgramSummary:
    """What identifies the step a plan was made for.

    `fingerprint` is a hash of the operations as they were traced: primitives, parameters, types and
    which value each reads, not the constants' values.

    `batch_size` is None where the arrays of the batch have no common first dim. `uncut` says why
    the planner took the batch whole, if it was not free to cut it into microbatches.
    """

    fingerprint: str
    inputs: tuple[InputSummary, ...]
    num_ops: int
    batch_size: int | None
    phases_from: str = "name stack"  # how forward and backward were told apart
    uncut: str = ""
    token_slices: tuple[int, ...] = ()  # the tokens of each slice; empty: sequences are not cut


@frozen(kw_only=True)
class OperatorSharding:
    """Operators of one primitive that run by one strategy: factors to mesh axes, and the specs of
    what they read and write.

    A name is `<name stack>/<primitive>.<number>`, the number counting the operators of that name
    stack and primitive in program order; operators in the body of a loop, conditional or
    recomputation have the name of that region and the number of the body in front
    (`layers/scan.0>0>tanh.2`). A region has no factors, only specs. `source` is the user's line of
    the first.
    """

    names: tuple[str, ...] = field(validator=non_empty)
    strategy: Strategy
    source: str = ""


@frozen(kw_only=True)
class StageSharding:
    """How one stage runs on its mesh.

    `operators` are all operators of the stage; `state_specs` are the layouts of the step's inputs
    that it reads, `received_specs` of the values that other stages compute, named by the operator
    and the number of its result (`jvp(mlp)/tanh.0:0`), and of arrays that the step closes over
    (`constant.0`). They are the plan: `solution.choice` holds what they came from, as numbers of
    one version's strategies, which mean nothing to another.
    `executor` says whether the plan is run to the letter ("shard_map") or given to the compiler as
    sharding constraints, between which it chooses the collectives ("constraint").
    """

    mesh: DeviceMesh
    solution: ShardingSolution
    state_specs: Mapping[str, ShardingSpec]
    activation_specs: Mapping[str, ShardingSpec]
    memory: Mapping[str, float]  # predicted bytes per device by name
    communication: Mapping[str, float] = field(factory=dict)  # bytes per device and step, by kind
    # Seconds per step of collectives, by phase: forward, backward, update. None: not known.
    collective_seconds: Mapping[str, float] | None = None
    replicated_ops: tuple[str, ...] = ()  # operators without a sharding rule
    executor: str = field(default="shard_map", validator=OneOf("shard_map", "constraint"))
    operators: tuple[OperatorSharding, ...] = ()  # none in plans of schema 0.1
    received_specs: Mapping[str, ShardingSpec] = field(factory=dict)
    problem_hash: str = ""  # of the enumeration that `choice` counts in; schema 0.1 only
    freed_ops: tuple[str, ...] = ()  # without a rule, but left to the compiler by "constraint"

    @property
    def peak_bytes(self) -> float:
        return sum(self.memory.values())

    def check_specs(self, ranks: Mapping[str, int], where: str) -> None:
        """Raise ValueError unless state has as many dims as its `ranks` say, and specs only name
        axes of the mesh."""
        axes = {axis.name for axis in self.mesh.logical.axes}
        for path, spec in (*self.state_specs.items(), *self.activation_specs.items()):
            strangers = {name for dim in spec.dims for name in dim} | set(spec.partial)
            if not strangers <= axes:
                raise ValueError(
                    f"{where}: the spec of {path!r} names axes {sorted(strangers - axes)}, but the "
                    f"mesh has {sorted(axes)}"
                )
        for path, spec in self.state_specs.items():
            if len(spec.dims) != ranks.get(path, len(spec.dims)):
                raise ValueError(
                    f"{where}.state_specs[{path!r}] must have {ranks[path]} dims, as the program's "
                    f"input has, got {len(spec.dims)}"
                )


@frozen(kw_only=True, repr=False)
class ParallelPlan:
    """A complete plan. Seconds are predictions per training step.

    `lower_bound` is proven under the cost model: no plan of the searched space is faster.

    The instruction lists of the meshes are not stored: `tasks`, the schedule of `stage_plan`, its
    microbatches and their number in flight determine them (`stage_dp.instruction_lists`). Only
    plans of schema 0.1 and 0.2 hold the lists, in `schedule`, and no tasks.
    """

    # A saved plan that was edited is refused, whatever the place.
    has_content_hash: ClassVar[bool] = True

    program: ProgramSummary
    cluster: ClusterSpec
    layers: tuple[Layer, ...]
    stage_plan: StagePlan
    shardings: tuple[StageSharding, ...]
    tasks: TaskGraph | None = None
    schedule: PipelineSchedule | None = None
    step_seconds: float = field(validator=non_negative)
    lower_bound: float = field(validator=non_negative)
    provenance: Mapping[str, str] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if (self.tasks is None) == (self.schedule is None):
            raise ValueError(
                "ParallelPlan needs either `tasks` or, as plans of schema 0.1 and 0.2 have it, "
                f"`schedule`; got {'neither' if self.tasks is None else 'both'}"
            )
        if len(self.shardings) != self.num_stages:
            raise ValueError(
                f"ParallelPlan.shardings needs one per stage: {self.num_stages}, got "
                f"{len(self.shardings)}"
            )
        if self.tasks is not None:
            self.tasks.check_places(self.num_stages, self.stage_plan.num_meshes)
        ranks = {entry.path: len(entry.shape) for entry in self.program.inputs}
        for stage, sharding in enumerate(self.shardings):
            sharding.check_specs(ranks, f"ParallelPlan.shardings[{stage}]")

    def __repr__(self) -> str:
        return f"<ParallelPlan: {one_line(self)}>"

    def __str__(self) -> str:
        return plan_text(self)

    def _repr_html_(self) -> str:
        """Return the plan as notebooks show it."""
        return plan_html(self)

    @property
    def num_microbatches(self) -> int:
        return self.stage_plan.num_microbatches

    @property
    def num_stages(self) -> int:
        return len(self.stage_plan.stages)

    @property
    def device_bytes(self) -> tuple[float, ...]:
        """Return, per stage, what each of its devices needs with all stages that it runs."""
        return self.stage_plan.device_bytes or tuple([one.peak_bytes for one in self.shardings])

    @property
    def gap(self) -> float:
        """Return (step_seconds - lower_bound) / lower_bound, 0 when proved optimal."""
        if self.step_seconds <= self.lower_bound:
            return 0.0
        return (self.step_seconds - self.lower_bound) / max(self.lower_bound, 1e-300)

    @property
    def layer_cuts(self) -> tuple[int, ...]:
        """Return the first layer of every stage but the first."""
        return tuple(stage.candidate.layer_start for stage in self.stage_plan.stages[1:])

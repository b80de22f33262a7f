"""The parallel plan: everything needed to run a training step on a cluster without searching
again."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen
from attrs.validators import in_

from alpa_interchange.check import non_negative
from alpa_interchange.cluster import ClusterSpec
from alpa_interchange.graph import Layer
from alpa_interchange.mesh import DeviceMesh
from alpa_interchange.schedule import PipelineSchedule
from alpa_interchange.selection import ShardingSolution
from alpa_interchange.stage import StagePlan
from alpa_interchange.tensor import ShardingSpec


@frozen(kw_only=True)
class InputSummary:
    """One array input of a step: the path a user would write, its whole shape, and its role."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    role: str = "state"


@frozen(kw_only=True)
class ProgramSummary:
    """What identifies the step a plan was made for. `fingerprint` is a hash of its operations.

    `batch_size` is None where the arrays of the batch have no common first dim. `uncut` says why
    the planner took the batch whole, if it was not free to cut it into microbatches.
    """

    fingerprint: str
    inputs: tuple[InputSummary, ...]
    num_ops: int
    batch_size: int | None
    phases_from: str = "name stack"  # how forward and backward were told apart
    uncut: str = ""


@frozen(kw_only=True)
class StageSharding:
    """How one stage runs on its mesh.

    `solution` holds the choice for the stage's strategy-selection problem, whose strategies are
    enumerated again from the program; `problem_hash` guards against another enumeration.
    `executor` says whether the plan is run to the letter ("shard_map") or given to the compiler as
    sharding constraints, between which it chooses the collectives ("constraint").
    """

    mesh: DeviceMesh
    solution: ShardingSolution
    problem_hash: str
    state_specs: Mapping[str, ShardingSpec]
    activation_specs: Mapping[str, ShardingSpec]
    memory: Mapping[str, float]  # predicted bytes per device by name
    communication: Mapping[str, float] = field(factory=dict)  # bytes per device and step, by kind
    replicated_ops: tuple[str, ...] = ()  # operators without a sharding rule
    executor: str = field(default="shard_map", validator=in_(("shard_map", "constraint")))
    freed_ops: tuple[str, ...] = ()  # without a rule, but left to the compiler by "constraint"

    @property
    def peak_bytes(self) -> float:
        return sum(self.memory.values())


@frozen(kw_only=True)
class ParallelPlan:
    """A complete plan. Seconds are predictions per training step.

    `lower_bound` is proven under the cost model: no plan of the searched space is faster.
    """

    program: ProgramSummary
    cluster: ClusterSpec
    layers: tuple[Layer, ...]
    stage_plan: StagePlan
    shardings: tuple[StageSharding, ...]
    schedule: PipelineSchedule
    step_seconds: float = field(validator=non_negative)
    lower_bound: float = field(validator=non_negative)
    provenance: Mapping[str, str] = field(factory=dict)

    @property
    def num_microbatches(self) -> int:
        return self.stage_plan.num_microbatches

    @property
    def num_stages(self) -> int:
        return len(self.stage_plan.stages)

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

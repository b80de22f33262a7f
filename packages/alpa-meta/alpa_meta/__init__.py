"""Parallel training of ordinary JAX steps: plan, explain, audit and run them on any cluster.

`parallelize` turns a single-device training step into one that runs on all devices by a plan that
the planner proves to be near the best.
"""

from typing import TYPE_CHECKING

from alpa_meta.exports import exported as __getattr__  # noqa: F401
from alpa_meta.exports import listed as __dir__  # noqa: F401
from alpa_meta.versions import check_versions

if TYPE_CHECKING:
    from alpa_interchange import ParallelPlan
    from alpa_meta.api import ParallelStep, parallelize
    from alpa_meta.checkpoints.manifest import CheckpointError
    from alpa_meta.checkpoints.restoring import Checkpoint, read_checkpoint, restore
    from alpa_meta.checkpoints.saving import save
    from alpa_meta.errors import (
        InfeasibleError,
        NonFiniteError,
        NonFiniteWarning,
        PlanError,
        WorkersReplaced,
    )
    from alpa_meta.execution.executable import Executable
    from alpa_meta.execution.piecewise import PiecewiseArray
    from alpa_meta.lowered import Lowered
    from alpa_meta.named_cluster import local_cluster
    from alpa_meta.operators import register as sharding_rule
    from alpa_meta.options import Options
    from alpa_meta.pinning import pin
    from alpa_meta.planning.explanation import explain
    from alpa_meta.planning.replanning import changed_cluster, replan
    from alpa_meta.planning.state_moves import state_moves
    from alpa_meta.report.plan_difference import plan_difference
    from alpa_meta.step.phases import value_and_grad
    from mesh_runtime import HostBatches, RayOptions, RemoteArray

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Executable",
    "HostBatches",
    "InfeasibleError",
    "Lowered",
    "NonFiniteError",
    "NonFiniteWarning",
    "Options",
    "ParallelPlan",
    "ParallelStep",
    "PiecewiseArray",
    "PlanError",
    "RayOptions",
    "RemoteArray",
    "WorkersReplaced",
    "changed_cluster",
    "explain",
    "local_cluster",
    "parallelize",
    "pin",
    "plan_difference",
    "read_checkpoint",
    "replan",
    "restore",
    "save",
    "sharding_rule",
    "state_moves",
    "value_and_grad",
]

check_versions()

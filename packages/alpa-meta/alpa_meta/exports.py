"""The public names of `alpa_meta`, each imported when it is first asked for.

Commands and modules that need no jax start without it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

PLACES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "Checkpoint": ("alpa_meta.checkpoints.restoring", "Checkpoint"),
        "CheckpointError": ("alpa_meta.checkpoints.manifest", "CheckpointError"),
        "Executable": ("alpa_meta.execution.executable", "Executable"),
        "HostBatches": ("mesh_runtime", "HostBatches"),
        "InfeasibleError": ("alpa_meta.errors", "InfeasibleError"),
        "Lowered": ("alpa_meta.lowered", "Lowered"),
        "NonFiniteError": ("alpa_meta.errors", "NonFiniteError"),
        "NonFiniteWarning": ("alpa_meta.errors", "NonFiniteWarning"),
        "Options": ("alpa_meta.options", "Options"),
        "ParallelPlan": ("alpa_interchange", "ParallelPlan"),
        "ParallelStep": ("alpa_meta.api", "ParallelStep"),
        "PiecewiseArray": ("alpa_meta.execution.piecewise", "PiecewiseArray"),
        "WorkersReplaced": ("alpa_meta.errors", "WorkersReplaced"),
        "PlanError": ("alpa_meta.errors", "PlanError"),
        "RayOptions": ("mesh_runtime", "RayOptions"),
        "RemoteArray": ("mesh_runtime", "RemoteArray"),
        "changed_cluster": ("alpa_meta.planning.replanning", "changed_cluster"),
        "explain": ("alpa_meta.planning.explanation", "explain"),
        "local_cluster": ("alpa_meta.named_cluster", "local_cluster"),
        "parallelize": ("alpa_meta.api", "parallelize"),
        "pin": ("alpa_meta.pinning", "pin"),
        "plan_difference": ("alpa_meta.report.plan_difference", "plan_difference"),
        "replan": ("alpa_meta.planning.replanning", "replan"),
        "read_checkpoint": ("alpa_meta.checkpoints.restoring", "read_checkpoint"),
        "restore": ("alpa_meta.checkpoints.restoring", "restore"),
        "save": ("alpa_meta.checkpoints.saving", "save"),
        "sharding_rule": ("alpa_meta.operators", "register"),
        "state_moves": ("alpa_meta.planning.state_moves", "state_moves"),
        "value_and_grad": ("alpa_meta.step.phases", "value_and_grad"),
    }
)
"""Name -> (module, name there)."""


def exported(name: str) -> object:
    """Return what `alpa_meta` exports as `name` and keep it there."""
    if name not in PLACES:
        raise AttributeError(f"module 'alpa_meta' has no attribute {name!r}")
    module, attribute = PLACES[name]
    value = getattr(import_module(module), attribute)
    setattr(sys.modules["alpa_meta"], name, value)
    return value


def listed() -> list[str]:
    """Return the names of `alpa_meta`, also of what was not imported yet."""
    return sorted({*vars(sys.modules["alpa_meta"]), *PLACES})

"""How a `ParallelStep` on Ray goes on when its workers fail, and where it saves its state."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import jax
from attrs import frozen

from alpa_interchange import ClusterSpec
from alpa_meta.checkpoints.manifest import CheckpointError
from alpa_meta.checkpoints.places import checkpoint_paths
from alpa_meta.checkpoints.restoring import read_checkpoint
from alpa_meta.errors import PlanError, WorkersReplaced
from alpa_meta.execution.state import templates
from alpa_meta.execution.supervisor import Supervisor
from alpa_meta.planning.replanning import changed_cluster
from alpa_meta.step.program import Step
from alpa_meta.types import PyTree
from mesh_runtime import NoRoomError

if TYPE_CHECKING:
    from alpa_meta.api import AnyStep

KEPT = 2  # checkpoints that stay: the newest may be found damaged when it is needed


@frozen(eq=False)
class RayRuns:
    """The steps of a `ParallelStep` as its supervisor runs them."""

    parallel: AnyStep

    def execute(self, key: Hashable, leaves: Sequence[PyTree]) -> list[PyTree]:
        """Return the leaves of a step's result."""
        return self.parallel.compiled(key)(leaves)

    def step_of(self, key: Hashable) -> Step:
        """Return the step that calls of a key are of."""
        return self.parallel.step_of(key)

    def templates(self, key: Hashable) -> list[PyTree]:
        """Return what to restore each leaf of a step's arguments like."""
        found = templates(self.parallel.compiled(key))
        return [found.get(leaf.path, leaf.aval) for leaf in self.step_of(key).leaves]

    def prepare(self) -> None:
        """Have processes stand by that can take the workers' places."""
        self.parallel.prepare_workers()

    def restart(self) -> None:
        """Start new workers for the same plan; where there is no room, plan for a host fewer."""
        parallel = self.parallel
        renew: Callable[[], object] = parallel.replace_workers
        while True:
            try:
                renew()
                return
            except NoRoomError as error:
                smaller = _one_host_fewer(parallel.plan.cluster)
                if smaller is None:
                    raise
                warnings.warn(
                    f"{error}. The step is planned anew for {_num_hosts(smaller)} hosts",
                    WorkersReplaced,
                    stacklevel=2,
                )
                parallel.plan_anew(smaller)
                renew = parallel.compiled


def _num_hosts(cluster: ClusterSpec) -> int:
    return sum(group.num_hosts for group in cluster.host_groups)


def _one_host_fewer(cluster: ClusterSpec) -> ClusterSpec | None:
    """Return a cluster without a host of its largest group; None if no group has two."""
    sizes = [group.num_hosts for group in cluster.host_groups]
    largest = sizes.index(max(sizes))
    if sizes[largest] < 2:
        return None
    return changed_cluster(cluster, {largest: sizes[largest] - 1})


def state_tree(step: Step, leaves: Sequence[PyTree], held: Sequence[int]) -> PyTree:
    """Return the arguments of a step that hold its state, as one tree to be saved."""
    numbers = step.unflatten(range(len(leaves)))
    args = step.unflatten(leaves)
    kept = [
        arg
        for arg, own in zip(args, numbers, strict=True)
        if any(type(leaf) is int and leaf in held for leaf in jax.tree.leaves(own))
    ]
    return kept[0] if len(kept) == 1 else tuple(kept)


def save_if_due(parallel: AnyStep, supervisor: Supervisor) -> None:
    """Begin a checkpoint of the state after the last step, if it is time for one."""
    options = parallel.options
    assert options.checkpoints is not None
    if not options.checkpoint_every or parallel.num_steps % options.checkpoint_every:
        return
    supervisor.wait()  # one is written at a time
    step, leaves, held = supervisor.latest()
    try:
        parallel.save(
            options.checkpoints, state_tree(step, leaves, held), step=parallel.num_steps, keep=KEPT
        )
    except CheckpointError as error:
        warnings.warn(f"no checkpoint was saved: {error}", RuntimeWarning, stacklevel=2)


def resumed(parallel: AnyStep, state: PyTree) -> PyTree:
    """Return the state of the newest checkpoint laid out as `state`; `state` if there is none."""
    folder = parallel.options.checkpoints
    if folder is None:
        raise PlanError("there is no folder to resume from; give parallelize(checkpoints=...)")
    if not checkpoint_paths(folder):
        return state
    checkpoint = read_checkpoint(folder)
    parallel.num_steps = checkpoint.step
    return checkpoint.restore(state)

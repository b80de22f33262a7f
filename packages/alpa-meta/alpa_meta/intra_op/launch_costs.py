"""What the host takes to launch what the devices of a mesh run: the same selection problem, in
other seconds.

Where a training program runs kernel by kernel (`cost_model.program`), the host is a second clock
beside the devices'. It runs ahead of them, so that launches add up by themselves and only their
sums over a layer count beside the sums of what is launched.              -> LayerCosts.under()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from alpa_meta.intra_op.mesh_costs import MeshCosts
from cost_model.program import Program


@frozen(eq=False)
class LaunchCosts(MeshCosts):
    """A logical mesh and what the host takes to launch what runs there. Collectives in buckets are
    not launched by the layers whose values they send."""

    @property
    def program(self) -> Program:
        """The program that launches."""
        assert self.model.program is not None
        return self.model.program

    def collective_seconds(
        self, kind: str, bytes: float, axes: tuple[str, ...], in_buckets: bool = False
    ) -> float:
        """Return the seconds of the host to launch a collective along mesh axes."""
        return 0.0 if in_buckets else self.program.launch_seconds(kind, self.mesh.size(axes))

    def bucket_share_seconds(self, kind: str, bytes: float, axes: tuple[str, ...]) -> float:
        """Return nothing, as buckets have launches of their own."""
        return 0.0

    def bucketed_seconds(
        self, kind: str, bytes: Sequence[float] | Mapping[float, int], axes: tuple[str, ...]
    ) -> float:
        """Return nothing, as buckets have launches of their own."""
        return 0.0

    def kernel_seconds(
        self,
        kind: str,
        flops: float,
        bytes: float,
        dtype: str,
        shape: tuple[int, ...] | None = None,
    ) -> float:
        """Return the seconds of the host to launch the kernel that an operator is, if it is one."""
        return 0.0 if kind == "elementwise" else self.program.launch

    def _scale(self, bytes: float, nominal: float) -> float:
        return 1.0 if bytes else 0.0  # a launch takes as long for any number of bytes


def launch_costs(costs: MeshCosts) -> LaunchCosts | None:
    """Return what the host takes to launch what runs on a mesh, None where nothing waits for it,
    as in a compiled program, or where `costs` are launches themselves."""
    program = costs.model.program
    if program is None or not program.launch or isinstance(costs, LaunchCosts):
        return None
    return LaunchCosts(costs.mesh, costs.model, costs.host_group, costs.while_trips)

"""The user's own mesh, as `jax.lax.with_sharding_constraint` names it inside a step.

A step written for a mesh (`NamedSharding` of a `Mesh` or `AbstractMesh`, or a `PartitionSpec` under
`jax.set_mesh`) keeps it: its axes become those of the meshes that are planned for, so that its
constraints are pins. On a cluster of as many devices they keep their sizes; on another the planner
chooses them. Axes of size 1 shard nothing and are left out.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping

from attrs import evolve, frozen

from alpa_interchange import ClusterSpec
from alpa_meta.compat import source_line
from alpa_meta.errors import PlanError
from alpa_meta.inter_op.meshes import AXIS_NAMES
from alpa_meta.options import Options
from alpa_meta.pinning import all_eqns, axes_named, is_pin, pinned_spec
from alpa_meta.step.program import Program


@frozen
class UserMesh:
    """The axes of the meshes in a step's constraints, and of these the ones that specs name.

    `places` are the lines that name an axis first.
    """

    sizes: Mapping[str, int]
    places: Mapping[str, str]

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes.values())


def user_mesh(program: Program) -> UserMesh | None:
    """Return the mesh that the step's sharding constraints are written for, None without any.

    Several meshes are taken together; an axis of two sizes is refused.
    """
    sizes: dict[str, int] = {}
    places: dict[str, str] = {}
    for eqn in all_eqns(program.jaxpr):
        mesh = getattr(eqn.params.get("sharding"), "mesh", None)
        if mesh is None or mesh.empty or not is_pin(eqn):
            continue
        for name, size in mesh.shape.items():
            if sizes.setdefault(name, size) != size:
                raise PlanError(
                    f"mesh axis {name!r} has {size} devices in the sharding constraint at "
                    f"{source_line(eqn)}, but {sizes[name]} in one before it; use one mesh for all "
                    "constraints of a step"
                )
        for name in axes_named(pinned_spec(eqn) or ()):
            places.setdefault(name, source_line(eqn))
    return UserMesh(sizes, places) if sizes else None


def with_user_mesh(program: Program, cluster: ClusterSpec, options: Options) -> Options:
    """Return `options` under which the step's sharding constraints can be kept.

    They stay as they are if they name all axes of the constraints already. Raises PlanError where
    the user's mesh and the options cannot both be followed.
    """
    mesh = user_mesh(program)
    if mesh is None or not mesh.places or set(mesh.places) <= set(options.axis_names):
        return options
    cut = {name: size for name, size in mesh.sizes.items() if size > 1}
    if not set(cut).intersection(mesh.places) and mesh.num_devices > 1:
        return options  # what the constraints name has one device: nothing is sharded
    kept = tuple(cut) if cut and mesh.num_devices == cluster.num_devices else _named(mesh)
    given = ", ".join(f"{name}={size}" for name, size in mesh.sizes.items())
    first, place = next(iter(mesh.places.items()))
    if options.axis_names != AXIS_NAMES:
        raise PlanError(
            f"the sharding constraint at {place} names mesh axis {first!r}, which "
            f"Options(axis_names={options.axis_names}) lacks; name the axes as the step's own mesh "
            f"({given}) does, or leave axis_names out"
        )
    if options.mesh_shape is not None and len(options.mesh_shape) != len(kept):
        raise PlanError(
            f"Options(mesh_shape={options.mesh_shape}) has {len(options.mesh_shape)} axes, but the "
            f"sharding constraints of the step, as at {place}, are for {len(kept)}: "
            f"{', '.join(kept)}; give a size for each, or leave mesh_shape out"
        )
    shape = options.mesh_shape
    several = options.num_stages is not None and options.num_stages > 1
    if shape is None and mesh.num_devices == cluster.num_devices and not several:
        shape = tuple(mesh.sizes[name] for name in kept)
    if shape is None:
        why = f"{options.num_stages} stages share" if several else "the cluster has"
        warnings.warn(
            f"the sharding constraints of the step are for another mesh ({given}: "
            f"{mesh.num_devices} in all), but {why} {cluster.num_devices} devices: its axes "
            f"{', '.join(kept)} are kept by name, with sizes that the planner chooses; "
            "Options(mesh_shape=...) sets them",
            stacklevel=2,
        )
    most = max(options.max_mesh_axes, len(kept))
    return evolve(options, axis_names=kept, mesh_shape=shape, max_mesh_axes=most)


def _named(mesh: UserMesh) -> tuple[str, ...]:
    """Return the axes that constraints name, in the mesh's order; on one device, all they name."""
    alone = mesh.num_devices == 1
    return tuple(
        name for name, size in mesh.sizes.items() if name in mesh.places and (alone or size > 1)
    )

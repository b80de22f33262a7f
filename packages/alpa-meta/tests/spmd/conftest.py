"""Planned programs beside the same programs on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attrs import frozen
from jax.sharding import AxisType, Mesh

from alpa_interchange import LogicalMesh, MeshAxis
from alpa_meta.spmd import (
    BucketLimits,
    JaxprPlan,
    jax_sharding,
    planned_collectives,
    random_plan,
    shard_map_program,
)
from alpa_meta.step.trace import inline
from ilp_sharding.strategies import Conversions


def seconds(kind: str, bytes: float, axes: tuple[str, ...]) -> float:
    return 1e-6 + bytes / 1e9


@frozen
class Run:
    """A planned program: its jaxpr, plan, mesh, collectives, compiled text and both outputs."""

    closed: Any
    plan: JaxprPlan
    mesh: LogicalMesh
    planned: Any
    text: str
    actual: Any
    expected: Any


def run_program(
    function: Callable[..., Any],
    args: Sequence[Any],
    mesh_shape: Sequence[int],
    *,
    seed: int = 0,
    plan: Callable[[Any, LogicalMesh], JaxprPlan] | None = None,
    buckets: BucketLimits | None = None,
) -> Run:
    """Return `function` run by a random plan on a mesh (or by `plan`), and on one device."""
    names = ("x", "y", "z")[: len(mesh_shape)]
    mesh = LogicalMesh(
        axes=tuple(MeshAxis(name=n, size=size) for n, size in zip(names, mesh_shape, strict=True))
    )
    devices = np.array(jax.devices()[: mesh.num_devices]).reshape(mesh.shape)
    jax_mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
    leaves = jax.tree.leaves(args)
    tree = jax.tree.structure(args)

    def flat(*values: Any) -> Any:
        return jax.tree.leaves(function(*jax.tree.unflatten(tree, values)))

    closed = inline(jax.make_jaxpr(flat)(*leaves))
    chosen = plan(closed, mesh) if plan else random_plan(closed, mesh, seed)
    conversions = Conversions(mesh, seconds)
    program = jax.jit(
        shard_map_program(closed, chosen, mesh, conversions, buckets=buckets),
        in_shardings=tuple(jax_sharding(spec, jax_mesh) for spec in chosen.inputs),
        compiler_options={"xla_backend_optimization_level": 0},
    )
    placed = [
        jax.device_put(leaf, jax_sharding(spec, jax_mesh))
        for leaf, spec in zip(leaves, chosen.inputs, strict=True)
    ]
    compiled = program.lower(*placed).compile()
    return Run(
        closed,
        chosen,
        mesh,
        planned_collectives(closed, chosen, mesh, conversions),
        compiled.as_text() or "",
        compiled(*placed),
        jax.jit(flat)(*leaves),
    )


def assert_equal(run: Run, tolerance: float = 2e-5) -> None:
    """Require the outputs of both runs to agree: floats to rounding, the rest to the bit."""
    for number, (actual, expected) in enumerate(zip(run.actual, run.expected, strict=True)):
        if jnp.issubdtype(expected.dtype, jax.dtypes.prng_key):
            actual, expected = jax.random.key_data(actual), jax.random.key_data(expected)
        one, other = np.asarray(actual), np.asarray(expected)
        if jnp.issubdtype(other.dtype, jnp.inexact):
            scale = max(float(np.max(np.abs(other), initial=0)), 1e-6)
            np.testing.assert_allclose(
                one, other, rtol=tolerance, atol=tolerance * scale, err_msg=f"output {number}"
            )
        else:
            np.testing.assert_array_equal(one, other, err_msg=f"output {number}")


@pytest.fixture(scope="session")
def run() -> Callable[..., Run]:
    """Return `run_program`."""
    return run_program


@pytest.fixture(scope="session")
def same() -> Callable[..., None]:
    """Return `assert_equal`."""
    return assert_equal

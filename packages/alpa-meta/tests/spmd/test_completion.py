import itertools
import random

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from alpa_interchange import LogicalMesh, MeshAxis, ShardingSpec
from alpa_meta.spmd import JaxprPlan, jax_sharding, shard_map_program
from ilp_sharding.strategies import Conversions


def seconds(kind: str, bytes: float, axes: tuple[str, ...]) -> float:
    return 1e-6 + bytes / 1e9


def every_spec(rank: int, axes: tuple[str, ...]) -> list[ShardingSpec]:
    """Return all specs of a tensor every axis divides, axes of a dim in any order, with sums."""
    specs = []
    for homes in itertools.product(range(-2, rank), repeat=len(axes)):
        groups = [[a for a, home in zip(axes, homes) if home == dim] for dim in range(rank)]
        partial = tuple(a for a, home in zip(axes, homes) if home == -2)
        for orders in itertools.product(*(itertools.permutations(group) for group in groups)):
            specs.append(ShardingSpec(tuple(orders), partial))
    return specs


def test_every_conversion_keeps_the_value() -> None:
    mesh = LogicalMesh(
        axes=(MeshAxis(name="x", size=2), MeshAxis(name="y", size=2), MeshAxis(name="z", size=2))
    )
    devices = Mesh(
        np.array(jax.devices()).reshape(2, 2, 2), ("x", "y", "z"), axis_types=(AxisType.Auto,) * 3
    )
    closed = jax.make_jaxpr(lambda value: value)(jax.ShapeDtypeStruct((8, 8), np.float32))
    value = np.arange(64, dtype=np.float32).reshape(8, 8)
    conversions = Conversions(mesh, seconds)
    specs = every_spec(2, mesh.axis_names)
    pairs = random.Random(0).sample(list(itertools.product(specs, specs)), 48)
    programs = [
        shard_map_program(closed, JaxprPlan((source,), (), (target,)), mesh, conversions)
        for source, target in pairs
    ]

    def everything(whole: jax.Array) -> list[jax.Array]:
        results = []
        for (source, target), program in zip(pairs, programs, strict=True):
            given = whole
            if source.partial:
                count = mesh.size(source.partial)
                weights = np.arange(count, dtype=np.float32) / (count * (count - 1) / 2)
                given = whole[None] * weights[:, None, None]
            (found,) = program(given)
            results.append(found.sum(0) if target.partial else found)
        return results

    whole = jax_sharding(ShardingSpec(((), ())), devices)
    results = jax.jit(everything, in_shardings=whole, out_shardings=whole)(value)
    for (source, target), result in zip(pairs, results, strict=True):
        np.testing.assert_allclose(result, value, rtol=1e-6, err_msg=f"{source} to {target}")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from alpa_interchange import LogicalMesh, MeshAxis, ShardingSpec, Strategy
from alpa_meta.audit.hlo import compiled_collectives
from alpa_meta.spmd import (
    JaxprPlan,
    RegionPlan,
    abstract_mesh,
    global_shape,
    partition_spec,
    planned_collectives,
    random_plan,
    shard_map_program,
)
from alpa_meta.step.trace import inline
from ilp_sharding.strategies import Conversions

MESH = LogicalMesh(axes=(MeshAxis(name="x", size=2), MeshAxis(name="y", size=4)))
WHOLE, ROWS, COLUMNS = (
    ShardingSpec(((), ())),
    ShardingSpec((("x",), ())),
    ShardingSpec(((), ("x",))),
)


def product(results):
    """Return the strategy of a 2-d product with its shared dim over x."""
    return Strategy(assignment=(("a", ("x",)),), operands=(COLUMNS, ROWS), results=(results,))


def test_an_unreduced_sum_crosses_the_border_with_one_more_dim():
    spec = ShardingSpec((("x",), ()), ("y",))
    assert partition_spec(spec) == PartitionSpec(("y",), ("x",), None)
    assert global_shape((8, 4), spec, MESH) == (4, 8, 4)
    assert global_shape((8, 4), WHOLE, MESH) == (8, 4)
    assert abstract_mesh(MESH).shape_tuple == (("x", 2), ("y", 4))


def test_a_product_over_a_sharded_dim_is_all_reduced_or_scattered(run):
    for results, kind, count in ((WHOLE, "all-reduce", 64), (ROWS, "reduce-scatter", 32)):
        plan = JaxprPlan((COLUMNS, ROWS), (product(results),), (results,))
        found = run(
            jnp.dot, (jnp.ones((8, 8)), jnp.ones((8, 8))), (2,), plan=lambda *_, plan=plan: plan
        )
        (planned,) = found.planned
        (compiled,) = compiled_collectives(found.text)
        assert (planned.kind, planned.bytes, planned.axes) == (kind, 4 * count, ("x",))
        assert (compiled.kind, compiled.bytes) == (kind, 4 * count)
        assert planned.reason == "sum of dot_general"
        np.testing.assert_array_equal(found.actual[0], 8.0)


def test_a_value_read_twice_in_one_spec_is_converted_once(run):
    def plan(closed, mesh):
        add = Strategy(assignment=(), operands=(WHOLE, WHOLE), results=(WHOLE,))
        return JaxprPlan((ROWS,), (add, add), (WHOLE, WHOLE))

    found = run(lambda a: (a + a, a * a), (jnp.ones((8, 8)),), (2,), plan=plan)
    assert [c.kind for c in found.planned] == ["all-gather"]
    assert "operand 0 of add" in found.planned[0].reason
    assert "test_program.py" in found.planned[0].source


def test_collectives_in_a_loop_count_its_trips():
    closed = inline(
        jax.make_jaxpr(lambda a, w: lax.scan(lambda c, _: (c @ w, None), a, length=5)[0])(
            jnp.ones((8, 8)), jnp.ones((8, 8))
        )
    )
    body = JaxprPlan((ROWS, COLUMNS), (product(COLUMNS),), (COLUMNS,))
    region = RegionPlan((ROWS, COLUMNS), (COLUMNS,), (body,))
    plan = JaxprPlan((COLUMNS, ROWS), (region,), (COLUMNS,))
    conversions = Conversions(MESH, lambda kind, bytes, axes: 1e-6 + bytes / 1e9)
    found = planned_collectives(closed, plan, MESH, conversions)
    assert [(c.kind, c.trips) for c in found] == [
        ("all-gather", 1) if c.kind == "all-gather" else (c.kind, c.trips) for c in found
    ]
    assert ("reduce-scatter", 5) in {(c.kind, c.trips) for c in found}


def test_a_recomputed_region_stays_behind_a_barrier():
    loss = lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x).sum()  # noqa: E731
    x = jnp.ones((8, 8))
    closed = inline(jax.make_jaxpr(jax.grad(loss))(x))
    conversions = Conversions(MESH, lambda kind, bytes, axes: 1e-6 + bytes / 1e9)
    program = shard_map_program(closed, random_plan(closed, MESH, 0), MESH, conversions)
    shape = global_shape((8, 8), random_plan(closed, MESH, 0).inputs[0], MESH)
    assert "optimization_barrier" in str(jax.make_jaxpr(program)(jnp.ones(shape)))

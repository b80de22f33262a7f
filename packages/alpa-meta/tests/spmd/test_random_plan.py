import jax
import jax.numpy as jnp
from jax import lax

from alpa_interchange import LogicalMesh, MeshAxis
from alpa_meta.frontend.trace import inline
from alpa_meta.spmd import RegionPlan, random_plan

MESH = LogicalMesh(axes=(MeshAxis(name="x", size=2), MeshAxis(name="y", size=2)))


def program(x, w):
    def layer(x, w):
        return jnp.tanh(x @ w), x.sum()

    x, sums = lax.scan(layer, x, w)
    return -x * 2 + sums.sum()


CLOSED = inline(jax.make_jaxpr(program)(jnp.ones((8, 8)), jnp.ones((3, 8, 8))))


def test_a_seed_gives_one_plan_and_seeds_differ():
    plans = [random_plan(CLOSED, MESH, seed) for seed in range(6)]
    assert plans[0] == random_plan(CLOSED, MESH, 0)
    assert len(set(plans)) == 6


def test_carries_keep_their_spec_and_the_stacked_dim_stays_whole():
    for seed in range(20):
        plan = random_plan(CLOSED, MESH, seed)
        (region,) = [step for step in plan.strategies if isinstance(step, RegionPlan)]
        assert region.operands[0] == region.results[0] == region.bodies[0].outputs[0]
        assert region.operands[1].dims[0] == () and region.results[1].dims[0] == ()


def test_sums_are_sometimes_left_open_and_passed_through():
    ones = jnp.ones((8, 8))
    closed = inline(jax.make_jaxpr(lambda x, w: -(x @ w).T * 2)(ones, ones))
    partial = [
        spec
        for seed in range(40)
        for step in random_plan(closed, MESH, seed).strategies
        for spec in step.operands
        if spec.partial
    ]
    assert partial

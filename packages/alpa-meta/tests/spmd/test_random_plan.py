import jax
import jax.numpy as jnp
from jax import lax

from alpa_interchange import LogicalMesh, MeshAxis
from alpa_meta.spmd import RegionPlan, random_plan, stacked
from alpa_meta.step.trace import inline
from ilp_sharding.strategies import completed_specs

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


def test_carries_keep_their_spec_and_sums_are_completed_behind_the_loop():
    left: set[tuple[int, str]] = set()
    for seed in range(40):
        plan = random_plan(CLOSED, MESH, seed)
        (region,) = [step for step in plan.strategies if isinstance(step, RegionPlan)]
        (body,) = region.bodies
        assert region.operands[0] == body.inputs[0] == body.outputs[0]
        assert region.operands[1].dims[0] == ()
        for number, result in enumerate(region.results):
            natural = stacked(body.outputs[number]) if number else body.outputs[number]
            assert result in completed_specs(natural, ((8, 8), (3,))[number], MESH, True)
            left.update((number, axis) for axis in natural.partial)
    assert left == {(0, "x"), (0, "y"), (1, "x"), (1, "y")}


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

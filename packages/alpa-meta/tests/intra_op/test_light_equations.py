"""Equations that follow an operand: which one, and the strategies they take from it."""

import jax
import jax.numpy as jnp
import pytest

from alpa_interchange import ShardingSpec, SubmeshSpec
from alpa_meta.compat import open_jaxpr
from alpa_meta.intra_op.light_equations import leading_operand
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.stage_problem import Source
from alpa_meta.operators import is_heavy, sharding_rule
from cost_model import CostModel, cluster

MODEL = CostModel(cluster("h100:8"))
MESH = MODEL.logical_mesh(SubmeshSpec(num_hosts=1, devices_per_host=8), (2, 4), ("x", "y"))
COSTS = MeshCosts(MESH, MODEL)
MATRIX = jnp.ones((4, 8))


def equation(function, *args):
    """Return the only equation of `function`."""
    (eqn,) = open_jaxpr(jax.make_jaxpr(function)(*args)).eqns
    return eqn


def source(node, var):
    shape = var.aval.shape
    return Source(node, (ShardingSpec(((),) * len(shape)),), shape, 4.0 * var.aval.size)


def leader(eqn, phase="forward", accumulated=(), state_nodes=(), order=None, spread=()):
    """Return the operand `eqn` follows if operand k comes from node k."""
    scope = {var: source(node, var) for node, var in enumerate(eqn.invars)}
    rule = sharding_rule(eqn)
    assert rule is not None
    return leading_operand(
        eqn,
        rule,
        scope,
        phase,
        accumulated=accumulated,
        state_nodes=state_nodes,
        order={} if order is None else order,
        spread=spread,
    )


def test_a_contraction_follows_nobody():
    eqn = equation(jnp.dot, MATRIX, MATRIX.T)
    assert is_heavy(eqn)
    assert leader(eqn) is None


def test_a_light_equation_follows_its_latest_operand():
    eqn = equation(jax.lax.add, MATRIX, MATRIX)
    first, second = eqn.invars
    assert leader(eqn, order={first: 1, second: 2}) == 1
    assert leader(eqn, order={first: 2, second: 1}) == 0


def test_a_light_equation_rather_follows_an_operand_that_was_not_broadcast():
    eqn = equation(jax.lax.add, MATRIX, MATRIX)
    first, second = eqn.invars
    assert leader(eqn, order={first: 1, second: 2}, spread={second}) == 0
    assert leader(eqn, order={first: 1, second: 2}, spread={first, second}) == 1


def test_the_update_follows_state_and_no_accumulated_value():
    eqn = equation(jax.lax.add, MATRIX, MATRIX)
    gradient = eqn.invars[1]
    assert leader(eqn, "update", accumulated={gradient}, state_nodes={0}) == 0
    assert leader(eqn, "update", accumulated={gradient}) is None


def following(rule, source, passes=False, leaves=False):
    return COSTS.layouts.following(rule, 0, COSTS.number(source.specs), passes, leaves)


@pytest.mark.parametrize("passes", [False, True])
def test_the_result_is_sharded_as_the_operand_that_is_followed(passes):
    eqn = equation(jnp.transpose, MATRIX)
    specs = (ShardingSpec((("x",), ("y",))), ShardingSpec(((), ("x",)), ("y",)))
    followed = Source(0, specs, (4, 8), 128.0)
    found = following(sharding_rule(eqn), followed, passes=passes)
    assert [strategy.results[0].dims for strategy in found] == [(("y",), ("x",)), (("x",), ())]
    assert [strategy.results[0].partial for strategy in found] == [(), ("y",) if passes else ()]


def test_axes_that_do_not_divide_a_dim_are_dropped():
    eqn = equation(jnp.tanh, jnp.ones((6, 8)))
    followed = Source(0, (ShardingSpec((("x", "y"), ())),), (6, 8), 192.0)
    (found,) = following(sharding_rule(eqn), followed)
    assert found.results[0].dims == (("x",), ())


def test_a_reduction_may_leave_its_own_sums_beside_those_it_passes_on():
    eqn = equation(lambda x: jax.lax.reduce_sum(x, (0,)), MATRIX)
    specs = (ShardingSpec((("x",), ())), ShardingSpec((("x",), ()), ("y",)))
    followed = Source(0, specs, (4, 8), 128.0)
    rule = sharding_rule(eqn)
    (alone, passed) = following(rule, followed, passes=True, leaves=True)
    assert alone.results == (ShardingSpec(((),), ("x",)),)
    assert passed.results == (ShardingSpec(((),), ("x", "y")),)
    completed = following(rule, followed)
    assert all(strategy.results == (ShardingSpec(((),)),) for strategy in completed)

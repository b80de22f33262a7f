"""Sums left partial: which values may stay so, and what their completion costs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attrs import evolve

from alpa_interchange import ShardingSpec, SubmeshSpec
from alpa_meta.compat import Var, open_jaxpr
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.partial_sums import completions, may_leave_partial, may_stay_partial
from alpa_meta.intra_op.stage_problem import Source, StageEqns
from cost_model import CostModel, cluster

MODEL = CostModel(cluster("h100:8"))
MESH = MODEL.logical_mesh(SubmeshSpec(num_hosts=1, devices_per_host=8), (2, 4), ("x", "y"))
PARTIAL = ShardingSpec(((), ()), ("y",))
SUMS = Source(0, (PARTIAL,), (8, 8), 256.0)


def backward(x, cotangent, w):
    transposed = x.T
    gradient = transposed @ cotangent
    scaled = gradient * 2.0  # linear: sums may pass
    squared = (cotangent @ w) ** 2
    return scaled, squared


def stage(num_microbatches):
    """Return the equations of `backward`, and those whose result is accumulated."""
    a = jnp.ones((4, 4))
    jaxpr = open_jaxpr(jax.make_jaxpr(backward)(a, a, a))
    found = StageEqns(
        eqns=jaxpr.eqns,
        phases=["backward"] * len(jaxpr.eqns),
        keys=[None] * len(jaxpr.eqns),
        state=frozenset(),
        carried=[],
        kept=frozenset(),
        accumulated=frozenset(v for v in jaxpr.outvars if isinstance(v, Var)),
        num_microbatches=num_microbatches,
    )
    return jaxpr, found


def test_accumulated_values_may_stay_partial_only_with_several_microbatches():
    assert not may_stay_partial(stage(1)[1])
    jaxpr, found = stage(4)
    assert set(jaxpr.outvars) <= may_stay_partial(found)


def test_sums_stay_partial_through_linear_operators_only():
    jaxpr, found = stage(4)
    products = [eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    gradient, before_the_square = products
    allowed = may_stay_partial(found)
    assert gradient in allowed
    assert before_the_square not in allowed


def test_sums_that_another_stage_reads_are_sent_complete():
    jaxpr, found = stage(4)
    gradient = next(e.outvars[0] for e in jaxpr.eqns if e.primitive.name == "dot_general")
    allowed = may_stay_partial(evolve(found, sent=frozenset({gradient})))
    assert gradient not in allowed
    assert jaxpr.outvars[0] in allowed


def test_sums_leave_a_body_through_outputs_that_nothing_in_it_reads():
    def body(x, w):
        product = x @ w
        read = x @ w.T
        return jnp.tanh(read), product.T * 2.0, read

    a = jnp.ones((4, 4))
    jaxpr = open_jaxpr(jax.make_jaxpr(body)(a, a))
    product, read = (e.outvars[0] for e in jaxpr.eqns if e.primitive.name == "dot_general")
    carry, scaled, _ = jaxpr.outvars
    leaving = may_leave_partial(jaxpr, range(1, 3))
    assert {product, scaled} <= leaving
    assert not leaving & {carry, read}
    assert not may_leave_partial(jaxpr, range(0)) & {product, scaled, carry, read}


def test_sums_are_completed_unless_they_may_stay():
    costs = MeshCosts(MESH, MODEL)
    found = completions(costs, SUMS, allowed=False, late=False)
    finals, seconds = found.finals, found.seconds[0]
    assert not any(spec.partial for spec in finals)
    whole = seconds[0, finals.index(ShardingSpec(((), ())))]
    assert whole == pytest.approx(costs.collective_seconds("all-reduce", 256.0, ("y",)))
    scattered = seconds[0, finals.index(ShardingSpec((("y",), ())))]
    assert scattered < whole
    staying = completions(costs, SUMS, allowed=True, late=False)
    assert staying.seconds[0][0, staying.finals.index(PARTIAL)] == 0.0


def test_sums_in_buckets_cost_their_share():
    costs = MeshCosts(MESH, MODEL)
    alone = completions(costs, SUMS, allowed=False, late=False).seconds[0]
    found = completions(costs, SUMS, allowed=False, late=True)
    finals, shared = found.finals, found.seconds[0]
    assert np.all(shared <= alone)
    share = costs.bucket_share_seconds("all-reduce", 256.0, ("y",))
    assert shared[0, finals.index(ShardingSpec(((), ())))] == pytest.approx(share)

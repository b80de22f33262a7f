import jax
import jax.numpy as jnp
import pytest

from alpa_interchange import ShardingSpec, SubmeshSpec
from alpa_meta.compat import open_jaxpr
from alpa_meta.intra_op.bucketed_traffic import (
    BucketedTraffic,
    completion_steps,
    late_in_body,
    late_values,
    sums_together,
)
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.stage_problem import Source, StageEqns
from cost_model import CostModel, cluster

MODEL = CostModel(cluster("h100:8"))
COSTS = MeshCosts(
    MODEL.logical_mesh(SubmeshSpec(num_hosts=1, devices_per_host=8), (2, 4), ("x", "y")), MODEL
)
WHOLE = ShardingSpec(((), ()))


def stage(function, phases, *args):
    """Return a stage of `function`'s equations with a phase each."""
    jaxpr = open_jaxpr(jax.make_jaxpr(function)(*args))
    assert len(jaxpr.eqns) == len(phases), jaxpr
    return jaxpr, StageEqns(
        eqns=jaxpr.eqns,
        phases=phases,
        keys=[None] * len(phases),
        state=frozenset(),
        carried=[],
        kept=frozenset(),
        accumulated=frozenset(),
        num_microbatches=1,
    )


def test_a_gradient_is_late_and_what_the_backward_pass_goes_on_with_is_not():
    def backward(cotangent, x, w):
        gradient = x.T @ cotangent  # transpose, dot_general
        further = cotangent @ w
        scaled = gradient * 2.0
        return w - scaled, jnp.sin(further) @ w

    a = jnp.ones((4, 4))
    phases = ["backward"] * 4 + ["update"] + ["backward"] * 2
    jaxpr, found = stage(backward, phases, a, a, a)
    late = late_values(found, lambda eqn: eqn.primitive.name == "dot_general")
    transpose, gradient, further, scaled, _, sine, last = (e.outvars[0] for e in jaxpr.eqns)
    assert {gradient, scaled, last} <= late
    assert not {transpose, further, sine} & late


def test_in_a_recomputation_late_is_what_only_its_late_outputs_wait_for():
    def body(x, cotangent, w):
        return (x.T @ cotangent) * 2.0, cotangent @ w

    a = jnp.ones((4, 4))
    jaxpr = open_jaxpr(jax.make_jaxpr(body)(a, a, a))
    transpose, gradient, scaled, further = (eqn.outvars[0] for eqn in jaxpr.eqns)

    def heavy(eqn):
        return eqn.primitive.name == "dot_general"

    assert late_in_body(jaxpr, [0], "backward", heavy) == {gradient, scaled}
    assert late_in_body(jaxpr, [0, 1], "backward", heavy) == {gradient, scaled, further}
    assert not late_in_body(jaxpr, [], "backward", heavy)


def test_sums_at_the_same_depth_are_sent_together_and_no_others():
    def forward(x):
        mean, square = jnp.sum(x, 0), jnp.sum(x * x, 0)  # reduce_sum, mul, reduce_sum
        further = jnp.sum(x * mean, 0)  # waits for the first: mul (after broadcast), reduce_sum
        return square + further + jnp.max(x, 0)  # reduce_max is another reduction

    jaxpr = open_jaxpr(jax.make_jaxpr(forward)(jnp.ones((4, 4))))
    _, found = stage(forward, ["forward"] * len(jaxpr.eqns), jnp.ones((4, 4)))
    together = sums_together(found, lambda eqn: eqn.primitive.name == "dot_general")
    counts = [(eqn.primitive.name, together[eqn]) for eqn in found.eqns if eqn in together]
    assert sorted(counts) == [
        ("reduce_max", 1),
        ("reduce_sum", 1),
        ("reduce_sum", 2),
        ("reduce_sum", 2),
    ]


def test_sums_are_scattered_before_the_rest_is_reduced():
    natural = ShardingSpec(((), ()), ("x", "y"))
    final = ShardingSpec((("x",), ()))
    steps = list(completion_steps(COSTS.mesh, 800.0, natural, final))
    assert steps == [("reduce-scatter", 800.0, ("x",)), ("all-reduce", 400.0, ("y",))]


def traffic(num_tensors, bytes, phases=("update",)):
    """Return the traffic of tensors gathered from rows over y, under the only choice there is."""
    found = BucketedTraffic(COSTS)
    rows = ShardingSpec((("y",), ()))
    for number in range(num_tensors):
        source = Source(2 * number, (rows,), (64, 64), bytes)
        phase = phases[number % len(phases)]
        found.conversion(phase, 1.0, source, 2 * number + 1, (WHOLE,))
    return found, [0] * (2 * num_tensors)


@pytest.mark.parametrize("num_tensors", [1, 3, 40])
def test_shares_and_what_buckets_cost_beyond_them_are_the_buckets(num_tensors):
    bytes = 4e6
    found, choice = traffic(num_tensors, bytes)
    shares = num_tensors * COSTS.bucket_share_seconds("all-gather", bytes, ("y",))
    extra = found.extra(choice)["update"]
    whole = COSTS.bucketed_seconds("all-gather", [bytes] * num_tensors, ("y",))
    assert extra >= 0
    assert shares + extra == pytest.approx(whole)


def test_many_small_tensors_cost_less_together_than_alone():
    alone = 40 * COSTS.collective_seconds("all-gather", 1e4, ("y",))
    together = COSTS.bucketed_seconds("all-gather", [1e4] * 40, ("y",))
    assert 40 * COSTS.bucket_share_seconds("all-gather", 1e4, ("y",)) < together < alone / 20


def test_phases_do_not_share_buckets():
    together, choice = traffic(10, 1e4)
    apart, _ = traffic(10, 1e4, ("backward", "update"))
    latency = COSTS.collective_seconds("all-gather", 1.0, ("y",))
    more = sum(apart.extra(choice).values()) - sum(together.extra(choice).values())
    assert more == pytest.approx(latency, rel=0.05)

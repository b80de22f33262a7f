"""What an operator costs under each strategy: a device's part, and the collectives inside."""

import jax
import jax.numpy as jnp
import pytest

from alpa_interchange import ShardingSpec, SubmeshSpec
from alpa_meta.compat import open_jaxpr
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.operator_seconds import operator_seconds, product_shapes
from alpa_meta.operators import flops, sharding_rule, traffic_bytes
from cost_model import CostModel, cluster

MODEL = CostModel(cluster("h100:8"))
MESH = MODEL.logical_mesh(SubmeshSpec(num_hosts=1, devices_per_host=8), (2, 4), ("x", "y"))
COSTS = MeshCosts(MESH, MODEL)


def rule_of(eqn):
    rule = sharding_rule(eqn)
    assert rule is not None
    return rule


def equation(function, *args):
    """Return the only equation of `function`, and its strategies."""
    (eqn,) = open_jaxpr(jax.make_jaxpr(function)(*args)).eqns
    return eqn, COSTS.layouts.strategies(rule_of(eqn))


def test_a_product_costs_a_devices_share_of_its_work():
    eqn, strategies = equation(jnp.dot, jnp.ones((64, 64)), jnp.ones((64, 64)))
    seconds = operator_seconds(
        COSTS, eqn, sharding_rule(eqn), strategies, False, traffic_bytes(eqn)
    )
    for strategy, found in zip(strategies, seconds, strict=True):
        shards = MESH.size(tuple(a for _, axes in strategy.assignment for a in axes))
        work, traffic = flops(eqn) / shards, traffic_bytes(eqn) / shards
        assert found == pytest.approx(COSTS.compute_seconds("matmul", work, traffic, "float32"))


def test_an_operator_without_a_rule_is_computed_whole_on_every_device():
    eqn, strategies = equation(jnp.tanh, jnp.ones((64, 64)))
    whole = tuple(one for one in strategies if not one.assignment)
    (seconds,) = operator_seconds(COSTS, eqn, None, whole, False, traffic_bytes(eqn))
    assert seconds == pytest.approx(
        COSTS.kernel_seconds("elementwise", 64 * 64, traffic_bytes(eqn), "float32")
    )


def test_a_maximum_over_a_sharded_dim_is_completed_inside_and_cheaper_in_a_bucket():
    eqn, strategies = equation(lambda x: jax.lax.reduce_max(x, (0,)), jnp.ones((64, 64)))
    rule = rule_of(eqn)
    alone = operator_seconds(COSTS, eqn, rule, strategies, False, traffic_bytes(eqn))
    shared = operator_seconds(COSTS, eqn, rule, strategies, True, traffic_bytes(eqn))
    reduced = [
        any(rule.factor(name).kind == "reduction" for name, _ in s.assignment) for s in strategies
    ]
    assert any(reduced)
    for inside, first, second in zip(reduced, alone, shared, strict=True):
        assert (second < first) == inside


def test_on_a_cpu_cutting_few_output_channels_saves_less_than_cutting_the_batch(host_costs):
    by_result = _convolutions(
        host_costs, jnp.ones((16, 16, 16, 8)), jnp.ones((3, 3, 8, 8)), groups=1
    )
    batch, channels, summed = (
        by_result[spec]
        for spec in (
            ShardingSpec((("x",), (), (), ())),
            ShardingSpec(((), (), (), ("x",))),
            ShardingSpec(((), (), (), ()), ("x",)),
        )
    )
    # patches: 16 * 16 * 16 positions x 3 * 3 pixels, each a cache line of 64 bytes
    runs = 16 * 16 * 16 * 3 * 3
    assert channels > runs * 64 / host_costs.model.device().memory_bandwidth
    assert summed > runs * 64 / host_costs.model.device().memory_bandwidth
    assert channels > 3 * batch


@pytest.mark.parametrize("groups", [16, 32])
def test_on_a_cpu_many_groups_of_a_convolution_stay_on_a_device(host_costs, groups):
    image, kernel = jnp.ones((16, 8, 8, groups)), jnp.ones((3, 3, 1, groups))
    by_result = _convolutions(host_costs, image, kernel, groups)
    batch = by_result[ShardingSpec((("x",), (), (), ()))]
    channels = by_result[ShardingSpec(((), (), (), ("x",)))]
    assert channels > 1.5 * batch if groups == 32 else channels == pytest.approx(batch, rel=0.1)


@pytest.fixture
def host_costs():
    """Return the costs of the host that all tests share."""
    model = CostModel(cluster("host:8"))
    submesh = SubmeshSpec(num_hosts=1, devices_per_host=8)
    return MeshCosts(model.logical_mesh(submesh, (8,), ("x",)), model)


def _convolutions(costs, image, kernel, groups):
    """Return {result: seconds} of the strategies of a convolution."""

    def convolve(image, kernel):
        return jax.lax.conv_general_dilated(
            image,
            kernel,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    (eqn,) = open_jaxpr(jax.make_jaxpr(convolve)(image, kernel)).eqns
    rule = rule_of(eqn)
    strategies = costs.layouts.strategies(rule)
    seconds = operator_seconds(costs, eqn, rule, strategies, False, traffic_bytes(eqn))
    return {one.results[0]: cost for one, cost in zip(strategies, seconds, strict=True)}


def test_sums_sent_together_share_one_latency():
    eqn, strategies = equation(lambda x: jax.lax.reduce_max(x, (0,)), jnp.ones((64, 64)))
    rule = rule_of(eqn)
    alone = operator_seconds(COSTS, eqn, rule, strategies, False, traffic_bytes(eqn))
    three = operator_seconds(COSTS, eqn, rule, strategies, False, traffic_bytes(eqn), together=3)
    for strategy, first, second in zip(strategies, alone, three, strict=True):
        axes = tuple(
            a for n, axes in strategy.assignment if rule.factor(n).kind == "reduction" for a in axes
        )
        local = 4.0 * 64 / MESH.size(tuple(a for dim in strategy.results[0].dims for a in dim))
        saved = COSTS.collective_seconds("all-reduce", local, axes) if axes else 0.0
        paid = COSTS.collective_seconds("all-reduce", 3 * local, axes) / 3 if axes else 0.0
        assert first - second == pytest.approx(saved - paid)


def test_narrow_parts_of_a_product_are_slow_under_a_program_that_states_so():
    model = CostModel(cluster("h100:8+nanotron"))
    costs = MeshCosts(
        model.logical_mesh(SubmeshSpec(num_hosts=1, devices_per_host=8), (8,), ("x",)), model
    )
    eqn, _ = equation(jnp.dot, jnp.ones((8192, 4096)), jnp.ones((4096, 1024)))
    rule = rule_of(eqn)
    strategies = costs.layouts.strategies(rule)
    found = operator_seconds(costs, eqn, rule, strategies, False, traffic_bytes(eqn))
    rows, columns = (
        min(
            seconds
            for one, seconds in zip(strategies, found, strict=True)
            if [rule.factor(name).size for name, _ in one.assignment] == [size]
        )
        for size in (8192, 1024)
    )
    # 1024 rows of 1024 columns each, or 8192 rows of 128: a device does an eighth of the work
    assert rows < 0.6 * columns


def test_products_of_batches_of_heads_are_attentions():
    def kernel(text, *shapes):
        eqn, strategies = equation(
            lambda *operands: jnp.einsum(text, *operands), *map(jnp.ones, shapes)
        )
        kind, found = product_shapes(MESH, eqn, rule_of(eqn), strategies)
        whole = [one.assignment for one in strategies].index(())
        return kind, found[whole]

    scores = kernel("bhqd,bhkd->bhqk", (2, 4, 256, 64), (2, 4, 128, 64))
    assert scores == ("attention", (8, 256, 128, 64))
    assert kernel("ik,kj->ij", (256, 64), (64, 128)) == ("matmul", (1, 256, 128, 64))

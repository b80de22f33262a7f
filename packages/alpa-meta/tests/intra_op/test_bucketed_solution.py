"""Solutions by what their buckets cost, beside every choice there is on a small problem."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_interchange import LogicalMesh, MeshAxis
from alpa_meta.inter_op.layering import assign_layers
from alpa_meta.inter_op.stage_selection import stage_scope
from alpa_meta.inter_op.staging import assign_stages
from alpa_meta.intra_op.bucketed_solution import least_extra, solve_in_buckets
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.selection import build
from alpa_meta.options import Options
from alpa_meta.step.program import Step
from cost_model import CostModel, cluster


def _step(weights, batch):
    def loss(weights):
        return jnp.mean((jnp.tanh(batch @ weights["a"]) @ weights["b"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def _selection(width, latency):
    weight = jax.ShapeDtypeStruct((width, width), jnp.float32)
    batch = jax.ShapeDtypeStruct((width, width), jnp.float32)
    program = Step(_step, ({"a": weight, "b": weight}, batch)).program(1)
    layering = assign_layers(program, lambda eqns, inputs: [0] * len(eqns))
    scope = stage_scope(program, assign_stages(layering, [], program.jaxpr.outvars), 0, 1)
    mesh = LogicalMesh(axes=(MeshAxis(name="x", size=4, bandwidth=1e11, latency=latency),))
    return build(scope.eqns, MeshCosts(mesh, CostModel(cluster("h100:4"))), "test")


def _seconds(problem, choice):
    """Return the seconds of a choice under a problem."""
    counts = problem.num_strategies
    nodes = np.concatenate([[0], np.cumsum(counts)])
    total = sum(problem.node_cost[nodes[k] + one] for k, one in enumerate(choice))
    start = 0
    for first, second in problem.edges:
        total += problem.edge_cost[start + choice[first] * counts[second] + choice[second]]
        start += counts[first] * counts[second]
    return total


def _sampled(selection, count):
    """Return random choices that can be carried out."""
    draw = np.random.default_rng(0)
    found: list[list[int]] = []
    while len(found) < count:
        choice = [int(draw.integers(n)) for n in selection.problem.num_strategies]
        if np.isfinite(_seconds(selection.problem, choice)):
            found.append(choice)
    return found


@pytest.mark.parametrize(("width", "latency"), [(16, 1e-4), (64, 1e-6), (2048, 1e-6)])
def test_the_bound_holds_for_every_choice_and_the_answer_is_what_it_costs(width, latency):
    selection = _selection(width, latency)
    found = solve_in_buckets(selection, Options())
    extra = sum(selection.traffic.extra(found.choice).values())
    assert found.objective == pytest.approx(_seconds(selection.problem, found.choice) + extra)
    for choice in _sampled(selection, 100):
        more = sum(selection.traffic.extra(choice).values())
        shared = _seconds(selection.problem, choice)
        alone = _seconds(selection.traffic.repriced(selection.problem), choice)
        assert shared + more <= alone * (1 + 1e-6) + 1e-12 or more == 0
        assert found.lower_bound <= (shared + more) * (1 + 1e-6)
        assert more == 0 or more >= least_extra(selection) * (1 - 1e-6)


def test_where_latency_decides_nothing_is_sent_and_that_is_proven():
    found = solve_in_buckets(_selection(16, 1e-4), Options())
    assert found.gap == pytest.approx(0, abs=1e-6)
    assert not _selection(16, 1e-4).traffic.extra(found.choice)


def test_prices_lie_between_the_share_of_a_bucket_and_sending_alone():
    selection = _selection(64, 1e-6)
    for choice in _sampled(selection, 50):
        groups = selection.traffic.groups(choice)
        prices = {
            group: selection.traffic.beyond_shares(group, sizes)
            / sum(size * count for size, count in sizes.items())
            for group, sizes in groups.items()
        }
        priced = selection.traffic.repriced(selection.problem, prices)
        shared = _seconds(selection.problem, choice)
        alone = _seconds(selection.traffic.repriced(selection.problem), choice)
        assert shared * (1 - 1e-6) <= _seconds(priced, choice) <= alone * (1 + 1e-6)
        more = sum(selection.traffic.extra(choice).values())
        assert _seconds(priced, choice) <= (shared + more) * (1 + 1e-6)

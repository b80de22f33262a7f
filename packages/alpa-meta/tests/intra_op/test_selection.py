"""The selection problem of a stage: nodes, folding, costs and memory."""

import jax
import jax.numpy as jnp
import numpy as np
import perceptron
import pytest

import ilp_sharding
from alpa_interchange import LogicalMesh, MeshAxis
from alpa_meta.inter_op.layering import assign_layers
from alpa_meta.inter_op.stage_selection import stage_scope
from alpa_meta.inter_op.staging import assign_stages
from alpa_meta.intra_op.memory_limit import solve_within
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.selection import build
from alpa_meta.options import Options
from alpa_meta.passes.shared_reads import is_shared_read
from alpa_meta.step.program import Step
from cost_model import CostModel, cluster

MESH = LogicalMesh(
    axes=(
        MeshAxis(name="x", size=2, bandwidth=1e9, latency=1e-6),
        MeshAxis(name="y", size=4, bandwidth=1e9, latency=1e-6),
    )
)


def _selection(num_layers, mesh=MESH, num_microbatches=1, step=perceptron.step):
    weights = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * num_layers
    batch = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    program = Step(step, (weights, batch)).program(num_microbatches)

    def cut_at_products(eqns, inputs):
        layers, layer = [], -1
        for eqn in eqns:
            layer += eqn.primitive.name == "dot_general"
            layers.append(max(layer, 0))
        return layers

    layering = assign_layers(program, cut_at_products)
    staging = assign_stages(layering, [], program.jaxpr.outvars)
    scope = stage_scope(program, staging, 0, 1)
    costs = MeshCosts(mesh, CostModel(cluster("h100:8")))
    return program, scope, build(scope.eqns, costs, "test")


def test_a_choice_costs_what_its_equations_cost():
    _, _, selection = _selection(3)
    problem = selection.problem
    solution = ilp_sharding.solve(problem)
    assert solution.status == "optimal"
    random = np.random.default_rng(0)
    others = [random.integers(problem.num_strategies).tolist() for _ in range(5)]
    for choice in (solution.choice, *others):
        by_equation = selection.seconds.under(choice).sum()
        assert by_equation == pytest.approx(ilp_sharding.check(problem, choice).cost)
        assert selection.seconds.least().sum() <= by_equation + 1e-12


def test_inner_layers_of_a_chain_share_their_nodes():
    sizes = [_selection(count)[2].problem.num_nodes for count in (6, 12)]
    assert sizes[0] == sizes[1]


def test_state_memory_is_its_bytes_over_the_devices_that_shard_it():
    program, _, selection = _selection(1)
    weight = program.jaxpr.invars[0]
    source = selection.sources[weight]
    offsets = np.concatenate([[0], np.cumsum(selection.problem.num_strategies)])
    row, _ = selection.memory.row(0)
    memory = row[offsets[source.node] : offsets[source.node + 1]]
    for spec, held in zip(source.specs, memory, strict=True):
        assert held == 16 * 16 * 4 / MESH.size(tuple(a for dim in spec.dims for a in dim))


@pytest.mark.parametrize("share", [0.9, 0.5, 0.3])
def test_a_memory_limit_is_kept(share):
    _, _, selection = _selection(4)
    whole = selection.memory.peak([0] * selection.problem.num_nodes).total
    solution = solve_within(selection, Options(), share * whole)
    if solution.choice is None:
        assert solution.status == "infeasible"
        assert solution.smallest_memory is None or solution.smallest_memory > share * whole
    else:
        assert selection.memory.peak(solution.choice).total <= share * whole
        assert len(solution.choice) == selection.problem.num_nodes
        assert solution.lower_bound is not None and solution.objective is not None
        assert solution.lower_bound <= solution.objective


def test_every_equation_gets_a_strategy_whose_operands_match_its_ranks():
    _, scope, selection = _selection(2)
    solution = ilp_sharding.solve(selection.problem)
    for position, eqn in enumerate(scope.eqns.eqns):
        strategy = selection.strategy(position, solution.choice)
        ranks = [len(getattr(atom.aval, "shape", ())) for atom in eqn.invars]
        assert [len(spec.dims) for spec in strategy.operands] == ranks


def test_gradients_may_stay_partial_only_with_several_microbatches():
    def partial_specs(count):
        _, scope, selection = _selection(2, num_microbatches=count)
        return {
            spec
            for var in scope.eqns.accumulated
            if var in selection.sources
            for spec in selection.sources[var].specs
            if spec.partial
        }

    assert not partial_specs(1)
    assert partial_specs(4)


def test_what_is_read_for_several_is_held_until_the_last_has_read_it():
    def step(weights, batch):
        def loss(weights):
            hidden = jnp.tanh(batch)
            return jnp.mean(jnp.tanh(hidden @ weights[0]) * (hidden @ weights[1]))

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(jnp.subtract, weights, gradients), value

    _, scope, selection = _selection(2, step=step)
    eqns = scope.eqns.eqns
    first = next(k for k, eqn in enumerate(eqns) if is_shared_read(eqn))
    readers = [k for k, eqn in enumerate(eqns) if eqns[first].outvars[0] in eqn.invars]
    value, read = (selection.sources[v] for v in (eqns[first].invars[0], eqns[first].outvars[0]))
    whole = [not any(spec.dims) for spec in read.specs].index(True)
    rows = [spec.dims == (("x", "y"), ()) for spec in read.specs].index(True)
    choice = [0] * selection.problem.num_nodes
    choice[value.node] = value.specs.index(read.specs[rows])
    usage = {}
    for name in (rows, whole):
        choice[read.node] = name
        usage[name] = selection.memory.usage(choice).sum(axis=0)
    more = usage[whole] - usage[rows]
    for k in range(first, readers[-1] + 1):  # in rows, each reader that wants it whole copies it
        expected = 0 if k in readers else 16 * 16 * 4
        assert more[selection.times[k]] == pytest.approx(expected)
    assert readers[-1] > readers[0] + 1


def test_a_barrier_of_several_values_leaves_each_as_it_is_sharded():
    def step(weights, batch):
        held, behind = jax.lax.optimization_barrier((jnp.sin(batch), weights[0]))
        return [behind - jax.grad(lambda w: jnp.mean(jnp.tanh(held @ w)))(weights[0])]

    _, scope, selection = _selection(1, step=step)
    (position,) = (
        k for k, eqn in enumerate(scope.eqns.eqns) if eqn.primitive.name == "optimization_barrier"
    )
    eqn = scope.eqns.eqns[position]
    random = np.random.default_rng(0)
    for _ in range(5):
        choice = random.integers(selection.problem.num_strategies).tolist()
        strategy = selection.strategy(position, choice)
        operands = tuple(selection.spec(atom, choice) for atom in eqn.invars)
        assert strategy.operands == strategy.results == operands

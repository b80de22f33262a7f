import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attrs import evolve

from alpa_interchange import LogicalMesh, MeshAxis
from alpa_meta import Options
from alpa_meta.inter_op.layer_costs import LayerCosts
from alpa_meta.inter_op.least_bytes import LeastBytes
from alpa_meta.inter_op.split_backward import with_split_backward
from alpa_meta.inter_op.stage_selection import stage_scope
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.selection import build
from alpa_meta.operators.elementwise import is_barrier
from alpa_meta.planning.outlooks import outlook_of
from alpa_meta.step.program import Step
from cost_model import CostModel, cluster

MESH = LogicalMesh(axes=(MeshAxis(name="x", size=1, bandwidth=1e9, latency=1e-6),))
LAYERS, HEADS, WIDTH, TOKENS, BATCH = 3, 4, 64, 128, 8
MODEL = CostModel(cluster("h100:1"))


def _layer(weight, x):
    """Attention with unfused scores and a product, each with a residual."""
    heads = jnp.einsum("btw,khwd->kbhtd", x, weight["in"])
    scores = jax.nn.softmax(heads[0] @ heads[1].swapaxes(-1, -2), axis=-1)
    x = x + jnp.einsum("bhtd,hdw->btw", scores @ heads[2], weight["out"])
    return x + jax.nn.gelu(x @ weight["up"]) @ weight["down"]


def _step(weights, batch):
    def loss(weights):
        x = batch
        for weight in weights:
            x = _layer(weight, x)
        return jnp.mean(x**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def _costs(kind, mesh=MESH, split=False):
    of = {
        "in": (3, HEADS, WIDTH, WIDTH // HEADS),
        "out": (HEADS, WIDTH // HEADS, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    layer = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in of.items()}
    batch = jax.ShapeDtypeStruct((BATCH, TOKENS, WIDTH), jnp.float32)
    program = Step(_step, ([layer] * LAYERS, batch)).program(2)
    outlook, _ = outlook_of(program, Options(num_layers=LAYERS, recompute=kind), MODEL.cluster)
    staging = outlook.staging
    if split:
        layers = tuple(layer or 0 for layer in staging.layers)  # as if each were a stage
        staging = with_split_backward(evolve(staging, stages=layers))
        staging = evolve(staging, stages=(0,) * len(layers))
    scope = stage_scope(program, staging, 0, 1, apart=True)
    selection = build(scope.eqns, MeshCosts(mesh, MODEL), "one mesh")
    choice = (0,) * selection.problem.num_nodes
    kinds = ("none", "selective", "full")
    return LayerCosts(scope, selection, outlook.num_layers, kinds=kinds, splits=not split), choice


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_layers_that_recompute_take_what_their_own_program_does(kind):
    costs, choice = _costs("none")
    derived, plain = costs.under(choice, kind), costs.under(choice)
    own, its_choice = _costs(kind)
    exact = own.under(its_choice)
    np.testing.assert_allclose(derived.forward, exact.forward, rtol=1e-9)
    np.testing.assert_allclose(derived.backward, exact.backward, rtol=1e-9)
    assert (derived.forward < plain.forward).all()  # scores are not written for later


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_a_backward_in_two_parts_takes_and_keeps_what_its_own_program_does(kind):
    costs, choice = _costs("none")
    derived = costs.under(choice, kind)
    own, its_choice = _costs(kind, split=True)
    exact = own.under(its_choice)
    np.testing.assert_allclose(derived.backward + derived.split, exact.backward, rtol=1e-9)
    np.testing.assert_allclose(derived.delayed, exact.delayed, rtol=1e-9)
    stage = own.facts.scope.eqns  # what layers were given is there in any case, not as a copy
    copies = {var for eqn in stage.eqns if is_barrier(eqn) for var in eqn.outvars}
    assert stage.delayed and copies.isdisjoint(stage.delayed)
    for layer in range(1, LAYERS):  # all of the first layer's backward is by weight
        assert 0 <= costs.least_split(layer, kind) <= derived.split[layer] * (1 + 1e-9)


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_the_least_of_all_kinds_and_what_a_kind_adds_are_below_what_it_takes(kind):
    costs, choice = _costs("none")
    taken = costs.under(choice, kind)
    for layer in range(LAYERS):
        least = costs.least(layer)
        more = costs.least_again(layer, kind)
        assert more >= 0
        assert least["forward"] <= taken.forward[layer] * (1 + 1e-9)
        both = least["forward"] + least["backward"] + more
        assert both <= (taken.forward + taken.backward)[layer] * (1 + 1e-9)
        beside = costs.least_again(layer, kind, beside="none")
        plain = costs.under(choice)
        assert beside == pytest.approx(
            (taken.forward + taken.backward - plain.forward - plain.backward)[layer]
        )


@pytest.mark.parametrize("seed", range(3))
def test_no_choice_holds_or_works_with_less_than_the_least_bytes(seed):
    rng = np.random.default_rng(seed)
    costs, _ = _costs(
        "none", LogicalMesh(axes=(MeshAxis(name="x", size=4, bandwidth=1e9, latency=1e-6),))
    )
    least = LeastBytes(costs)
    choice = [int(rng.integers(0, count)) for count in costs.selection.problem.num_strategies]
    for kind in ("none", "selective", "full"):
        taken = costs.under(choice, kind)
        for layer in range(LAYERS):
            assert 0 < least.transient(layer, kind) <= taken.transient[layer]
            assert least.kept(layer, kind) <= taken.activations[layer]
            assert least.delayed(layer, kind) <= taken.delayed[layer]


def test_floors_are_the_same_when_choices_are_forgotten():
    costs, _ = _costs("none")
    forgetful, _ = _costs("none")
    forgetful.forget_choices()
    assert not forgetful.selection.records
    for layer in range(LAYERS):
        assert forgetful.least(layer) == costs.least(layer)
        for kind in ("none", "selective", "full"):
            assert LeastBytes(forgetful).kept(layer, kind) == LeastBytes(costs).kept(layer, kind)
            assert forgetful.least_again(layer, kind) == costs.least_again(layer, kind)
            problems = [
                of.layer_problem(layer, of.seconds_of(kind).tables[0], kind=kind)
                for of in (forgetful, costs)
            ]
            assert all(
                (getattr(problems[0], name) == getattr(problems[1], name)).all()
                for name in ("node_cost", "edge_cost", "edges", "num_strategies")
            )
        names = ("state", "gradients")
        (mine, rest), (its, other) = (of.layer_bytes(layer, names) for of in (forgetful, costs))
        assert rest == other and mine.keys() == its.keys()
        assert all((mine[node] == its[node]).all() for node in its)

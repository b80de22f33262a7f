"""Windows: the selection problem of repeated layers, built from their first and last copies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_interchange import SubmeshSpec
from alpa_meta.compat import Literal
from alpa_meta.corpus import build as corpus_model
from alpa_meta.inter_op.layer_costs import solved_costs
from alpa_meta.inter_op.meshes import AXIS_NAMES
from alpa_meta.inter_op.stage_selection import stage_scope
from alpa_meta.inter_op.window import (
    Run,
    UnlikeCopiesError,
    ordered,
    repeated_units,
    window_of,
)
from alpa_meta.intra_op.bucketed_solution import solve_in_buckets
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.selection import build, same_choice
from alpa_meta.options import Options
from alpa_meta.planning.outlooks import outlook_of
from alpa_meta.step.program import Step
from cost_model import CostModel, cluster


def test_a_unit_of_several_layers_is_found_where_it_is_repeated():
    assert repeated_units([0, 1, 1, 1, 2]) == [Run(1, 1, 3)]
    assert repeated_units([0, 1, 2, 1, 2, 1, 2, 3]) == [Run(1, 2, 3)]
    assert repeated_units([0, 1, 1, 2, 2]) == []


def test_the_layers_that_stand_for_others_are_the_ends_of_a_run():
    run = Run(1, 2, 3)
    assert (run.first(5), run.last(2), run.unit(4)) == (1, 6, 1)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("moe-einsum", (4,)),
        *(
            pytest.param(*case, marks=pytest.mark.bulk)
            for case in [
                ("gpt", (2, 2)),
                ("llama", (4,)),
                ("llama", (2, 2)),
                ("gpt", (4,)),
                ("moe-einsum", (2, 2)),
            ]
        ),
    ],
)
def test_a_window_costs_layer_by_layer_what_the_whole_program_costs(name, shape):
    model = corpus_model(name, "small")
    program = Step(model.train_step, (model.state, model.batch)).program(2)
    outlook, _ = outlook_of(program, Options(), cluster("h100:4"))
    results = {atom for atom in program.jaxpr.outvars if not isinstance(atom, Literal)}
    window = window_of(outlook.staging, outlook.num_layers, results)
    assert len(window.staging.eqns) < 0.7 * len(outlook.staging.eqns)
    model_of_costs = CostModel(cluster("h100:4"))
    submesh = SubmeshSpec(num_hosts=1, devices_per_host=4)
    mesh = model_of_costs.logical_mesh(submesh, shape, AXIS_NAMES[: len(shape)])

    def solved(staging, kept):
        scope = stage_scope(program, staging, 0, 1, {}, apart=True, window=kept)
        selection = build(scope.eqns, MeshCosts(mesh, model_of_costs), "window")
        return scope, selection, solve_in_buckets(selection, Options())

    scope, selection, part = solved(window.staging, window)
    whole_scope, whole_selection, whole = solved(outlook.staging, None)
    # What is sent in buckets is solved for in rounds, which may end at another choice.
    assert part.objective == pytest.approx(whole.objective, rel=1e-3)
    assert part.lower_bound == pytest.approx(whole.lower_bound, rel=1e-3)
    choice = same_choice(whole_selection, whole.choice, selection)
    assert choice is not None
    its_costs = solved_costs(scope, selection, choice, outlook.num_layers, window)
    costs = solved_costs(whole_scope, whole_selection, whole.choice, outlook.num_layers)
    for what in ("forward", "backward", "update", "state", "gradients", "activations"):
        one, other = getattr(its_costs, what), getattr(costs, what)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-9 * max(other.max(), 1e-30))


def test_what_a_copy_reads_in_the_update_is_before_it_whatever_its_layers_are_called():
    """The gradient of a bias at the end of a layer is a sum over what the layer behind it hands
    back, and is updated with that one; the update goes by names."""

    def step(params, batch):
        def loss(params):
            x = batch
            for k in range(12):
                one = params[f"layer_{99 - k}"]
                x = x + jnp.tanh(x @ one["inner"]) @ one["outer"] + one["bias"]
            return jnp.mean(x**2)

        gradients = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    names = {"inner": (64, 256), "outer": (256, 64), "bias": (64,)}
    layer = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in names.items()}
    params = {f"layer_{99 - k}": layer for k in range(12)}
    program = Step(step, (params, jax.ShapeDtypeStruct((32, 64), jnp.float32))).program(2)
    outlook, _ = outlook_of(program, Options(), cluster("h100:4"))
    results = {atom for atom in program.jaxpr.outvars if not isinstance(atom, Literal)}
    window = window_of(outlook.staging, outlook.num_layers, results)
    assert len(window.staging.eqns) < 0.7 * len(outlook.staging.eqns)
    later = {var for eqn in window.staging.eqns for var in eqn.outvars}
    for eqn in window.staging.eqns:
        assert later.isdisjoint(a for a in eqn.invars if not isinstance(a, Literal))
        later.difference_update(eqn.outvars)


def test_equations_that_read_from_one_another_both_ways_have_no_order():
    a, b = jax.make_jaxpr(lambda x: jnp.sin(jnp.cos(x)))(1.0).eqns
    back = a.replace(invars=[b.outvars[0]])
    assert ordered([(7, b), (3, a)])[0] == [3, 7]
    with pytest.raises(UnlikeCopiesError):
        ordered([(3, back), (7, b)])

"""Short steps: a step without most of its repeated layers has the window of the whole step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from attrs import evolve

from alpa_interchange import SubmeshSpec
from alpa_meta.corpus import build as corpus_model
from alpa_meta.inter_op.candidates import input_pins, totals_share
from alpa_meta.inter_op.layer_costs import solved_costs
from alpa_meta.inter_op.meshes import AXIS_NAMES
from alpa_meta.inter_op.stage_selection import stage_scope
from alpa_meta.inter_op.window import UnlikeCopiesError
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.selection import build
from alpa_meta.options import Options
from alpa_meta.planning.menu_search import sized_programs
from alpa_meta.planning.outlooks import outlook_of, short_step_of
from alpa_meta.step.program import Step
from cost_model import CostModel, cluster

CLUSTER = cluster("h100:4")
MODEL = CostModel(CLUSTER)
WHOLE = SubmeshSpec(num_hosts=1, devices_per_host=4)
MESH = MODEL.logical_mesh(WHOLE, (2, 2), AXIS_NAMES[:2])
WIDTH, BATCH, LAYERS = 16, 8, 7
QUANTITIES = (
    "forward",
    "backward",
    "by_weight",
    "update",
    "state",
    "gradients",
    "activations",
    "delayed",
    "transient",
    "floor",
)


def _mlp(weight, x, **_):
    return x + jnp.tanh(x @ weight["up"]) @ weight["down"]


def _gated(weight, x, **_):
    return x * jax.nn.sigmoid(x @ weight["up"] @ weight["down"])


def _with_dropout(weight, x, key, number):
    kept = jax.random.bernoulli(jax.random.fold_in(key, number), 0.9, x.shape)
    return _mlp(weight, jnp.where(kept, x, 0.0))


def _mean(x, y, mask):
    return jnp.mean((x - y) ** 2)


def _masked_mean(x, y, mask):
    return jnp.sum((x - y) ** 2 * mask[:, None]) / jnp.sum(mask)


def _step(
    blocks=(_mlp,),
    layers=LAYERS,
    loss=_mean,
    optimizer=None,
    tied=False,
    balance=False,
    crossed=False,
):
    """A step of `layers` blocks, the given ones in turn, between an embedding and a head.

    `crossed`: those of the second half also read what the first half returns.
    """
    optimizer = optimizer or optax.adam(1e-3)

    def mean_loss(weights, batch):
        x = batch["x"] @ weights["embed"]
        load: float | jax.Array = 0.0
        for number, weight in enumerate(weights["layers"]):
            block = blocks[number % len(blocks)]
            if crossed and number == layers // 2:
                encoded = jax.nn.standardize(x)
            if crossed and number >= layers // 2:
                x = x + jnp.tanh(encoded @ weight["up"]) @ weight["down"]
            x = block(weight, x, key=batch["key"], number=number)
            if balance:  # a product of means over the batch, which microbatches are given whole
                load = load + jnp.sum(jnp.mean(jax.nn.softmax(x @ weight["up"]), axis=0) ** 2)
        head = weights["embed"].T if tied else weights["head"]
        return loss(x @ head, batch["y"], batch["mask"]) + load

    def step(state, batch, key):
        weights, moments = state
        value, gradients = jax.value_and_grad(mean_loss)(weights, {**batch, "key": key})
        updates, moments = optimizer.update(gradients, moments, weights)
        return (optax.apply_updates(weights, updates), moments), value

    def of(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layer = {"up": of(WIDTH, 4 * WIDTH), "down": of(4 * WIDTH, WIDTH)}
    weights = {"embed": of(WIDTH, WIDTH), "layers": [layer] * layers}
    if not tied:
        weights["head"] = of(WIDTH, WIDTH)
    batch = {"x": of(BATCH, WIDTH), "y": of(BATCH, WIDTH), "mask": of(BATCH)}
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = (weights, jax.eval_shape(optimizer.init, weights))
    return Step(step, (state, batch, key), batch_argnums=(1,))


def _priced(outlook, options):
    pins = input_pins(outlook.program, MESH, options)
    window = outlook.window
    scope = stage_scope(outlook.program, window.staging, 0, 1, pins, apart=True, window=window)
    return scope, build(scope.eqns, MeshCosts(MESH, MODEL), "window")


def _assert_equal_windows(step, options, kept=3, count=2):
    """Compare the windows of the short and the whole step; return both programs."""
    short = short_step_of(step, options, CLUSTER, kept)
    assert short is not None
    programs = short.program(count), step.program(count)
    one, other = (outlook_of(program, options, CLUSTER)[0] for program in programs)
    assert len(one.staging.eqns) < len(other.staging.eqns)
    for what in ("times", "layer_of", "classes"):
        assert getattr(one.window, what) == getattr(other.window, what)
    (scope, selection), (its_scope, its_selection) = _priced(one, options), _priced(other, options)
    problem, like = selection.problem, its_selection.problem
    assert problem.node_names == like.node_names
    np.testing.assert_allclose(problem.node_cost, like.node_cost, rtol=1e-9)
    np.testing.assert_array_equal(problem.edges, like.edges)
    np.testing.assert_allclose(problem.edge_cost, like.edge_cost, rtol=1e-9)
    random = np.random.default_rng(0)
    choice = [int(random.integers(len(names))) for names in like.strategy_names]
    costs = solved_costs(scope, selection, choice, one.num_layers, one.window)
    its_costs = solved_costs(its_scope, its_selection, choice, other.num_layers, other.window)
    for what in QUANTITIES:
        values, expected = getattr(costs, what), getattr(its_costs, what)
        np.testing.assert_allclose(values, expected, rtol=1e-9, err_msg=what)
    assert costs.peak.bytes == its_costs.peak.bytes
    assert totals_share(programs[0]) == pytest.approx(totals_share(programs[1]), rel=1e-9)
    return programs


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
@pytest.mark.parametrize("count", [1, 4])
def test_the_window_of_a_short_step_is_that_of_the_whole_one(kind, count):
    _assert_equal_windows(_step(), Options(recompute=kind), count=count)


@pytest.mark.parametrize(
    "told",
    [
        {"blocks": (_mlp, _gated), "layers": 10},
        {"blocks": (_with_dropout,)},
        {"tied": True},
        {"crossed": True, "layers": 12},
        {"optimizer": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))},
        {"optimizer": optax.adamw(1e-3)},
    ],
    ids=[
        "two kinds in turn",
        "dropout",
        "tied",
        "decoder",
        "clipped by the norm of all layers",
        "decayed",
    ],
)
def test_so_it_is_where_layers_differ_or_share(told):
    _assert_equal_windows(_step(**told), Options(num_layers=told.get("layers", LAYERS)))


def test_so_it_is_with_statistics_of_the_whole_batch():
    program, _ = _assert_equal_windows(_step(loss=_masked_mean), Options(num_layers=LAYERS))
    assert program.statistics is not None


def test_so_it_is_with_sums_that_each_layer_adds_up_over_the_batch():
    short, whole = _assert_equal_windows(
        _step((_mlp,), balance=True), Options(num_layers=LAYERS), kept=4
    )
    assert 0 < len(short.totals) < len(whole.totals)


def test_so_it_is_for_a_model_of_the_corpus():
    model = corpus_model("gpt", "small")
    _assert_equal_windows(Step(model.train_step, (model.state, model.batch)), Options())


def test_a_last_copy_that_microbatches_tell_apart_needs_the_last_but_one():
    model = corpus_model("moe-sort", "small")
    step = Step(model.train_step, (model.state, model.batch))
    short = short_step_of(step, Options(), CLUSTER)
    assert short is not None
    with pytest.raises(UnlikeCopiesError):
        _ = outlook_of(short.program(2), Options(), CLUSTER)[0].window
    program, _ = _assert_equal_windows(step, Options(), kept=4)
    sized = sized_programs(step, CLUSTER, Options(num_microbatches=2))
    assert sized is not None
    assert sized["none"][0].outlook.program is program


def test_one_stage_and_any_number_have_the_same_short_step():
    step = _step()
    found = [short_step_of(step, Options(num_stages=n), CLUSTER) for n in (None, 1)]
    assert found[0] is found[1] is not None


def test_steps_without_repetition_are_not_shortened():
    assert short_step_of(_step(layers=3), Options(), CLUSTER) is None
    alone = tuple(
        lambda weight, x, times=times, **_: _mlp(weight, jnp.concatenate([x] * times)[:BATCH])
        for times in range(1, 5)
    )
    assert short_step_of(_step(alone, layers=4), Options(), CLUSTER) is None


def test_layers_that_are_pinned_or_recomputed_otherwise_are_no_repetition():
    path = "state[0]['layers'][{}]['up']"
    all_alike = {path.format(number): ("x", None) for number in range(LAYERS)}
    for pins, left_out in ((all_alike, True), ({path.format(3): ("x", None)}, False)):
        options = Options(num_layers=LAYERS, pins=pins)
        short = short_step_of(_step(), options, CLUSTER)
        assert (short is not None) == left_out
    _assert_equal_windows(_step(), Options(num_layers=LAYERS, pins=all_alike))
    kinds = Options(num_layers=LAYERS, recompute={3: "full"})
    assert short_step_of(_step(), kinds, CLUSTER) is None


def test_what_cannot_be_cut_is_refused_by_the_short_step_for_the_same_reason():
    def normalised(weight, x, **_):
        return _mlp(weight, (x - x.mean(0)) / x.std(0))

    step = _step((normalised,))
    short = short_step_of(step, Options(num_layers=LAYERS), CLUSTER)
    assert short is not None
    assert short.program(2).inexact == step.program(2).inexact != ()


def test_a_menu_is_made_of_short_programs_at_every_size():
    sized = sized_programs(_step(), CLUSTER, Options(num_layers=LAYERS))
    assert sized is not None
    assert {one.outlook.program.left_out is not None for sizes in sized.values() for one in sizes}
    assert [one.samples for one in sized["none"]] == [1, 2, 4]
    assert {one.outlook.num_layers for sizes in sized.values() for one in sizes} == {LAYERS}


def test_all_numbers_of_microbatches_have_the_same_layers():
    step = _step()
    layers = [
        outlook_of(step.program(count), evolve(Options(), num_layers=3), CLUSTER)[1]
        for count in (1, 2, 8)
    ]
    assert len({one.num_layers for one in layers}) == 1
    forward = [
        [layer for layer, phase in zip(one.layers, one.phases, strict=True) if phase == "forward"]
        for one in layers
    ]
    assert forward[1] == forward[2]

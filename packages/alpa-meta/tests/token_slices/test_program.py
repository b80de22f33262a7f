"""A causal step in token slices computes what the step does, for the models people write."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from causal_models import TOKENS, Model, batch, loss, parameters
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from sliced_steps import CAUSAL, attention, check, cut, program, step_of

from alpa_meta.compat import open_jaxpr, shape_of
from alpa_meta.operators.regions import is_remat
from alpa_meta.token_slices.places import SliceRequest
from alpa_meta.token_slices.program import in_wanted_slices
from alpa_meta.token_slices.values import SlicingError

OPTIMISER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3))


def gradients(model) -> tuple[Any, Any]:
    def step(params, given):
        return jax.value_and_grad(loss(model))(params, given)

    return step, (parameters(model), batch(model))


def update(model) -> tuple[Any, Any]:
    def step(state, given):
        params, moments = state
        value, found = jax.value_and_grad(loss(model))(params, given)
        updates, moments = OPTIMISER.update(found, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    params = parameters(model)
    return step, ((params, OPTIMISER.init(params)), batch(model))


MODELS = [
    Model("first set", loss="last"),
    Model("additive with alibi", loss="one-hot"),
    Model("by hand", positions="rotary", longer=True),
    Model("padded convolution", scan=True, remat=True, num_layers=2),
    Model("gate", scan=True, num_layers=2),
    Model("documents -1e30", scan=True, remat=True),
    Model("recurrence", scan=True, remat=True, num_layers=2),
    Model("associative scan", scan=True, num_layers=2),
    Model(num_layers=2),
    Model("window", loss="by place"),
    Model("grouped", dropout=True),
    Model("token shift", merged=True, scan=True, remat=True, num_layers=2),
    # parts that stand above, alone or together with others, and forms close to them
    Model("keys first", loss="flat"),
    Model("tril -1e30", merged=True),
    Model("segments -1e30"),
    Model("shift back"),
    Model("learned bias"),
    Model("cumsum", remat=True),
    Model("convolution", scan=True, remat=True, num_layers=2),
    Model("kernel", remat=True),
    Model("square bias"),
    Model("scaled -1e9"),
    Model("gate"),
    Model("kernel"),
    Model("gate", scan=True, remat=True, num_layers=2),
    Model("square bias", scan=True, num_layers=2),
    Model("cumsum"),
    Model("recurrence"),
    Model("convolution"),
    Model("associative scan"),
    Model(remat=True),
    Model(scan=True, num_layers=2),
    Model("tril -1e30", scan=True, remat=True, num_layers=2),
    Model("recurrence", scan=True, num_layers=2),
]


@pytest.mark.sample(model=8)
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_loss_and_gradients_of_uneven_slices_are_those_of_the_step(model):
    check(*gradients(model), (5, 1, 6))


@settings(max_examples=2, deadline=None, derandomize=True, database=None)
@given(
    model=st.sampled_from(
        [
            Model("window", remat=True),
            Model("recurrence", scan=True, remat=True, num_layers=2),
            Model("convolution", scan=True, num_layers=2),
            Model("additive with alibi", scan=True, num_layers=2),
        ]
    ),
    cuts=st.sets(st.integers(1, TOKENS - 1), min_size=1, max_size=4),
)
def test_loss_and_gradients_of_random_slices_are_those_of_the_step(model, cuts):
    check(*gradients(model), tuple(np.diff([0, *sorted(cuts), TOKENS]).tolist()))


@pytest.mark.sample(lengths=1)
@pytest.mark.parametrize("lengths", [(3, 9), (4, 4, 2, 2)])
def test_updated_parameters_of_uneven_slices_are_those_of_the_step(lengths):
    check(*update(Model()), lengths)


def test_chunks_of_tokens_run_in_slices_of_whole_chunks():
    step, args = gradients(Model("chunks"))
    check(step, args, (3, 9))
    traced = program(step, args)
    with pytest.raises(SlicingError, match="use token_slices that are multiples of 3"):
        cut(traced, (5, 7))


REFUSED = [
    (Model("bidirectional"), "reads tokens after its own"),
    (Model("anti-causal"), "reads tokens after its own"),
    (Model("padding -1e30"), "masks with a finite constant"),
    (Model("documents of others"), "masks with a finite constant"),
    (Model("learned bias of earlier tokens"), "masks with a finite constant"),
    # a second mask may leave a token without a live key
    (Model("padding, then causal -1e30"), "masks with a finite constant"),
    (Model("causal -1e30, then padding"), "masks with a finite constant"),
    (Model("padding times 1e30"), "masks with a finite constant"),
    # what stands for infinity is a number, and small integers wrap around
    (Model("scaled away"), "reads tokens after its own"),
    (Model("logarithm"), "reads tokens after its own"),
    (Model("bytes"), "reads tokens after its own"),
    (Model("gate ahead"), "multiplies the tokens by a matrix that was not proved"),
    (Model("gate softmax"), "multiplies the tokens by a matrix that was not proved"),
    (Model("gate turned"), "gives later tokens a part in earlier ones"),
    (Model("gate ahead", scan=True), "multiplies the tokens by a matrix that was not proved"),
    (Model("convolution ahead"), "a window that reaches later tokens"),
    (Model("normalised over tokens"), "all tokens.*: reduce_sum at .*reduces the tokens"),
]


@pytest.mark.parametrize(("model", "reason"), REFUSED, ids=str)
def test_steps_that_are_not_causal_are_refused_with_the_line(model, reason):
    step, args = gradients(model)
    traced = program(step, args)
    with pytest.raises(SlicingError, match=reason) as refused:
        cut(traced, (5, 7))
    assert "causal_models.py" in str(refused.value)


def test_a_kernel_without_a_rule_is_refused_with_the_line():
    def kernel(queries, keys, found):
        later = jnp.arange(4)[:, None] < jnp.arange(4)
        found[...] = jnp.where(later, 0.0, queries[...] @ keys[...].T) @ keys[...]

    def step(weights, given):
        x = given @ weights
        shape = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        attend = jax.vmap(pl.pallas_call(kernel, out_shape=shape, interpret=True))
        return jax.value_and_grad(lambda w: jnp.sum(attend(x, x) @ w))(weights)

    traced = program(step, (jnp.ones((3, 3)), jnp.ones((2, 4, 3))))
    with pytest.raises(SlicingError, match=r"pallas_call at .*test_program.*has no sharding rule"):
        cut(traced, (1, 3))


def test_a_scan_over_layers_stays_a_scan_for_each_slice():
    sliced = check(*gradients(Model(scan=True, remat=True, num_layers=2)), (5, 7))
    names = [eqn.primitive.name for eqn in open_jaxpr(sliced.closed).eqns]
    assert names.count("scan") == 4  # forward and backward, of two slices


def test_recomputations_stay_recomputations():
    sliced = check(*gradients(Model(remat=True, num_layers=2)), (5, 7))
    recomputed = [eqn for eqn in open_jaxpr(sliced.closed).eqns if is_remat(eqn)]
    assert len(recomputed) == 2 * 2  # of two layers, by two slices


def test_masks_are_made_by_slice():
    sliced = check(*gradients(Model()), (5, 7))
    shapes = {shape_of(var) for eqn in open_jaxpr(sliced.closed).eqns for var in eqn.outvars}
    assert (5, 5) in shapes and (7, 12) in shapes
    assert not any(shape.count(TOKENS) > 1 for shape in shapes)


def test_a_slice_reads_only_what_slices_before_it_made():
    sliced = check(*gradients(Model()), (5, 1, 6))
    made: dict[Any, tuple[str, int | None]] = {}
    for eqn, phase in zip(open_jaxpr(sliced.closed).eqns, sliced.phases, strict=True):
        for atom in eqn.invars:
            if not hasattr(atom, "val") and atom in made and made[atom][0] == phase:
                earlier, own = made[atom][1], sliced.slice_of.get(eqn.outvars[0])
                if own is not None and earlier is not None:
                    assert earlier <= own if phase == "forward" else earlier >= own
        for var in eqn.outvars:
            made[var] = phase, sliced.slice_of.get(var)


def test_slices_of_a_number_are_as_even_as_can_be():
    assert SliceRequest(count=5).candidates([12])[0].lengths == (3, 3, 2, 2, 2)


def test_slices_that_are_no_sequence_are_refused():
    step, args = gradients(Model())
    traced = program(step, args)
    batch_leaves = [leaf.role == "batch" for leaf in traced.inputs]
    with pytest.raises(SlicingError, match=r"have \[12\] along dim 1"):
        in_wanted_slices(traced.closed, traced.phases.of_eqn, batch_leaves, SliceRequest((5, 5)))


def test_windows_longer_than_a_slice_reach_over_several():
    check(*gradients(Model("convolution")), (1, 1, 1, 8, 1))


def test_heads_may_share_a_tiled_key():
    mixed = attention(lambda scores, _: jax.nn.softmax(jnp.where(CAUSAL, scores, -jnp.inf)))
    check(*step_of(lambda weights, x: mixed(weights, jnp.tile(x[..., :1], (1, 1, 4)))), (5, 7))


def test_a_step_that_works_mostly_on_all_tokens_is_refused_with_the_line():
    def loss(weights, given):
        pooled = jnp.tanh(given @ weights["in"]).sum(1)
        for _ in range(4):
            pooled = jnp.tanh(pooled @ weights["square"])
        return (pooled**2).mean()

    def step(weights, given):
        return jax.value_and_grad(loss)(weights, given)

    weights = {"in": jnp.ones((4, 64)), "square": jnp.ones((64, 64))}
    traced = program(step, (weights, jnp.ones((2, 6, 4))))
    with pytest.raises(SlicingError, match=r"on all tokens at once: dot_general at .*test_program"):
        cut(traced, (3, 3))


def test_a_step_whose_batch_has_no_tokens_is_refused():
    def step(weights, given):
        return jax.value_and_grad(lambda w: jnp.mean((given @ w) ** 2))(weights)

    traced = program(step, (jnp.ones((6, 2)), jnp.ones((4, 6))))
    with pytest.raises(SlicingError, match="none of its operators"):
        cut(traced, (3, 3))


@pytest.mark.parametrize("lengths", [(5, 1, 6), (1, 11), (11, 1)])
def test_a_slice_of_one_token_has_no_part_of_every_other_one(lengths):
    """An associative scan takes apart the odd tokens of its decays, which are known before."""

    def mixed(weights, x):
        decay = jax.nn.sigmoid(weights["w"]) * jnp.linspace(0.1, 1.0, TOKENS)[:, None]
        elements = jnp.broadcast_to(decay, x.shape), x
        return jax.lax.associative_scan(
            lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), elements, axis=1
        )[1]

    check(*step_of(mixed), lengths)

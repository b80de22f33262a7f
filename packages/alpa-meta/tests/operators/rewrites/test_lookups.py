import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from alpa_meta.operators import sharding_rule
from alpa_meta.step.trace import inline

B, T, V = 4, 6, 10
RANDOM = np.random.default_rng(0)
LOGP = jnp.asarray(RANDOM.normal(size=(B, V)), jnp.float32)
LABELS = jnp.asarray(RANDOM.integers(0, V, B), jnp.int32)
CUBE = jnp.asarray(RANDOM.normal(size=(B, T, V)), jnp.float32)
NEXT = jnp.asarray(RANDOM.integers(0, V, (B, T)), jnp.int32)
ROWS, COLUMNS = np.arange(B), jnp.arange(T)

MODES = ("fill", "clip", "promise_in_bounds")
DIFFERENTIABLE = ("get", "set", "add")
VERBS = (*DIFFERENTIABLE, "multiply", "min", "max")


def lookups(closed):
    """Return the gathers and scatters of a program and of the bodies in it."""
    found = []
    for eqn in closed.jaxpr.eqns:
        name = eqn.primitive.name
        found += [eqn] if name == "gather" or name.startswith("scatter") else []
        for body in jax.tree.leaves(eqn.params.get("branches", eqn.params.get("jaxpr", ()))):
            inner = body if hasattr(body, "consts") else jax.extend.core.ClosedJaxpr(body, ())
            found += lookups(inner)
    return found


def batching(eqn):
    numbers = eqn.params["dimension_numbers"]
    indices = getattr(numbers, "start_indices_batching_dims", None)
    if indices is None:
        indices = numbers.scatter_indices_batching_dims
    return dict(zip(numbers.operand_batching_dims, indices, strict=True))


def same_to_the_bit(function, *args):
    """Return the inlined program of `function`, whose results must be those of `function`."""
    closed = inline(jax.make_jaxpr(function)(*args))
    found = jax.jit(jax.extend.core.jaxpr_as_fun(closed))(*jax.tree.leaves(args))
    for one, other in zip(found, jax.tree.leaves(jax.jit(function)(*args)), strict=True):
        np.testing.assert_array_equal(one, other)
    return closed


@st.composite
def programs(draw, verbs):
    """Return (lookup, its operand, labels and updates, index dims whose places are to be batched).

    Each dim of the operand is indexed by the place along one dim of the indices, or by labels, some
    of them out of bounds, or not at all.
    """
    sizes = draw(st.lists(st.integers(2, 4), min_size=1, max_size=3))
    kinds = draw(st.permutations([*range(len(sizes)), "labels", "whole"]))
    kinds = kinds[: draw(st.integers(2, len(kinds)))]
    shape = [sizes[kind] if isinstance(kind, int) else draw(st.integers(2, 5)) for kind in kinds]
    dtype = draw(st.sampled_from(["int32", "uint8", "int8", "uint32"]))
    low = 0 if dtype.startswith("u") else -8
    labels = jnp.asarray(RANDOM.integers(low, 8, sizes), dtype)
    verb, mode = draw(st.sampled_from(verbs)), draw(st.sampled_from(MODES))
    spread = draw(st.booleans())

    def place(dim):
        column = jnp.arange(sizes[dim], dtype=dtype).reshape(
            [-1 if d == dim else 1 for d in range(len(sizes))]
        )
        return jnp.broadcast_to(column, sizes) if spread else column

    def index(labels):
        known = {"whole": slice(None), "labels": labels}
        return tuple(known[kind] if kind in known else place(kind) for kind in kinds)

    def function(operand, labels, updates):
        at = operand.at[index(labels)]
        if verb == "get":
            return at.get(mode=mode) * updates
        return getattr(at, verb)(updates, mode=mode)

    operand = jnp.asarray(RANDOM.normal(size=shape), jnp.float32)
    read = jax.eval_shape(lambda operand, labels: operand[index(labels)], operand, labels)
    updates = jnp.asarray(RANDOM.normal(size=read.shape), jnp.float32)
    places = sorted(kind for kind in kinds if isinstance(kind, int))
    return function, (operand, labels, updates), places, "labels" in kinds


@settings(deadline=None)  # as many as are asked for, since each compiles
@given(programs(VERBS))
def test_lookups_stay_the_same_to_the_bit_and_batch_every_dim_of_places(program):
    function, args, places, labelled = program
    for eqn in lookups(same_to_the_bit(function, *args)):
        found = sorted(batching(eqn).values())
        assert found == places if labelled else len(found) == max(len(places) - 1, 0)


@settings(deadline=None)  # as many as are asked for, since each compiles
@given(programs(DIFFERENTIABLE))
def test_gradients_of_lookups_stay_the_same_to_the_bit(program):
    function, (operand, labels, updates), *_ = program

    def loss(operand, updates, labels):
        return (function(operand, labels, updates) ** 2).sum()

    same_to_the_bit(jax.grad(loss, argnums=(0, 1)), operand, updates, labels)


LOSSES = {
    "rows": (lambda x, y: x[jnp.arange(B), y], (LOGP, LABELS)),
    "rows of numpy": (lambda x, y: x[np.arange(B), y], (LOGP, LABELS)),
    "rows of a closed over array": (lambda x, y: x[ROWS, y], (LOGP, LABELS)),
    "rows and columns": (
        lambda x, y: x[jnp.arange(B)[:, None], jnp.arange(T)[None, :], y],
        (CUBE, NEXT),
    ),
    "rows and whole columns": (lambda x, y: x[jnp.arange(B), :, y], (CUBE, LABELS)),
    "last of a row": (lambda x, y: x[jnp.arange(B), y % T], (CUBE, LABELS)),
    "labels first": (lambda x, y: x.T[y, jnp.arange(B)], (LOGP, LABELS)),
    "mapped": (jax.vmap(lambda x, y: x[jnp.arange(T), y]), (CUBE, NEXT)),
    "by columns": (lambda x, y: x[jnp.arange(B)[:, None], y[:, :3]], (LOGP, NEXT)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_rows_of_a_loss_and_of_its_gradient_may_be_sharded_freely(name):
    function, args = LOSSES[name]
    for closed in (
        same_to_the_bit(function, *args),
        same_to_the_bit(jax.grad(lambda x, *y: (function(x, *y) ** 2).sum()), *args),
    ):
        found = lookups(closed)
        assert found
        for eqn in found:
            rule = sharding_rule(eqn)
            assert batching(eqn) and rule is not None
            for dim, place in batching(eqn).items():
                (factor,) = rule.operands[0][dim]
                assert rule.factor(factor).kind == "parallel"
                assert rule.operands[1][place] == (factor,)


def test_the_rule_has_one_factor_for_the_rows_of_all_operands():
    (read,) = lookups(inline(jax.make_jaxpr(LOSSES["rows"][0])(LOGP, LABELS)))
    assert str(sharding_rule(read)) == "a b, a 1 -> a"
    (write,) = lookups(inline(jax.make_jaxpr(lambda x, y: x.at[ROWS, y].set(1.0))(LOGP, LABELS)))
    assert str(sharding_rule(write)) == "a b, a 1, a -> a b"


def test_the_computation_of_the_places_is_gone():
    closed = inline(jax.make_jaxpr(LOSSES["rows and columns"][0])(CUBE, NEXT))
    names = [eqn.primitive.name for eqn in closed.jaxpr.eqns]
    assert names == ["lt", "add", "select_n", "broadcast_in_dim", "gather"]


UNPROVEN = {
    "no place": lambda x, y: x[y, y],
    "shifted": lambda x, y: x[jnp.arange(1, B + 1), y],
    "fewer rows": lambda x, y: x[jnp.arange(B - 1), y[:-1]],
    "one row for all": lambda x, y: x[jnp.arange(1), y],
    "in reverse": lambda x, y: x[jnp.arange(B)[::-1], y],
    "permuted": lambda x, y: x[np.array([0, 2, 1, 3]), y],
    "alone": lambda x, y: x[jnp.arange(B)],
    "stacked": lambda x, y: x[tuple(jnp.stack([jnp.arange(B), y]))],
    "transposed by a reshape": lambda x, y: x[
        lax.reshape(lax.broadcasted_iota("int32", (B, B), 0), (B, B), (1, 0)), y
    ],
}


@pytest.mark.parametrize("name", UNPROVEN)
def test_other_lookups_are_left_alone(name):
    closed = same_to_the_bit(UNPROVEN[name], LOGP, LABELS)
    assert not any(map(batching, lookups(closed)))


def test_a_diagonal_is_batched_once():
    closed = same_to_the_bit(lambda x: x[jnp.arange(B), jnp.arange(B)], LOGP[:, :B])
    assert [batching(eqn) for eqn in lookups(closed)] == [{0: 0}]


def test_one_row_is_batched_like_several():
    closed = same_to_the_bit(lambda x, y: x[jnp.arange(1), y], LOGP[:1], LABELS[:1])
    assert [batching(eqn) for eqn in lookups(closed)] == [{0: 0}]


def test_places_that_go_round_their_type_are_left_alone():
    x = jnp.asarray(RANDOM.normal(size=(300, 3)), jnp.float32)
    y = jnp.asarray(RANDOM.integers(0, 3, 300), jnp.uint8)
    for dtype, found in (("uint8", {}), ("int16", {0: 0})):
        closed = same_to_the_bit(lambda x, y, t=dtype: x[lax.iota(t, 300), y], x, y)
        assert [batching(eqn) for eqn in lookups(closed)] == [found]


def test_lookups_inside_bodies_are_batched():
    def looked_up(x, y):
        return x[jnp.arange(B), y].sum()

    def function(x, y):
        _, sums = lax.scan(lambda c, _: (c * 2, looked_up(c, y)), x, None, length=3)
        either = lax.cond(y[0] > 3, looked_up, lambda x, y: x.sum(), x, y)
        return sums, either, jax.checkpoint(looked_up)(x, y)

    closed = same_to_the_bit(function, LOGP, LABELS)
    assert [batching(eqn) for eqn in lookups(closed)] == [{0: 0}] * 3
    gradient = same_to_the_bit(jax.grad(jax.checkpoint(looked_up)), LOGP, LABELS)
    assert [batching(eqn) for eqn in lookups(gradient)] == [{0: 0}]


def test_inlining_again_changes_nothing():
    closed = inline(jax.make_jaxpr(LOSSES["rows and columns"][0])(CUBE, NEXT))
    assert str(inline(closed)) == str(closed)

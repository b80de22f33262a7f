"""Values that several operators read in shardings of their own choice are read once for all."""

import jax
import jax.numpy as jnp
import numpy as np
import perceptron
import pytest
from jax import lax

from alpa_meta.compat import Literal, open_jaxpr, subjaxprs
from alpa_meta.microbatch.placement import split
from alpa_meta.passes.flat_program import FlatProgram
from alpa_meta.passes.shared_reads import is_shared_read, with_shared_reads
from alpa_meta.step.program import Step
from alpa_meta.step.trace import inline

X = jnp.linspace(-1.0, 1.0, 16).reshape(4, 4)
W = jnp.linspace(0.5, 1.5, 16).reshape(4, 4)


def shared(function, *args, phase=lambda k: "forward"):
    """Return the program of `function` with shared reads, which must compute the same."""
    closed = inline(jax.make_jaxpr(function)(*args))
    phases = tuple(phase(k) for k in range(len(closed.jaxpr.eqns)))
    program = with_shared_reads(FlatProgram(closed, phases))
    found = program.closed
    assert len(program.phases) == len(found.jaxpr.eqns)
    results = jax.jit(jax.extend.core.jaxpr_as_fun(found))(*jax.tree.leaves(args))
    for one, other in zip(results, jax.tree.leaves(jax.jit(function)(*args)), strict=True):
        np.testing.assert_array_equal(one, other)
    return open_jaxpr(found)


def readers(jaxpr):
    """Return how many equations read the result of each shared read, bodies included."""
    found = []
    for eqn in jaxpr.eqns:
        if is_shared_read(eqn):
            (result,) = eqn.outvars
            atoms = [a for other in jaxpr.eqns for a in other.invars if not isinstance(a, Literal)]
            found.append(atoms.count(result))
        for _, body in subjaxprs(eqn):
            found += readers(open_jaxpr(body))
    return found


def test_products_of_one_value_share_a_read():
    jaxpr = shared(lambda x, w: (x @ w, x @ (2 * w), x + 1), X, W)
    assert readers(jaxpr) == [2]
    assert [eqn.primitive.name for eqn in jaxpr.eqns][0] == "alpa_read"
    (add,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "add"]
    assert add.invars[0] is jaxpr.invars[0]  # who follows reads the value itself


def test_one_reader_and_readers_that_follow_share_none():
    assert readers(shared(lambda x, w: (x @ w, jnp.tanh(x), x * 2, x + w), X, W)) == []


def test_each_pass_reads_for_itself():
    both = shared(lambda x, w: (x @ w, w @ x), X, W, phase=("forward", "backward").__getitem__)
    assert readers(both) == []


def test_each_token_slice_reads_for_itself():
    closed = inline(jax.make_jaxpr(lambda x, w: (x @ w, w @ x, x @ x))(X, W))
    first, *_ = (eqn.outvars[0] for eqn in closed.jaxpr.eqns)
    phases = ("forward",) * len(closed.jaxpr.eqns)
    apart = FlatProgram(closed, phases, slice_of={first: 0})
    together = with_shared_reads(FlatProgram(closed, phases)).closed.jaxpr
    assert readers(together) == [4, 2]
    assert readers(with_shared_reads(apart).closed.jaxpr) == [3]


def test_an_operator_that_reads_a_value_twice_shares_it():
    assert readers(shared(lambda x: x @ x, X)) == [2]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: lax.scan(lambda c, _: (c @ w + c @ x, None), x, None, length=3)[0],
        lambda x, w: lax.while_loop(lambda c: jnp.sum(c) < 0, lambda c: c @ w + w @ c, x),
        lambda x, w: lax.cond(jnp.sum(x) < 0, lambda: x @ w + w @ x, lambda: x),
        lambda x, w: jax.checkpoint(lambda x: x @ w + w @ x)(x),
    ],
    ids=["scan", "while", "cond", "remat"],
)
def test_bodies_have_shared_reads_of_their_own(function):
    assert 2 in readers(shared(function, X, W))


def test_keys_are_read_as_they_are():
    key = jax.random.key(0)
    jaxpr = shared(lambda k: (jax.random.normal(k, (4,)), jax.random.uniform(k, (4,))), key)
    assert readers(jaxpr) == []


def test_the_gradient_of_a_product_is_read_for_both_operands():
    weights = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 3
    step = Step(perceptron.step, (weights, jax.ShapeDtypeStruct((8, 16), jnp.float32)))
    program = step.program(1)
    reads = [eqn for eqn in program.jaxpr.eqns if is_shared_read(eqn)]
    assert readers(program.jaxpr) == [2, 2]  # the first layer needs no gradient of its input
    for eqn in reads:
        assert program.phases.of_eqn[program.jaxpr.eqns.index(eqn)] == "backward"
        assert program.placements[eqn.outvars[0]] == split(0)

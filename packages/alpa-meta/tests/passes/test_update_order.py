"""The update, one array of the result after another."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_meta.compat import is_drop, open_jaxpr
from alpa_meta.passes.flat_program import FlatProgram
from alpa_meta.passes.update_order import update_by_array
from alpa_meta.step.trace import inline

OPTIMISER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def _update(params, moments, gradients):
    updates, moments = OPTIMISER.update(gradients, moments, params)
    return optax.apply_updates(params, updates), moments


def _alive(jaxpr, phases):
    """The most arrays that the update has made and that something still reads."""
    last = {}
    for at, eqn in enumerate(jaxpr.eqns):
        last.update({atom: at for atom in eqn.invars if not hasattr(atom, "val")})
    alive, most = set(), 0
    for at, eqn in enumerate(jaxpr.eqns):
        if phases[at] == "update":
            alive |= {var for var in eqn.outvars if last.get(var, -1) > at and var.aval.shape}
        most = max(most, len(alive))
        alive = {var for var in alive if last[var] > at}
    return most


def test_arrays_of_one_parameter_live_at_a_time():
    params = [jnp.ones((3, 3)) * k for k in range(6)]
    arguments = params, OPTIMISER.init(params), [p + 1.0 for p in params]
    program = inline(jax.make_jaxpr(_update)(*arguments))
    phases = ("update",) * len(program.jaxpr.eqns)
    made = update_by_array(FlatProgram(program, phases))
    assert _alive(program.jaxpr, phases) >= 12
    assert _alive(open_jaxpr(made.closed), made.phases) <= 6 + 4  # six clipped gradients
    flat = jax.tree.leaves(arguments)
    for mine, other in zip(
        jax.core.eval_jaxpr(made.closed.jaxpr, made.closed.consts, *flat),
        jax.core.eval_jaxpr(program.jaxpr, program.consts, *flat),
        strict=True,
    ):
        np.testing.assert_array_equal(mine, other)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=2, max_size=12),
    st.integers(0, 12),
)
def test_any_program_keeps_its_meaning(reads, start):  # fmt: skip
    def function(x):
        values = [x, x + 1.0]
        for first, second in reads:
            values.append(values[first % len(values)] * values[second % len(values)])
        return values[2:]

    program = jax.make_jaxpr(function)(2.0)
    count = len(program.jaxpr.eqns)
    phases = tuple("update" if at >= start else "forward" for at in range(count))
    made = update_by_array(FlatProgram(program, phases))
    seen = set(made.closed.jaxpr.invars)
    for eqn in made.closed.jaxpr.eqns:
        assert all(hasattr(atom, "val") or atom in seen for atom in eqn.invars)
        seen.update(var for var in eqn.outvars if not is_drop(var))
    assert sorted(map(id, made.closed.jaxpr.eqns)) == sorted(map(id, program.jaxpr.eqns))


def test_an_update_that_something_else_reads_is_left_alone():
    program = jax.make_jaxpr(lambda x: ((x + 1.0) * 2.0) - 3.0)(1.0)
    flat = FlatProgram(program, ("forward", "update", "forward"))
    assert update_by_array(flat) is flat

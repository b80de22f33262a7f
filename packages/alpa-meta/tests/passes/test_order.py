import jax
import jax.numpy as jnp

from alpa_meta.passes.flat_program import FlatProgram
from alpa_meta.passes.order import MOMENTS, PASSES, rewritten
from alpa_meta.step.trace import trace


def test_every_pass_says_why_it_stands_where_it_does():
    assert all(one.reason for one in PASSES)
    assert [one.moment for one in PASSES] == sorted(
        (one.moment for one in PASSES), key=MOMENTS.index
    )
    assert {one.moment for one in PASSES} == set(MOMENTS)


def test_a_rewritten_program_is_rewritten_into_itself():
    def function(x, labels):
        shifted = jnp.pad(x[:, :-1], ((0, 0), (1, 0)))
        return jax.nn.log_softmax(shifted)[jnp.arange(8), labels].sum()

    program, _ = trace(function, jnp.ones((8, 4)), jnp.zeros(8, int))
    again = rewritten(FlatProgram(program), "inlined").closed
    assert str(again) == str(program)

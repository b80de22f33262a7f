import jax
import jax.numpy as jnp
from jax import lax

from alpa_meta.operators import flops, traffic_bytes
from alpa_meta.step.trace import inline


def eqns(function, *args):
    return inline(jax.make_jaxpr(function)(*args)).jaxpr.eqns


def test_a_product_counts_a_multiply_add_as_two():
    (dot,) = eqns(jnp.dot, jnp.ones((4, 8)), jnp.ones((8, 2)))
    assert flops(dot) == 2 * 4 * 8 * 2
    assert traffic_bytes(dot) == 4 * (4 * 8 + 8 * 2 + 4 * 2)


def test_a_convolution_counts_its_window_and_input_channels():
    def function(x, w):
        return lax.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"), feature_group_count=2
        )

    (convolution,) = eqns(function, jnp.ones((2, 8, 4)), jnp.ones((3, 2, 6)))
    assert flops(convolution) == 2 * (2 * 8 * 6) * (3 * 2)


def test_elementwise_traffic_is_the_result_and_layout_is_free():
    multiply, reshape = eqns(lambda x: (x * x).reshape(32), jnp.ones((4, 8)))
    assert (flops(multiply), traffic_bytes(multiply)) == (32, 128)
    assert (flops(reshape), traffic_bytes(reshape)) == (0, 0)


def test_a_loop_counts_its_body_once_and_a_branch_the_largest():
    x = jnp.ones((4, 4))
    (loop,) = eqns(lambda x: lax.scan(lambda c, _: (c @ c, None), x, length=10)[0], x)
    assert flops(loop) == 2 * 4 * 4 * 4
    found = eqns(lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x), x)
    (branch,) = [eqn for eqn in found if eqn.primitive.name == "cond"]
    assert flops(branch) == 2 * 4 * 4 * 4


def test_a_grouped_product_counts_each_row_once():
    found = eqns(
        lambda x, w: lax.ragged_dot(x, w, jnp.array([1, 3])), jnp.ones((4, 8)), jnp.ones((2, 8, 3))
    )
    (dot,) = [eqn for eqn in found if eqn.primitive.name == "ragged_dot_general"]
    assert flops(dot) == 2 * 4 * 8 * 3


def test_a_fourier_transform_counts_five_operations_for_each_halving():
    (transform,) = eqns(lambda x: lax.fft(x, lax.FftType.RFFT, (16,)), jnp.ones((2, 16)))
    assert flops(transform) == 5 * (2 * 16) * 4

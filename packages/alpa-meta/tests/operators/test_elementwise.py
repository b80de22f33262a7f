import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from alpa_meta.operators import operator_of, sharding_rule
from alpa_meta.step.trace import inline

X = jax.random.normal(jax.random.key(0), (8, 4))
Y = jax.random.normal(jax.random.key(1), (8, 4))


def first(function, *args):
    return inline(jax.make_jaxpr(function)(*args)).jaxpr.eqns[0]


def every_kind_of_operand(x, y):
    narrow = lax.mul(x, y[:, :1]) if jax.__version_info__ >= (0, 10) else x * y[:, :1]
    chosen = lax.select_n(x[0, 0] > 0, narrow, lax.clamp(-0.5, y, 0.5))
    held = lax.optimization_barrier((chosen, x[0]))
    bits = lax.bitcast_convert_type(held[0], jnp.uint16)
    return (
        jnp.exp2(held[0]) + held[1],
        bits,
        lax.complex(x, y).conj().real,
        lax.reduce_precision(x, 8, 3),
    )


def test_elements_are_computed_where_they_are(check):
    check(every_kind_of_operand, (X, Y), mesh_shape=(2, 4), count=3)


def test_a_dim_of_size_one_stretches_and_stays_whole():
    eqn = first(lax.add, jnp.ones((4, 1)), jnp.ones((4, 3)))
    if eqn.primitive.name == "add":
        assert str(sharding_rule(eqn)) == "a 1, a b -> a b"


@pytest.mark.parametrize(
    ("function", "known"),
    [(lambda x: jnp.logaddexp(x, x), True), (lambda x: jnp.sort(x), True)],
)
def test_primitives_of_public_functions_have_rules(function, known):
    eqns = inline(jax.make_jaxpr(function)(X)).jaxpr.eqns
    assert all((sharding_rule(eqn) is not None) == known for eqn in eqns)


def test_an_unknown_primitive_is_elementwise_if_its_lowering_is():
    from jax.extend.core import Primitive
    from jax.interpreters import mlir

    def made(name, function):
        primitive = Primitive(name)
        primitive.def_abstract_eval(lambda aval: aval)
        mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=False))
        return first(lambda x: primitive.bind(x), X)

    assert sharding_rule(made("test_softsign", lambda x: x / (1 + jnp.abs(x)))) is not None
    assert sharding_rule(made("test_rotate", lambda x: jnp.roll(x, 1, 0))) is None
    assert sharding_rule(made("test_center", lambda x: x - x.mean())) is None
    assert sharding_rule(made("test_index", lambda x: x * jnp.arange(4.0))) is None


@pytest.mark.parametrize(
    ("source", "target", "sums", "order"),
    [
        ("float32", "bfloat16", True, True),
        ("int32", "float32", True, True),
        ("float32", "int32", False, True),
        ("float32", "uint32", False, False),
        ("int32", "bool", False, False),
        ("bool", "int32", True, True),
        ("uint8", "uint32", True, True),
    ],
)
def test_conversions_keep_sums_and_order_or_not(source, target, sums, order):
    convert = functools.partial(lax.convert_element_type, new_dtype=target)
    eqn = first(convert, jax.ShapeDtypeStruct((), source))
    assert (operator_of(eqn).sums_survive(eqn), operator_of(eqn).order_survives(eqn)) == (
        sums,
        order,
    )


def test_quotients_of_integers_do_not_add_up():
    whole = first(lambda x: lax.div(x, 2), jax.ShapeDtypeStruct((), "int32"))
    real = first(lambda x: lax.div(x, 2.0), jax.ShapeDtypeStruct((), "float32"))
    assert not operator_of(whole).sums_survive(whole)
    assert operator_of(real).sums_survive(real)

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from alpa_interchange import ShardingRule
from alpa_meta.operators import Factors, linear_operands, register, sharding_rule
from alpa_meta.step.trace import inline

X = jnp.ones((4, 8))


def eqns(function, *args):
    return inline(jax.make_jaxpr(function)(*args)).jaxpr.eqns


def made(name):
    """Return an equation of a new primitive that normalises each row."""
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda aval: aval)
    function = lambda x: x / x.sum(1, keepdims=True)  # noqa: E731
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=False))
    primitive.def_impl(function)
    return primitive


def test_a_user_rule_makes_an_opaque_operator_shardable(check):
    primitive = made("test_normalise_rows")
    (eqn,) = eqns(primitive.bind, X)
    assert sharding_rule(eqn) is None
    register(
        "test_normalise_rows",
        lambda eqn: ShardingRule.parse("r h -> r h", {"r": 4, "h": 8}, replicated=("h",)),
    )
    assert str(sharding_rule(eqn)) == "r h -> r h"
    values = jax.random.uniform(jax.random.key(0), (4, 8))
    assert check(primitive.bind, (values,))["test_normalise_rows"]


def test_a_rule_of_the_wrong_rank_is_refused_with_its_ranks():
    primitive = made("test_wrong_rank")
    register("test_wrong_rank", lambda eqn: Factors().rule([[()]], [[(), ()]]))
    with pytest.raises(ValueError, match="ranks are .2, 2., the rule .* has .1, 2."):
        sharding_rule(*eqns(primitive.bind, X))


@pytest.mark.parametrize(
    ("function", "linear"),
    [
        (lambda x: lax.add(x, x), True),
        (lambda x: lax.sub(x, x), True),
        (lambda x: x + 1.0, False),
        (lambda x: x * 2.0, True),
        (lambda x: x * x, False),
        (lambda x: x / 2.0, True),
        (lambda x: 2.0 / x, False),
        (lambda x: -x, True),
        (lambda x: x.T, True),
        (lambda x: x.reshape(32), True),
        (lambda x: x.sum(0), True),
        (lambda x: x.max(0), False),
        (lambda x: lax.convert_element_type(x, jnp.bfloat16), False),
        (
            lambda x: lax.convert_element_type(
                lax.convert_element_type(x, jnp.float16), jnp.float32
            ),
            True,
        ),
        (lambda x: lax.pad(x, 0.0, ((1, 1, 0), (0, 0, 0))), True),
        (lambda x: lax.pad(x, 1.0, ((1, 1, 0), (0, 0, 0))), False),
        (lambda x: lax.broadcast_in_dim(1.0, (4,), ()), False),
        (lambda x: jnp.tanh(x), False),
    ],
)
def test_only_linear_operators_let_an_unreduced_sum_pass(function, linear):
    assert linear_operands(eqns(function, X)[-1]) is linear


@pytest.mark.parametrize(
    ("facts", "error", "says"),
    [
        ({"linear": True, "linear_in": (0,)}, ValueError, "give one of them"),
        ({"linear_in": (0, (0, 1))}, ValueError, "each once"),
        ({"linear_in": (-1,)}, ValueError, "by position from 0"),
        ({"flop": lambda eqn: 1.0}, TypeError, "no fact called 'flop'"),
        ({"kernel": "attention"}, ValueError, "kernel"),
    ],
)
def test_facts_that_cannot_be_are_refused(facts, error, says):
    with pytest.raises(error, match=says):
        register("test_refused", lambda eqn: None, **facts)


def test_sums_pass_through_what_is_linear_in_all_its_operands():
    primitive = made("test_linear_rows")
    rule = lambda eqn: ShardingRule.parse("r h -> r h", {"r": 4, "h": 8})  # noqa: E731
    (eqn,) = eqns(primitive.bind, X)
    for facts, linear in (({}, False), ({"linear": True}, True), ({"linear_in": (0,)}, True)):
        register("test_linear_rows", rule, **facts)
        assert linear_operands(eqn) is linear

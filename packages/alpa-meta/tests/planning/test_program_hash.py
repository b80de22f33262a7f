"""Hashes of traced programs."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_meta.planning.program_hash import program_hash, text_of
from alpa_meta.step.trace import trace

VECTOR = jax.ShapeDtypeStruct((8,), jnp.float32)


def hashed(function, *args, values=True):
    return program_hash(trace(function, *(args or (VECTOR,)))[0], values=values)


def scanned(length, factor):
    def step(x):
        return jax.lax.scan(lambda c, _: (factor * c, None), x, None, length=length)[0]

    return step


DIFFERENT = {
    "another operator": (jnp.sin, jnp.cos),
    "another parameter": (lambda x: x.sum(keepdims=True), lambda x: x[:1]),
    "other wiring": (lambda x: (x + 1) - x, lambda x: x - (x + 1)),
    "another trip count": (scanned(3, 2.0), scanned(4, 2.0)),
    "another scope": (lambda x: jnp.sin(x), jax.named_scope("inner")(lambda x: jnp.sin(x))),
    "another result": (lambda x: (jnp.sin(x), x)[0], lambda x: (jnp.sin(x), x)),
}
CONSTANTS = {
    "literals": (lambda x: 2.0 * x, lambda x: 3.0 * x),
    "literals in a body": (scanned(3, 2.0), scanned(3, 4.0)),
    "arrays": (lambda x: x + np.arange(8.0), lambda x: x + np.arange(8.0)[::-1]),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_different_programs_differ_with_and_without_values(case):
    for values in (False, True):
        one, two = (hashed(function, values=values) for function in DIFFERENT[case])
        assert one != two


@pytest.mark.parametrize("case", CONSTANTS)
def test_constants_count_by_type_or_by_value(case):
    one, two = (hashed(function, values=False) for function in CONSTANTS[case])
    assert one == two
    one, two = (hashed(function, values=True) for function in CONSTANTS[case])
    assert one != two


def test_functions_count_by_code_and_by_what_they_close_over():
    def scaled(factor):
        return lambda x: factor * x

    assert text_of(scaled(2)) == text_of(scaled(2))
    assert text_of(scaled(2)) != text_of(scaled(3))
    assert text_of(lambda x: x + 1) != text_of(lambda x: x * 1)


def test_a_function_inside_itself_ends():
    def first(n):
        return second(n) + first(n - 1) + second(n - 2)

    def second(n):
        return first(n) + second(n - 1) + first(n - 2)

    assert "first" in text_of(first)


def test_values_of_a_mapping_count_and_their_order_does_not():
    assert text_of({"a": 1, "b": (2.0, None)}) == text_of({"b": (2.0, None), "a": 1})
    assert text_of({"a": 1}) != text_of({"a": 2})


def test_types_count():
    narrow = jax.ShapeDtypeStruct((8,), jnp.bfloat16)
    assert hashed(jnp.sin, narrow) != hashed(jnp.sin, VECTOR)


def test_functions_among_the_parameters_count_by_name_not_by_address():
    def step(x):
        jax.debug.callback(print, x)
        return jnp.sin(x) + jax.random.normal(jax.random.key(0), (8,))

    assert hashed(step) == hashed(step)


PROGRAM = """
import jax, jax.numpy as jnp
from alpa_meta.planning.program_hash import program_hash
from alpa_meta.step.trace import trace

def step(x):
    jax.debug.callback(lambda x: None, x)
    y = jax.lax.scan(lambda c, _: (jnp.sin(c), c), x, None, length=3)[1]
    return jax.lax.cond(x[0] > 0, jnp.sum, jnp.max, y) + jax.random.uniform(jax.random.key(1))

x = jax.ShapeDtypeStruct((8,), jnp.float32)
print(program_hash(trace(jax.grad(lambda x: step(x).sum()), x)[0], values=True))
"""


def test_the_hash_is_equal_in_every_process():
    found = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    assert len(found) == 1

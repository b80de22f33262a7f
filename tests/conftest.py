"""How a parallel run is compared with the same run on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import PyTreeDef

import alpa_meta as alpa

FLOAT32_TOLERANCE = 2e-5
"""Largest allowed difference of an array, as a share of its largest element.

A parallel step adds the same float32 numbers in another order: each sum of n terms may differ by
about sqrt(n) roundings of 6e-8. A few steps of training carry that on; 2e-5 is some hundred
roundings. A plan that forgot a term, scaled a loss or used an old value is wrong by far more.
"""


def whole(tree: Any) -> Any:
    """Return the tree with every array on the host, keys as their words."""

    def fetch(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype"):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf)

    return jax.tree.map(fetch, tree)


def copied(tree: Any) -> Any:
    """Return a copy of the tree whose arrays a step may donate."""
    made: dict[int, Any] = {}

    def copy(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype"):
            return leaf
        return made.setdefault(id(leaf), jnp.copy(leaf))

    return jax.tree.map(copy, tree)


def assert_close(got: Any, expected: Any, tolerance: float = FLOAT32_TOLERANCE) -> None:
    """Require equal structure and types, and values equal up to `tolerance` of the largest."""
    structures: list[PyTreeDef] = [jax.tree.structure(got), jax.tree.structure(expected)]
    assert structures[0] == structures[1]
    leaves = jax.tree_util.tree_leaves_with_path(whole(expected))
    for (path, right), left in zip(leaves, jax.tree.leaves(whole(got)), strict=True):
        name = jax.tree_util.keystr(path)
        if not hasattr(right, "dtype"):
            assert left is right or left == right, name
            continue
        assert (left.shape, left.dtype) == (right.shape, right.dtype), name
        if not np.issubdtype(right.dtype, np.inexact):
            assert np.array_equal(left, right), f"{name}: {left} instead of {right}"
            continue
        scale = max(float(np.abs(right).max(initial=0.0)), 1e-30)
        error = (
            float(np.abs(left.astype(np.result_type(right, np.float64)) - right).max(initial=0.0))
            / scale
        )
        assert error <= tolerance, f"{name} differs by {error:.2e} of its largest element"


def run_steps(
    step: Callable[..., Any], state: Any, batches: Sequence[Any]
) -> tuple[Any, list[Any]]:
    """Return the state after `step(state, batch)` on all batches, and the metrics of each."""
    found = []
    for batch in batches:
        state, metrics = step(state, batch)
        found.append(whole(metrics))
    return state, found


def assert_agrees(
    step: Callable[..., Any],
    state: Any,
    batches: Sequence[Any],
    *,
    tolerance: float = FLOAT32_TOLERANCE,
    one_device: Callable[..., Any] | None = None,
    **options: Any,
) -> alpa.ParallelStep[..., Any]:
    """Require that the parallel run equals the single-device run; return the parallel step."""
    parallel = alpa.parallelize(step, **options)
    expected_state, expected = run_steps(one_device or jax.jit(step), state, batches)
    got_state, got = run_steps(parallel, copied(state), batches)
    assert_close(got, expected, tolerance)
    assert_close(got_state, expected_state, tolerance)
    return parallel


@pytest.fixture(scope="session")
def agrees() -> Callable[..., Any]:
    """Return `assert_agrees`."""
    return assert_agrees


@pytest.fixture(scope="session")
def close() -> Callable[..., Any]:
    """Return `assert_close`."""
    return assert_close

"""How far two runs of one training step are apart, in units in the last place.

One ulp of a leaf is its dtype's spacing at the leaf's largest magnitude in the reference, so a
difference in an element near zero is measured on the scale the leaf's rounding errors live on.
An optimiser that divides by the gradient's magnitude (Adam) turns rounding of a gradient near zero
into a full step: whatever the order of a sum, some elements differ by much. So a difference is
judged by the step itself: `sensitivity` is how far the single-device step moves when every input is
changed by a relative rounding error and narrow floats round otherwise, and a parallel step may
differ by a small multiple of that. One that differs by more is judged again with every float of the
step rounded otherwise, which takes a compilation of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from attrs import frozen
from jax.tree_util import PyTreeDef

from alpa_meta.audit.rounding import ALL, NARROW, rounded_otherwise
from alpa_meta.types import DType, Function, HostArray, PyTree

BASE_ULPS = 64.0
"""Ulps that are let pass whatever the sensitivity: the rounding of one long reduction."""

MULTIPLE = 16.0
"""How many times the step's own sensitivity a parallel run may differ; its square where a leaf
moves by more than its own size: that is nothing but rounding, as the gradient of a bias before a
normalisation, and a second moment squares how much it differs."""


@frozen(kw_only=True)
class LeafDifference:
    """One leaf of the result: `ulps` apart, where `allowed_ulps` are let pass."""

    path: str
    ulps: float
    allowed_ulps: float

    @property
    def ok(self) -> bool:
        """Whether the leaf is near enough."""
        return self.ulps <= self.allowed_ulps


@frozen(kw_only=True)
class NumericsCheck:
    """Differences of all leaves of a step's result from the single-device step's."""

    leaves: tuple[LeafDifference, ...]

    @property
    def ok(self) -> bool:
        """Whether every leaf is near enough."""
        return all(leaf.ok for leaf in self.leaves)

    @property
    def worst(self) -> LeafDifference:
        """The leaf that uses most of what it is allowed."""
        return max(self.leaves, key=lambda leaf: leaf.ulps / leaf.allowed_ulps)

    def text(self) -> str:
        """Return one line for people."""
        worst = self.worst
        verdict = "agrees with" if self.ok else "DIFFERS from"
        return (
            f"numerics: {verdict} one device in {sum(leaf.ok for leaf in self.leaves)} of "
            f"{len(self.leaves)} leaves; worst {worst.path} with {worst.ulps:.0f} of "
            f"{worst.allowed_ulps:.0f} ulps allowed"
        )


def difference_in_ulps(actual: PyTree, expected: PyTree) -> float:
    """Return the largest difference of two arrays in ulps of `expected`'s largest magnitude.

    Integers, booleans and keys must be equal (0 or infinity); so must NaNs and infinities.
    """
    actual, expected = _as_numpy(actual), _as_numpy(expected)
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        raise ValueError(
            f"leaves must have one shape and dtype, got {actual.shape} {actual.dtype} and "
            f"{expected.shape} {expected.dtype}; compare results of the same step"
        )
    if expected.size == 0:
        return 0.0
    if not jnp.issubdtype(expected.dtype, jnp.inexact):
        return 0.0 if np.array_equal(actual, expected) else float("inf")
    spacing = _epsilon(expected.dtype)
    kind = np.complex128 if jnp.issubdtype(expected.dtype, jnp.complexfloating) else np.float64
    wide, reference = actual.astype(kind), expected.astype(kind)
    finite = np.isfinite(reference)
    if not np.array_equal(wide[~finite], reference[~finite], equal_nan=True):
        return float("inf")
    if not np.isfinite(wide[finite]).all():
        return float("inf")
    if not finite.any():
        return 0.0
    scale = float(np.abs(reference[finite]).max())
    if scale == 0.0:
        return 0.0 if not wide[finite].any() else float("inf")
    largest = float(np.abs(wide[finite] - reference[finite]).max())
    return float(largest / (spacing * 2.0 ** np.floor(np.log2(scale))))


def tree_differences(actual: PyTree, expected: PyTree) -> dict[str, float]:
    """Return the ulps between two results, by the path of each leaf ("[0]['params']['w']")."""
    named = jax.tree_util.tree_flatten_with_path(expected)[0]
    others = jax.tree.leaves(actual)
    structure: PyTreeDef = jax.tree.structure(expected)
    other_structure: PyTreeDef = jax.tree.structure(actual)
    if structure != other_structure:
        raise ValueError(
            f"results must be trees of one structure, got {other_structure} and {structure}; "
            "compare results of the same step"
        )
    return {
        jax.tree_util.keystr(path): difference_in_ulps(other, leaf)
        for (path, leaf), other in zip(named, others, strict=True)
    }


def sensitivity(
    step: Function[PyTree],
    arguments: tuple[PyTree, ...],
    key: jax.Array,
    bits: int = NARROW,
    num_samples: int = 2,
) -> dict[str, float]:
    """Return the ulps each leaf of `step(*arguments)` moves when its inputs are rounded otherwise.

    Every floating element of the arguments is multiplied by 1 + e, e = -eps, 0 or eps at random,
    and so is every result on the way in fewer than `bits` bits (`rounding`); the largest movement
    of `num_samples` draws is taken.
    """
    reference = step(*arguments)
    moved: dict[str, float] = {}
    for seed, sample_key in enumerate(jax.random.split(key, num_samples)):
        changed = rounded_otherwise(step, arguments, seed, bits)(*_perturb(arguments, sample_key))
        for path, ulps in tree_differences(changed, reference).items():
            moved[path] = max(moved.get(path, 0.0), ulps)
    return moved


@frozen(kw_only=True, eq=False)
class Reference:
    """The single-device result of a step, and the ulps each of its leaves moves by rounding:
    of what is cheap to round otherwise, and of everything.

    It serves any number of plans of the same step and arguments.
    """

    expected: PyTree
    moved: Mapping[str, float]
    moved_by_all: Callable[[], Mapping[str, float]]

    def check(self, parallel: PyTree) -> NumericsCheck:
        """Return the check of the result of a parallel step."""
        differences = tree_differences(parallel, self.expected)
        found = self._check(differences, self.moved)
        if found.ok or not all(map(math.isfinite, differences.values())):
            return found
        other = self.moved_by_all()
        return self._check(differences, {p: max(u, other[p]) for p, u in self.moved.items()})

    def _check(self, differences: Mapping[str, float], moved: Mapping[str, float]) -> NumericsCheck:
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(self.expected)]
        return NumericsCheck(
            leaves=tuple(
                LeafDifference(path=path, ulps=ulps, allowed_ulps=_allowed(moved[path], dtype))
                for (path, ulps), dtype in zip(differences.items(), dtypes, strict=True)
            )
        )


def single_device_reference(
    step: Function[PyTree], arguments: tuple[PyTree, ...], key: jax.Array
) -> Reference:
    """Return the reference that `step(*arguments)`, run on one device, is for its parallel runs."""

    @functools.cache
    def moved_by_all() -> Mapping[str, float]:
        return sensitivity(step, arguments, key, ALL)

    return Reference(
        expected=jax.tree.map(_on_host, step(*arguments)),
        moved=sensitivity(step, arguments, key),
        moved_by_all=moved_by_all,
    )


def _on_host(leaf: PyTree) -> PyTree:
    if jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key):
        return leaf
    return jax.device_get(leaf)


def _allowed(moved: float, dtype: DType) -> float:
    if not np.isfinite(moved) or not jnp.issubdtype(dtype, jnp.inexact):
        return BASE_ULPS
    only_rounding = moved * _epsilon(dtype) > 1.0
    return BASE_ULPS + MULTIPLE * (MULTIPLE if only_rounding else 1.0) * moved


@jax.jit
def _perturb(tree: PyTree, key: jax.Array) -> PyTree:
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(key, max(len(leaves), 1))
    changed = []
    for leaf, leaf_key in zip(leaves, keys, strict=False):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            changed.append(leaf)
            continue
        real = jnp.real(leaf).dtype
        sign = jax.random.randint(leaf_key, leaf.shape, -1, 2).astype(real)
        changed.append(leaf * (1 + sign * jnp.asarray(_epsilon(leaf.dtype), real)))
    return jax.tree.unflatten(structure, changed)


def _epsilon(dtype: DType) -> float:
    info: Function[jnp.finfo] = jnp.finfo
    return float(info(dtype).eps)


def _as_numpy(leaf: PyTree) -> HostArray:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)

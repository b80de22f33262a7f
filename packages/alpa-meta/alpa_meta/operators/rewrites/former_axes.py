"""Collectives over the axis of a former `jax.pmap`, in a step that is now written for one device.

Such a step ran once per device; here it runs once, on the whole batch. The axis has one member, for
which a sum or mean over the axis is the value itself. In groups (`axis_index_groups`) there are as
many members as a group names, all with the same value, so that the mean over a group is the value,
too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Effect

from alpa_meta.compat import Atom, JaxprEqn, Literal
from alpa_meta.errors import PlanError
from alpa_meta.operators.rewrites.replacement import replacement
from alpa_meta.types import Params

_UNBOUND = re.compile(r"unbound axis name: ([^.\s]+)")


def unbound_axis(error: NameError) -> str | None:
    """Return the axis that jax names in its error; None for another error."""
    found = _UNBOUND.search(str(error))
    return None if found is None else found[1]


def former_axes(eqn: JaxprEqn) -> tuple[str, ...]:
    """Return the named axes that an equation communicates over."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    axes = axes if isinstance(axes, tuple) else (axes,)
    return tuple(axis for axis in axes if isinstance(axis, str))


def effects_without_axes(effects: Iterable[Effect]) -> set[Effect]:
    """Return effects without those that say which named axes are used."""
    return {effect for effect in effects if type(effect).__name__ != "NamedAxisEffect"}


def of_one_member(eqn: JaxprEqn) -> Iterator[tuple[Atom, list[JaxprEqn]]]:
    """Yield, for each result of a collective over former axes, the value it is (an operand, or a
    literal) and no equations, or the result itself and the equations that compute it."""
    name, params = eqn.primitive.name, eqn.params
    if name == "axis_index":
        yield Literal(np.int32(0), eqn.outvars[0].aval), []
        return
    kept = tuple(axis for axis in params.get("axes", ()) if not isinstance(axis, str))
    if kept:  # dims of a vmap reduced at the same time
        reduced = eqn.replace(params={**params, "axes": kept}, effects=set())
        for number, result in enumerate(eqn.outvars):
            yield result, [] if number else [reduced]
        return
    for operand, result in zip(eqn.invars, eqn.outvars, strict=True):
        function = _meaning(eqn)
        if function is None:
            yield operand, []
        else:
            yield result, replacement(function, [operand], [result], eqn)


def _meaning(eqn: JaxprEqn) -> Callable[[Array], Array] | None:
    """Return what a collective does to its operand, None if nothing."""
    name, params = eqn.primitive.name, eqn.params
    groups = params.get("axis_index_groups")
    members = 1 if groups is None else len(groups[0])
    if name not in _MEANINGS or members > 1 and name in ("reduce_scatter", "all_to_all"):
        raise PlanError(
            f"the step exchanges different values between devices of the former axis "
            f"{former_axes(eqn)[0]!r} of a pmap ({name}), which no longer exists; leave it out"
        )
    return _MEANINGS[name](params, members)


def _times_members(params: Params, members: int) -> Callable[[Array], Array] | None:
    if members == 1:
        return None
    return lambda x: lax.mul(x, lax.full_like(x, members))


def _gathered(params: Params, members: int) -> Callable[[Array], Array] | None:
    dim, tiled = params["all_gather_dimension"], params["tiled"]
    if tiled and members == 1:
        return None
    if tiled:
        return lambda x: lax.concatenate([x] * members, dim)
    return lambda x: lax.broadcast_in_dim(
        x,
        (*x.shape[:dim], members, *x.shape[dim:]),
        tuple(d + (d >= dim) for d in range(x.ndim)),
    )


def _scattered(params: Params, members: int) -> Callable[[Array], Array] | None:
    if params["tiled"]:
        return None
    return lambda x: lax.squeeze(x, (params["scatter_dimension"],))


def _permuted(params: Params, members: int) -> Callable[[Array], Array] | None:
    return None if any(target == 0 for _, target in params["perm"]) else jnp.zeros_like


def _same(params: Params, members: int) -> None:
    return None


_MEANINGS: Mapping[str, Callable[[Params, int], Callable[[Array], Array] | None]] = (
    MappingProxyType(
        {
            "psum": _times_members,
            "pmax": _same,
            "pmin": _same,
            "all_gather": _gathered,
            "reduce_scatter": _scattered,
            "all_to_all": _same,
            "ppermute": _permuted,
        }
    )
)

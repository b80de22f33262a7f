"""Shifts along a dim, which programs write as a cut and a join: one operator on the whole dim.

`pad(x[:, :-1], ...)` moves every element to the next place of a dim, `concatenate([x[:, -1:],
x[:, :-1]], 1)` (`jnp.roll`) goes round it. No number of devices divides a dim less one element, so
that the dim would be gathered in between; of the merged operator only the edges are exchanged:

    pad(x[a : n - b], low, high)     is  pad(x, low - a, high - b)
    concatenate([first, second])     is  select(place < len(first), pad(first), pad(second))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attrs import frozen
from jax import lax

from alpa_meta.compat import (
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    dtype_of,
    is_drop,
    shape_of,
    with_eqns,
)
from alpa_meta.passes.replacement import replacement

_MOST_PARTS = 3


@frozen(eq=False)
class _Cut:
    """A value that is `source` without (before, after) elements at the ends of each dim."""

    source: Any
    ends: tuple[tuple[int, int], ...]


def with_merged_shifts(program: ClosedJaxpr) -> ClosedJaxpr:
    """Return the program with cuts merged into the operators that restore the size of a dim."""
    cuts: dict[Atom, _Cut] = {}
    found: list[JaxprEqn] = []
    for eqn in program.jaxpr.eqns:
        _note(eqn, cuts)
        name = eqn.primitive.name
        if name == "pad" and eqn.invars[0] in cuts:
            eqn = _merged_pad(eqn, cuts[eqn.invars[0]])
        elif name == "concatenate" and _is_shift(eqn, cuts):
            found += _merged_join(eqn, cuts)
            continue
        found.append(eqn)
    return with_eqns(program, found)


def _note(eqn: JaxprEqn, cuts: dict[Atom, _Cut]) -> None:
    """Note the results of `eqn` that are cut out of its operand."""
    name, params = eqn.primitive.name, eqn.params
    if name not in ("slice", "split", "pad") or isinstance(eqn.invars[0], Literal):
        return
    source = eqn.invars[0]
    shape = shape_of(source)
    if name == "split":
        place = 0
        for var, size in zip(eqn.outvars, map(int, params["sizes"]), strict=True):
            ends = [(0, 0)] * len(shape)
            ends[params["axis"]] = (place, shape[params["axis"]] - place - size)
            _add(var, source, ends, cuts)
            place += size
    elif name == "pad":
        if all(max(amount) <= 0 and amount[2] == 0 for amount in params["padding_config"]):
            ends = [(-int(low), -int(high)) for low, high, _ in params["padding_config"]]
            _add(eqn.outvars[0], source, ends, cuts)
    elif all(stride == 1 for stride in params["strides"] or ()):
        limits = zip(shape, params["start_indices"], params["limit_indices"], strict=True)
        ends = [(int(start), int(size - stop)) for size, start, stop in limits]
        _add(eqn.outvars[0], source, ends, cuts)


def _add(var: Var, source: Any, ends: Sequence[tuple[int, int]], cuts: dict[Atom, _Cut]) -> None:
    if is_drop(var) or 0 in shape_of(var):
        return
    if source in cuts:
        inner = cuts[source]
        ends = [(a + c, b + d) for (a, b), (c, d) in zip(inner.ends, ends, strict=True)]
        source = inner.source
    cuts[var] = _Cut(source, tuple(ends))


def _merged_pad(eqn: JaxprEqn, cut: _Cut) -> Any:
    """Return the pad of a cut as a pad of what was cut, if that restores the size."""
    if shape_of(eqn.outvars[0]) != shape_of(cut.source):
        return eqn
    config = []
    for (low, high, between), (before, after) in zip(
        eqn.params["padding_config"], cut.ends, strict=True
    ):
        if (before and low > 0) or (after and high > 0) or between:
            return eqn
        config.append((int(low) - before, int(high) - after, 0))
    params = {**eqn.params, "padding_config": tuple(config)}
    return eqn.replace(invars=[cut.source, eqn.invars[1]], params=params)


def _is_shift(eqn: JaxprEqn, cuts: Mapping[Atom, _Cut]) -> bool:
    """Return whether a join of few parts, one of them cut, has the shape of what was cut."""
    shape, dim = shape_of(eqn.outvars[0]), eqn.params["dimension"]
    dtype = dtype_of(eqn.outvars[0])
    parts = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
    if not 2 <= len(parts) == len(eqn.invars) <= _MOST_PARTS or jnp.issubdtype(
        dtype, jax.dtypes.extended
    ):
        return False
    return any(
        part in cuts
        and shape_of(cuts[part].source) == shape
        and all(d == dim or ends == (0, 0) for d, ends in enumerate(cuts[part].ends))
        for part in parts
    )


def _merged_join(eqn: JaxprEqn, cuts: Mapping[Atom, _Cut]) -> list[JaxprEqn]:
    """Return the equations of a join of parts, each padded to the size of the result."""
    shape, dim = shape_of(eqn.outvars[0]), eqn.params["dimension"]
    dtype = dtype_of(eqn.outvars[0])
    sources, configs, stops, place = [], [], [], 0
    for part in eqn.invars:
        size = shape_of(part)[dim]
        ends: tuple[int, int] = (0, 0)
        source = part
        if part in cuts and all(
            d == dim or other == (0, 0) for d, other in enumerate(cuts[part].ends)
        ):
            source, ends = cuts[part].source, cuts[part].ends[dim]
        low, high = place - ends[0], shape[dim] - place - size - ends[1]
        configs.append([(low, high, 0) if d == dim else (0, 0, 0) for d in range(len(shape))])
        sources.append(source)
        place += size
        stops.append(place)

    def joined(*values: Any) -> Any:
        padded = [
            lax.pad(value, np.zeros((), dtype), config)
            for value, config in zip(values, configs, strict=True)
        ]
        places = lax.broadcasted_iota(np.int32, shape, dim)
        result = padded[-1]
        for stop, part in zip(stops[-2::-1], padded[-2::-1], strict=True):
            result = lax.select(places < stop, part, result)
        return result

    return replacement(joined, sources, eqn.outvars, eqn)

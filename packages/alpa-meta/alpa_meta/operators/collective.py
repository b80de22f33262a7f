"""Collectives of emitted programs: what an equation sends between the devices of mesh axes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from attrs import frozen
from jax import lax

from alpa_meta.compat import JaxprEqn


@frozen
class Collective:
    """How an operand is sent: `kind` is a reduction, which is an all-reduce by it, or "all-gather",
    "reduce-scatter", "all-to-all".

    `dim` is gathered, scattered or split; the parts of an all-to-all are joined along `to_dim`.
    """

    kind: str
    axes: tuple[str, ...]
    dim: int = 0
    to_dim: int = 0


_KINDS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "psum": ("add", "", ""),
        "pmax": ("max", "", ""),
        "pmin": ("min", "", ""),
        "all_gather": ("all-gather", "all_gather_dimension", ""),
        "reduce_scatter": ("reduce-scatter", "scatter_dimension", ""),
        "all_to_all": ("all-to-all", "split_axis", "concat_axis"),
    }
)
"""Primitive -> kind, and the parameters that hold dim and to_dim."""


def collective_of(eqn: JaxprEqn) -> Collective | None:
    """Return what an equation sends of its only operand, whole dims of it, over named axes of a
    mesh; None if it is nothing of that sort."""
    params = eqn.params
    if eqn.primitive.name not in _KINDS or len(eqn.invars) != 1:
        return None
    kind, dim, to_dim = _KINDS[eqn.primitive.name]
    if params.get("axis_index_groups") is not None or dim and not params.get("tiled"):
        return None
    named = params.get("axes", params.get("axis_name"))
    axes = named if isinstance(named, tuple) else (named,)
    if not all(isinstance(axis, str) for axis in axes):
        return None
    return Collective(kind, axes, params.get(dim, 0), params.get(to_dim, 0))


REDUCE = MappingProxyType({"add": lax.psum, "max": lax.pmax, "min": lax.pmin})
"""The collectives that reduce over axes, by reduction."""

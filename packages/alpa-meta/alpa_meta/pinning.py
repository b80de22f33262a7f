"""User pins: shardings that the planner must keep, of inputs and of values inside the step.

An input is pinned by its path (`Options.pins`), a value by `pin(x, spec)` or by
`jax.lax.with_sharding_constraint` in the user's code. A spec has one entry per dim: None (whole),
an axis name or a tuple of axis names, or `PartitionSpec.UNCONSTRAINED`. Only meshes that have all
named axes are planned for; a name that none of them has is ignored, with a warning.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence

import jax
from attrs import frozen
from jax import Array
from jax.extend import source_info_util
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from alpa_interchange import LogicalMesh, ShardingSpec, Strategy
from alpa_meta.compat import Jaxpr, JaxprEqn, Var, open_jaxpr, shape_of, source_line, subjaxprs
from alpa_meta.errors import PlanError
from alpa_meta.operators.elementwise import constrains_sharding
from alpa_meta.step.program import Program
from alpa_meta.types import Private, PyTree, Spec

_FREE: object = PartitionSpec.UNCONSTRAINED

source_info_util.register_exclusion(__file__)  # a pin's source line is the user's


class UnfitPinError(PlanError):
    """A pin that cannot be carried out on a mesh."""


@frozen
class Pin:
    """What a pin allows on one mesh: axes per dim, None where any will do."""

    dims: tuple[tuple[str, ...] | None, ...]

    def allows(self, spec: ShardingSpec) -> bool:
        """Return whether a tensor of `spec` is as pinned; unreduced sums never are."""
        return not spec.partial and all(
            wanted is None or set(wanted) == set(axes)
            for wanted, axes in zip(self.dims, spec.dims, strict=True)
        )


def pin(x: PyTree, spec: Spec) -> PyTree:
    """Return `x` unchanged; the planner must shard it by `spec` here.

    `x` may be a pytree, every array of which is pinned. `spec` names mesh axes ("x",
    "y", or `Options.axis_names`); nothing but the planner reads it, so the step also runs anywhere
    else. With gradients, the gradient of `x` is pinned alike.
    """
    if isinstance(spec, str):
        raise PlanError(f"pin(x, spec) takes one entry per dim, such as ('x', None), got {spec!r}")
    entries = tuple(
        _FREE if entry is _FREE else tuple(_names(entry)) or None for entry in tuple(spec)
    )

    def one(leaf: PyTree) -> PyTree:
        if len(entries) > jax.numpy.ndim(leaf):
            raise PlanError(
                f"pin(x, {spec}) has {len(entries)} entries, but x has {jax.numpy.ndim(leaf)} dims"
                "; give at most one entry per dim"
            )
        return _pin_p.bind(leaf, spec=entries)

    return jax.tree.map(one, x)


_pin_p = Primitive("alpa_pin")
_pin_p.def_impl(lambda x, *, spec: x)
_pin_p.def_abstract_eval(lambda x, *, spec: x)
mlir.register_lowering(_pin_p, mlir.lower_fun(lambda x, *, spec: x, multiple_results=False))
ad.deflinear2(_pin_p, lambda cotangent, _, *, spec: [_pin_p.bind(cotangent, spec=spec)])


def _batched(
    operands: Sequence[Array], dims: Sequence[int], *, spec: Sequence[Private]
) -> tuple[Array, int]:
    ((operand,), (dim,)) = operands, dims
    padded = [*spec, *[None] * (operand.ndim - 1 - len(spec))]
    padded.insert(dim, _FREE)
    return _pin_p.bind(operand, spec=tuple(padded)), dim


batching.primitive_batchers[_pin_p] = _batched


def pinned_inputs(program: Program, mesh: LogicalMesh, pins: Mapping[str, Spec]) -> dict[Var, Pin]:
    """Return {input variable: pin} for pins on paths."""
    by_path: dict[str, list[Var]] = {}
    for var, leaf in zip(program.jaxpr.invars, program.inputs, strict=True):
        by_path.setdefault(leaf.leaf_path, []).append(var)
    found = {}
    left_out = program.left_out.paths if program.left_out else ()
    for path, spec in pins.items():
        if path in left_out:
            continue
        if path not in by_path:
            keys = set(re.findall(r"\w+", path))
            close = [name for name in by_path if keys <= set(re.findall(r"\w+", name))]
            close = close or difflib.get_close_matches(path, by_path, n=3)
            hint = "did you mean" if close else "its inputs are"
            names = list(close or by_path)
            raise PlanError(
                f"Options.pins names {path!r}, which is no input of the step; {hint} "
                f"{', '.join(map(repr, names[:5]))}{', ...' if len(names) > 5 else ''}"
            )
        for var in by_path[path]:
            made = _on_mesh(spec, tuple(shape_of(var)), mesh, f"the pin of {path!r}")
            if made is not None:
                found[var] = made
    return found


def pin_marks(program: Program, pins: Mapping[str, Spec]) -> dict[Var, str]:
    """Return {input variable: what its pin asks for}, which inputs that are pinned alike share."""
    return {
        var: str(pins[leaf.leaf_path])
        for var, leaf in zip(program.jaxpr.invars, program.inputs, strict=True)
        if leaf.leaf_path in pins
    }


def is_pin(eqn: JaxprEqn) -> bool:
    """Return whether an equation only says how its operand is to be sharded."""
    return eqn.primitive is _pin_p or constrains_sharding(eqn)


def pinned_spec(eqn: JaxprEqn) -> Spec | None:
    """Return the entries of the spec that a pinning equation asks for, None if it names no axes."""
    if eqn.primitive is _pin_p:
        return tuple(eqn.params["spec"])
    spec = getattr(eqn.params["sharding"], "spec", None)
    if spec is None:
        return None
    rank = len(shape_of(eqn.outvars[0]))
    free = eqn.params.get("unconstrained_dims") or ()
    entries = [*spec, *[None] * (rank - len(tuple(spec)))]
    return tuple(_FREE if dim in free else entry for dim, entry in enumerate(entries))


def pinned_strategies(
    eqn: JaxprEqn, strategies: Sequence[Strategy], mesh: LogicalMesh
) -> tuple[Strategy, ...]:
    """Return the strategies of a pinning equation that carry out its pin on `mesh`."""
    spec = pinned_spec(eqn)
    if spec is None:
        return tuple(strategies)
    place = f"the pin at {source_line(eqn)}"
    made = _on_mesh(spec, tuple(shape_of(eqn.outvars[0])), mesh, place)
    if made is None:
        return tuple(strategies)
    return tuple(one for one in strategies if made.allows(one.results[0]))


def pinned_axes(
    program: Program, pins: Mapping[str, Spec], meshes: Iterable[LogicalMesh]
) -> set[str]:
    """Return the axes that pins name and some mesh has; warns of those that none has."""
    known = {name for mesh in meshes for name in mesh.axis_names}
    named: dict[str, str] = {}
    for path, spec in pins.items():
        for entry in spec:
            named.update((name, f"the pin of {path}") for name in _names(entry))
    for eqn in all_eqns(program.jaxpr):
        if is_pin(eqn):
            sizes = getattr(getattr(eqn.params.get("sharding"), "mesh", None), "shape", {})
            names = axes_named(pinned_spec(eqn) or ())
            shards = [name for name in names if sizes.get(name) != 1 or name in known]
            named.update((name, f"the pin at {source_line(eqn)}") for name in shards)
    for name, place in named.items():
        if name not in known:
            warnings.warn(
                f"{place} names mesh axis {name!r}, which is ignored: the meshes planned for have "
                f"the axes {sorted(known)}; name them with Options(mesh_shape=..., axis_names=...)",
                stacklevel=2,
            )
    return set(named) & known


def all_eqns(jaxpr: Jaxpr) -> Iterable[JaxprEqn]:
    """Yield the equations of a jaxpr and of the bodies inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for _, body in subjaxprs(eqn):
            yield from all_eqns(open_jaxpr(body))


def axes_named(spec: Spec) -> tuple[str, ...]:
    """Return the axes that the entries of a spec name."""
    return tuple(name for entry in spec for name in _names(entry))


def _names(entry: Private) -> tuple[str, ...]:
    if entry is None or entry is _FREE:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _on_mesh(spec: Spec, shape: tuple[int, ...], mesh: LogicalMesh, place: str) -> Pin | None:
    """Return the pin on one mesh, None if it names only axes that the mesh lacks."""
    entries = [*spec, *[None] * (len(shape) - len(tuple(spec)))]
    if len(entries) != len(shape):
        raise PlanError(f"{place} has {len(entries)} dims, the array has {len(shape)}")
    named = [name for entry in entries for name in _names(entry)]
    if named and not set(named) & set(mesh.axis_names):
        return None
    dims: list[tuple[str, ...] | None] = []
    for dim, (entry, size) in enumerate(zip(entries, shape, strict=True)):
        axes = tuple(name for name in _names(entry) if name in mesh.axis_names)
        if size % mesh.size(axes):
            raise UnfitPinError(
                f"{place} shards dim {dim} of size {size} over {axes}, whose {mesh.size(axes)} "
                "devices do not divide it; leave the axis out of the spec or pad the dim"
            )
        dims.append(None if entry is _FREE else tuple(a for a in axes if mesh.size((a,)) > 1))
    return Pin(tuple(dims))

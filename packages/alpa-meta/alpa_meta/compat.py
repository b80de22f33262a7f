"""Everything that differs between the supported jax versions (0.10.2 and newer), in one place.

Only public modules are used: `jax`, `jax.core`, `jax.experimental`, `jax.extend`,
`jax.interpreters`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

import jax
import jax.extend.core as jex
import numpy as np
from jax import Array
from jax.core import ShapedArray
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend import source_info_util
from jax.typing import DTypeLike

from alpa_meta.program_caches import cached_by_program
from alpa_meta.types import DType, Params, Private

if TYPE_CHECKING:
    from jax.experimental.pallas import CostEstimate
    from jax.extend.source_info_util import NameStack, SourceInfo

ClosedJaxpr = jex.ClosedJaxpr
Jaxpr = jex.Jaxpr
JaxprEqn = jex.JaxprEqn
Literal = jex.Literal
Var = jex.Var
Atom: TypeAlias = Var | Literal
_DropVar = getattr(jex, "DropVar", None)

_INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")
_MOST_FRAMES = 100
_TRACE_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
)
_EMPTY_MESH = jax.sharding.Mesh(np.empty((), dtype=object), ())


def trace_settings() -> tuple[object, ...]:
    """Return jax' settings, here and now, that a traced program depends on."""
    return tuple(getattr(jax.config, name, None) for name in _TRACE_SETTINGS)


def is_drop(var: object) -> bool:
    """Return whether `var` is an equation output that nobody reads."""
    return _DropVar is not None and isinstance(var, _DropVar)


def shape_of(atom: Atom) -> tuple[int, ...]:
    """Return the shape of an equation's operand or result; scalars and tokens have none."""
    return tuple(getattr(atom.aval, "shape", ()))


def dtype_of(atom: Atom) -> DType:
    """Return the dtype of an array, an extended one for keys; jax types variables more widely."""
    dtype: DType = array_type(atom).dtype
    return dtype


def array_type(atom: Atom) -> ShapedArray:
    """Return the type of an array; jax types variables more widely."""
    return cast(ShapedArray, atom.aval)


def abstract_of(atom: Atom) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array, weak where it is."""
    weak = getattr(atom.aval, "weak_type", False)
    return jax.ShapeDtypeStruct(shape_of(atom), dtype_of(atom), weak_type=weak)


def is_plain(var: Atom) -> bool:
    """Return whether `var` is an array of a numpy dtype, as keys, tokens and references are not."""
    return isinstance(getattr(var.aval, "dtype", None), np.dtype)


def calls_back(eqn: JaxprEqn) -> bool:
    """Return whether `eqn` calls a function of the host that may do more than return a value."""
    names = {type(effect).__name__.removeprefix("Ordered") for effect in eqn.effects}
    return not subjaxprs(eqn) and not names.isdisjoint({"DebugEffect", "IOEffect"})


def closed(jaxpr: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """Return `jaxpr` as a ClosedJaxpr (older jax keeps some sub-jaxprs open)."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def open_jaxpr(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """Return the Jaxpr inside a ClosedJaxpr, or `jaxpr` itself."""
    if isinstance(jaxpr, ClosedJaxpr) and hasattr(jaxpr, "jaxpr"):
        return cast(Jaxpr, jaxpr.jaxpr)
    return cast(Jaxpr, jaxpr)


def consts(jaxpr: Jaxpr | ClosedJaxpr) -> list[Array]:
    """Return the constants closed over by `jaxpr`, none for an open one."""
    return list(getattr(jaxpr, "consts", ()) or ())


@cached_by_program(1 << 17)
def subjaxprs(eqn: JaxprEqn) -> tuple[tuple[str, Jaxpr | ClosedJaxpr], ...]:
    """Return the (parameter name, jaxpr) pairs inside the parameters of `eqn`, in order."""
    found: list[tuple[str, Jaxpr | ClosedJaxpr]] = []

    def visit(name: str, value: object) -> None:
        if isinstance(value, (ClosedJaxpr, Jaxpr)):
            found.append((name, value))
        elif isinstance(value, (tuple, list)):
            for item in value:
                visit(name, item)

    for name, value in eqn.params.items():
        visit(name, value)
    return tuple(found)


def with_eqns(program: ClosedJaxpr, eqns: Iterable[JaxprEqn]) -> ClosedJaxpr:
    """Return the program with other equations."""
    return ClosedJaxpr(program.jaxpr.replace(eqns=list(eqns)), program.consts)


def call_body(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return the ClosedJaxpr of a call equation's body, None if it has none.

    Newest jax also calls primitives that carry their own expansion into ordinary ones.
    """
    bodies = subjaxprs(eqn)
    if bodies:
        return closed(bodies[0][1])
    primitive = eqn.params.get("_prim")
    if primitive is None or not hasattr(primitive, "expand"):
        return None

    def expand(*operands: Array) -> list[Array]:
        return jax.tree.leaves(primitive.expand(*jax.tree.unflatten(primitive.in_tree, operands)))

    return jax.make_jaxpr(expand)(*(atom.aval for atom in eqn.invars))


def implementation(eqn: JaxprEqn) -> ClosedJaxpr:
    """Return the operators that the primitive of an equation is implemented by."""

    def call(*operands: Array) -> list[Array]:
        return jax.tree.leaves(eqn.primitive.impl(*operands, **eqn.params))

    return jax.make_jaxpr(call)(*(atom.aval for atom in eqn.invars))


def linear_solve(eqn: JaxprEqn) -> tuple[ClosedJaxpr, list[Atom]]:
    """Return what a `custom_linear_solve` equation runs: the solver's ClosedJaxpr, its operands.

    The products and the transposed solver beside it are there to be differentiated.
    """
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    first = lengths.matvec + lengths.vecmat
    solver = eqn.invars[first : first + lengths.solve]
    return closed(jaxprs.solve), [*solver, *eqn.invars[sum(lengths) :]]


def scan_counts(eqn: JaxprEqn) -> tuple[int, int, int]:
    """Return (constants, carries, scanned inputs) of a `scan` equation.

    Newer jax replaced `num_consts` and `num_carry`; there, scanned inputs are those whose body
    shape lacks the leading length, and carries those outputs whose body shape is unchanged.
    """
    params = eqn.params
    if "num_consts" in params:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
        return num_consts, num_carry, len(eqn.invars) - num_consts - num_carry
    body, length = closed(params["jaxpr"]), params["length"]
    num_xs = 0
    for outer, inner in zip(reversed(eqn.invars), reversed(body.in_avals), strict=True):
        if shape_of(outer) != (length, *inner.shape):
            break
        num_xs += 1
    num_ys = 0
    for outer, inner in zip(reversed(eqn.outvars), reversed(body.out_avals), strict=True):
        if shape_of(outer) != (length, *inner.shape):
            break
        num_ys += 1
    num_carry = len(eqn.outvars) - num_ys
    return len(eqn.invars) - num_xs - num_carry, num_carry, num_xs


def kernel_name(eqn: JaxprEqn) -> str:
    """Return the name of the kernel of a Pallas call."""
    return str(eqn.params.get("name") or getattr(eqn.params.get("name_and_src_info"), "name", ""))


def cost_estimate(eqn: JaxprEqn) -> CostEstimate | None:
    """Return the `pl.CostEstimate` that a Pallas call was made with, if any."""
    return eqn.params.get("cost_estimate")


def num_programs(eqn: JaxprEqn) -> int:
    """Return how many programs of its kernel a Pallas call runs; 1 where that is not known."""
    grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
    return math.prod(size for size in grid if isinstance(size, int))


def bind(eqn: JaxprEqn, values: Sequence[Array], params: Params | None = None) -> list[Array]:
    """Return the outputs of the equation's primitive applied to `values`, always as a list."""
    bound = eqn.primitive.get_bind_params(dict(eqn.params) if params is None else params)
    if isinstance(bound, tuple):
        functions, bound = bound
        values = [*functions, *values]
    manager = getattr(getattr(eqn, "ctx", None), "manager", None) or contextlib.nullcontext()
    with manager:
        outputs = eqn.primitive.bind(*values, **bound)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


def without_user_mesh(eqn: JaxprEqn) -> JaxprEqn:
    """Return `eqn` to be bound under no mesh, whichever was set (jax.set_mesh) where it was traced.

    Elsewhere it would disagree with the mesh of the shard_map that it is emitted into.
    """
    context = getattr(eqn, "ctx", None)
    if context is None:
        return eqn
    own = _meshless(context)
    return eqn if own is context else eqn.replace(ctx=own)


@functools.lru_cache(maxsize=256)  # contexts are few, and compare by identity
def _meshless(context: Private) -> Private:
    with context.manager, jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return jex.new_jaxpr_eqn([], [], jex.Primitive("none"), {}, frozenset()).ctx


def no_mesh() -> contextlib.AbstractContextManager[object]:
    """Return a context in which no mesh is set (jax.set_mesh): programs bring their own."""
    if jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[object] = jax.set_mesh(_EMPTY_MESH)
    return context


def row_major(value: Array) -> Array:
    """Return `value`, which the compiler must store with its dims in order, the first outermost."""
    stored: Array = with_layout_constraint(value, Layout(major_to_minor=tuple(range(value.ndim))))
    return stored


def name_stack(eqn: JaxprEqn) -> str:
    """Return the transformations and scopes an equation was traced under, e.g.
    `transpose(jvp(f))`."""
    return str(eqn.source_info.name_stack)


def source_line(eqn: JaxprEqn) -> str:
    """Return file:line of the user's code behind an equation, or an empty string.

    That is the innermost call outside of installed packages, if there is one.
    """
    try:
        frames = source_info_util.summarize(eqn.source_info, num_frames=_MOST_FRAMES).split("\n")
    except (AttributeError, TypeError):
        return ""
    own = [frame for frame in frames if not _INSTALLED.search(frame)]
    return str((own or frames)[-1])


def with_outer_name_stack(eqn: JaxprEqn, outer: NameStack) -> SourceInfo:
    """Return the source info of `eqn` with the name stack `outer` in front."""
    return eqn.source_info.replace(name_stack=outer + eqn.source_info.name_stack)


@functools.lru_cache(maxsize=256)
def dtype_name(dtype: DTypeLike) -> str:
    """Return the name of a dtype, remembered: numpy takes long to say it."""
    return str(dtype)

"""Which equations of a training step are forward, backward and update.

The backward pass is recognised by the name stacks jax leaves on equations: `transpose(jvp(...))`
is of a gradient, `jvp(transpose(jvp(...)))` of a gradient that a loss takes within (of its inputs,
or of parameters it moves) and of the forward pass like the rest of that loss. The rest follows from
data flow, so that it holds whatever the order of equations:

    backward  tagged as transposed, or fed by a backward value and by the batch's examples
    forward   feeds a backward equation, works on the batch's examples before any gradient is known,
              or feeds such work or, without any gradient, later work on them
    update    everything else: runs once per step, on accumulated gradients

Where a loss reads what a gradient of an earlier one has moved (an actor after its critic, a
generator after its discriminator, the moved parameters of SAM), the earlier loss, its backward pass
and its update are of the forward pass: microbatches add that gradient up before the others, as
any sum that they read whole. A loop or condition that holds all of such a later loss (a line
search, an actor that is trained every second step) is of the update, if no gradient follows it.

`gradient_marker` (inserted by `alpa.value_and_grad`) says the same explicitly: whatever the marked
gradients depend on is forward or backward.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import jax
import jax.extend.core as jex
from attrs import frozen
from jax.interpreters import ad, batching, mlir

from alpa_meta.compat import (
    Atom,
    JaxprEqn,
    Literal,
    Var,
    is_drop,
    name_stack,
    open_jaxpr,
    shape_of,
    subjaxprs,
)
from alpa_meta.errors import PlanError
from alpa_meta.microbatch.placement import Placement
from alpa_meta.types import Function, PyTree

_OUTERMOST, _ANY = re.compile(r"\b(?:jvp|(transpose))\("), re.compile(r"\b(transpose)\(")

gradient_marker = jex.Primitive("alpa_gradient")
gradient_marker.def_impl(lambda x: x)
gradient_marker.def_abstract_eval(lambda x: x)
ad.deflinear2(gradient_marker, lambda cotangent, _: [cotangent])
batching.primitive_batchers[gradient_marker] = lambda args, dims: (
    gradient_marker.bind(*args),
    dims[0],
)
mlir.register_lowering(gradient_marker, lambda _, x: [x])


def value_and_grad(function: Function[PyTree], *args: PyTree, **kwargs: PyTree) -> Function[PyTree]:
    """Return jax.value_and_grad(function, ...) with its gradients marked for the planner.

    Plain `jax.value_and_grad` is recognised too; use this form where recognition cannot be sure,
    such as second-order derivatives.
    """
    inner = jax.value_and_grad(function, *args, **kwargs)

    def marked(*inputs: PyTree, **keywords: PyTree) -> PyTree:
        value, gradients = inner(*inputs, **keywords)
        return value, jax.tree.map(gradient_marker.bind, gradients)

    return marked


@frozen
class Phases:
    """Phase per equation, and how it was recognised ("marker" or "name stack")."""

    of_eqn: tuple[str, ...]
    recognised_by: str


def classify(
    eqns: Sequence[JaxprEqn],
    placements: Mapping[Var, Placement],
    example: Collection[Var] = (),
) -> Phases:
    """Return the phase of each equation; PlanError if the step computes no gradient.

    `example` are the inputs that hold a batch's only example, whose dim nothing can follow: arrays
    that come from it before any gradient is known are the example's.
    """
    marked = [k for k, eqn in enumerate(eqns) if eqn.primitive is gradient_marker]
    tagged = {k for k, eqn in enumerate(eqns) if _is_transposed(eqn, _OUTERMOST)}
    if not tagged:  # of nothing but derivatives of gradients
        tagged = {k for k, eqn in enumerate(eqns) if _is_transposed(eqn, _ANY)}
    if not marked and not tagged:
        raise PlanError(
            "no gradient was found in the step: none of its "
            f"{len(eqns)} operations comes from jax.grad or jax.value_and_grad; "
            "differentiate the loss inside the step, with jax.value_and_grad or alpa.value_and_grad"
        )
    producer: dict[Atom, int] = {
        var: k for k, eqn in enumerate(eqns) for var in eqn.outvars if not is_drop(var)
    }
    examples = {k for k, eqn in enumerate(eqns) if _per_example(eqn, placements)}
    derived = {k for k, eqn in enumerate(eqns) if _OUTERMOST.search(name_stack(eqn))}
    sums = {k for k in tagged & examples if any(_is_whole(v, placements) for v in eqns[k].outvars)}
    moved = _descendants(eqns, producer, sums)
    last = _last_losses(eqns, producer, tagged, derived, moved)
    tagged -= last
    later = (moved & _ancestors(eqns, producer, tagged) & (examples | derived)) - tagged
    later |= (_descendants(eqns, producer, later) & derived) - tagged
    earlier = _ancestors(eqns, producer, later) - later
    marked, tagged = [k for k in marked if k not in earlier], tagged - earlier
    gradients = set(marked) if marked else tagged
    after = _descendants(eqns, producer, gradients)
    ancestors = _ancestors(eqns, producer, gradients | examples - after)
    ancestors |= _ancestors(eqns, producer, examples & after) - after
    phases: list[str] = []
    of_example = set(example)
    for k, eqn in enumerate(eqns):
        sources = {phases[one] for one in _sources(eqn, producer)}
        alone = any(atom in of_example for atom in eqn.invars if isinstance(atom, Var))
        inside = k in ancestors or k in tagged and not marked
        if k in last:
            phases.append("update")
        elif k in tagged and inside:
            phases.append("backward")
        elif inside or _per_example(eqn, placements) and "update" not in sources:
            phases.append("backward" if "backward" in sources else "forward")
        elif alone and sources <= {"forward"}:
            phases.append("forward")
        else:
            phases.append("update")
        if alone and phases[-1] == "forward":
            of_example.update(var for var in eqn.outvars if not is_drop(var) and shape_of(var))
    return Phases(tuple(phases), "marker" if marked else "name stack")


def _last_losses(
    eqns: Sequence[JaxprEqn],
    producer: Mapping[Atom, int],
    tagged: set[int],
    derived: set[int],
    moved: set[int],
) -> set[int]:
    """Return the loops and conditions that hold all of a loss, its gradient included, and read what
    gradients outside of them have moved, if no gradient outside of them reads what they make.
    """
    found: set[int] = set()
    for k in sorted(tagged - derived, reverse=True):
        behind = _descendants(eqns, producer, {k}) & tagged
        if _sources(eqns[k], producer) & moved and behind <= found | {k}:
            found.add(k)
    return found


def _is_whole(var: Var, placements: Mapping[Var, Placement]) -> bool:
    return not is_drop(var) and var not in placements


def _sources(eqn: JaxprEqn, producer: Mapping[Atom, int]) -> set[int]:
    return {producer[atom] for atom in eqn.invars if _known(atom, producer)}


def _per_example(eqn: JaxprEqn, placements: Mapping[Var, Placement]) -> bool:
    """Return whether an equation works on the batch's examples."""
    return any(
        placements[atom].kind == "split"
        for atom in eqn.invars
        if not isinstance(atom, Literal) and atom in placements
    )


def _known(atom: Atom, producer: Mapping[Atom, int]) -> bool:
    return not isinstance(atom, Literal) and atom in producer


def _is_transposed(eqn: JaxprEqn, derivative: re.Pattern[str], outer: str = "") -> bool:
    """Return whether jax marked an equation, or one inside it, as a step of a backward pass: the
    first `derivative` in its name stack is a transposition."""
    stack = f"{outer}/{name_stack(eqn)}"
    found = derivative.search(stack)
    if found is not None and found[1]:
        return True
    bodies = [open_jaxpr(body) for _, body in subjaxprs(eqn)]
    return any(_is_transposed(inner, derivative, stack) for body in bodies for inner in body.eqns)


def is_derived(eqn: JaxprEqn) -> bool:
    """Return whether an equation is of a function that is differentiated, or of its derivative."""
    return _OUTERMOST.search(name_stack(eqn)) is not None


def is_of_backward_pass(eqn: JaxprEqn) -> bool:
    """Return whether an equation, or one inside it, is of a backward pass."""
    return _is_transposed(eqn, _OUTERMOST)


def holds_gradient(eqn: JaxprEqn) -> bool:
    """Return whether an equation holds all of a gradient, the forward pass included."""
    return _is_transposed(eqn, _OUTERMOST) and not _OUTERMOST.search(name_stack(eqn))


def _descendants(
    eqns: Sequence[JaxprEqn], producer: Mapping[Atom, int], roots: set[int]
) -> set[int]:
    found = set(roots)
    for k, eqn in enumerate(eqns):
        if _sources(eqn, producer) & found:
            found.add(k)
    return found


def _ancestors(eqns: Sequence[JaxprEqn], producer: Mapping[Atom, int], roots: set[int]) -> set[int]:
    found, pending = set(roots), list(roots)
    while pending:
        new = _sources(eqns[pending.pop()], producer) - found
        found |= new
        pending += new
    return found

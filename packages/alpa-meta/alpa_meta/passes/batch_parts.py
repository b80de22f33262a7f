"""Parts that a step takes of its batch, one for every round of gradient accumulation.

Cuts of one value at places that cover it are the parts of its rounds:

    x[0:8], x[8:16], x[16:24]       blocks, as of jnp.split and lax.dynamic_slice at known places
    x[0::3], x[1::3], x[2::3]       every third

of a value that the step makes before any derivative.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import jax.numpy as jnp
from attrs import frozen
from jax import Array

from alpa_meta.compat import ClosedJaxpr, JaxprEqn, Literal, Var, is_plain, shape_of
from alpa_meta.operators.cutting import Taken, taken
from alpa_meta.passes.operator_keys import literal_key, operator_key
from alpa_meta.step.phases import is_derived


@frozen(eq=False)
class Parts:
    """The parts of `whole` along `dim`, the first taken by `cut`: those of a round are the same."""

    cut: JaxprEqn
    whole: Var
    dim: int
    blocks: bool  # else every n-th
    rounds: Sequence[Sequence[Var]]

    def together(self, whole: Array) -> Array:
        """Return the parts of all rounds, [rounds, *part], of the whole."""
        count, size = len(self.rounds), whole.shape[self.dim] // len(self.rounds)
        sizes = (count, size) if self.blocks else (size, count)
        apart = whole.reshape(*whole.shape[: self.dim], *sizes, *whole.shape[self.dim + 1 :])
        return jnp.moveaxis(apart, self.dim + (not self.blocks), 0)


def parts_by_rounds(program: ClosedJaxpr) -> Mapping[int, Sequence[Parts]]:
    """Return the parts that cover arrays, by the number of rounds, most first."""
    origin: dict[Var, tuple[Var, Taken]] = {}
    cutters: dict[Var, JaxprEqn] = {}
    derived: set[Var] = set()
    first: dict[Var, Var] = {}  # the same value, as it is first made
    made: dict[Hashable, Var] = {}
    found: dict[tuple[Var, int, int, int], dict[int, list[Var]]] = {}
    for eqn in program.jaxpr.eqns:
        operands = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
        cuts = taken(eqn)
        if not derived.isdisjoint(operands) or is_derived(eqn) and not cuts:
            derived.update(eqn.outvars)
        elif len(eqn.outvars) == 1 and not eqn.effects:
            (value,) = eqn.outvars
            first[value] = made.setdefault(_value_key(eqn, first), value)
        for var, cut in zip(eqn.outvars, cuts, strict=False):
            operand = first.get(operands[0], operands[0])
            whole, cut = _of_first(operand, cut, origin)
            if is_plain(whole) and whole not in derived:
                origin[var], cutters[var] = (whole, cut), eqn
                of_size = found.setdefault((whole, cut.dim, cut.size, cut.stride), {})
                of_size.setdefault(cut.start, []).append(var)
    by_rounds: dict[int, list[Parts]] = {}
    for (whole, dim, size, stride), starts in found.items():
        count = shape_of(whole)[dim] // max(size, 1)
        blocks = stride == 1 and sorted(starts) == [k * size for k in range(count)]
        if len(starts) == count > 1 and count * size == shape_of(whole)[dim]:
            if blocks or stride == count and sorted(starts) == list(range(count)):
                rounds = [starts[start] for start in sorted(starts)]
                parts = Parts(cutters[rounds[0][0]], whole, dim, blocks, rounds)
                by_rounds.setdefault(count, []).append(parts)
    return dict(sorted(by_rounds.items(), reverse=True))


def _value_key(eqn: JaxprEqn, first: Mapping[Var, Var]) -> Hashable:
    """Return what is equal for equations that make the same values."""
    operands = [
        literal_key(atom) if isinstance(atom, Literal) else first.get(atom, atom)
        for atom in eqn.invars
    ]
    return operator_key(eqn), *operands


def _of_first(
    operand: Var, cut: Taken, origin: Mapping[Var, tuple[Var, Taken]]
) -> tuple[Var, Taken]:
    """Return the value that a cut of a cut takes from, and what it takes of it."""
    if operand not in origin or origin[operand][1].dim != cut.dim:
        return operand, cut
    whole, outer = origin[operand]
    start, stride = outer.start + cut.start * outer.stride, outer.stride * cut.stride
    return whole, Taken(cut.dim, start, cut.size, stride if cut.size > 1 else 1)

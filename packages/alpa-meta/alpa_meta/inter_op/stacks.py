"""Which values of a step are stacked along the layers of a scan, so that they can be cut with it.

A scan over layers reads stacked parameters and residuals and writes stacked residuals and
gradients: dim 0 of each is the layer. Sharding rules carry that dim on through the other operations
(a cast before the scan, the optimiser after it), where one factor of the rule is dim 0 of several
values:

    link      dim 0 of every scanned input and output of one scan, and the dims 0 that one factor of
              an operation joins
    stack     the values linked to a heavy forward scan with a state input among them

A scan over time is no stack (its inputs come from the batch), nor is one in a loop or conditional.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from attrs import frozen

from alpa_interchange import ShardingRule
from alpa_meta.compat import Atom, JaxprEqn, Literal, Var, is_drop, scan_counts, shape_of
from alpa_meta.operators import flops, operator_of, sharding_rule
from alpa_meta.operators.regions import is_control_flow, is_scan
from alpa_meta.program_caches import cached_by_program
from alpa_meta.step.program import Program
from alpa_meta.types import Params

LEAST_SHARE = 0.05  # of the forward work, below which a scan stays whole
MOST_PIECES = 16  # a stack is cut into at most so many, more would only make planning slow

_REDUCTIONS = frozenset({"add", "max", "min", "and", "or"})


@frozen(eq=False)
class Stack:
    """Values that are stacked along the same `length` layers."""

    length: int
    members: frozenset[Var]


@cached_by_program(4)  # asked for every kind of recomputation of one program
def stacks_of(program: Program) -> tuple[Stack, ...]:
    """Return the stacks of a program that may be cut between stages."""
    jaxpr = program.jaxpr
    eqns, phases = jaxpr.eqns, program.phases.of_eqn
    total = sum(flops(eqn) for eqn, phase in zip(eqns, phases, strict=True) if phase == "forward")
    scans = [
        eqn
        for eqn, phase in zip(eqns, phases, strict=True)
        if phase == "forward" and is_cuttable(eqn) and flops(eqn) >= LEAST_SHARE * total
    ]
    if not scans:
        return ()
    links = _Links()
    for eqn in eqns:
        for carriers in _carriers(eqn):
            links.join(carriers)
    for atom, alias in zip(jaxpr.outvars, program.aliases, strict=True):
        if alias is not None and not isinstance(atom, Literal):
            if links.has(atom) and links.has(jaxpr.invars[alias]):
                links.join([atom, jaxpr.invars[alias]])
    heavy: dict[Var, int] = {}
    for eqn in scans:
        heavy[links.root(cast(Var, stacked_inputs(eqn)[0]))] = eqn.params["length"]
    groups: dict[Var, set[Var]] = {root: set() for root in heavy}
    for var in links.known():
        if links.root(var) in groups:
            groups[links.root(var)].add(var)
    roles = dict(zip(jaxpr.invars, (leaf.role for leaf in program.inputs), strict=True))
    found = []
    for root, members in groups.items():
        held = {roles[var] for var in members if var in roles}
        per_example = any(
            program.placements[var].kind == "split" and program.placements[var].dim == 0
            for var in members
            if var in program.placements
        )
        if "state" in held and "batch" not in held and not per_example:
            found.append(Stack(heavy[root], frozenset(members)))
    return tuple(found)


def is_cuttable(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a scan over stacked inputs that can run in pieces."""
    if not is_scan(eqn) or eqn.effects or eqn.params["length"] < 2:
        return False
    scanned = stacked_inputs(eqn)
    return bool(scanned) and not any(isinstance(atom, Literal) for atom in scanned)


def stacked_inputs(eqn: JaxprEqn) -> list[Atom]:
    """Return the variables a scan reads slice by slice."""
    num_consts, num_carry, _ = scan_counts(eqn)
    return list(eqn.invars[num_consts + num_carry :])


def stacked_outputs(eqn: JaxprEqn) -> list[Var]:
    """Return the variables a scan writes slice by slice."""
    return [var for var in eqn.outvars[scan_counts(eqn)[1] :] if not is_drop(var)]


@frozen
class Passage:
    """How dim 0 passes through an operation: the operands and results that have it, by position.

    `reduction` combines the results of pieces where the operation reduces dim 0 away.
    """

    operands: frozenset[int]
    results: frozenset[int]
    reduction: str | None = None


def passages(eqn: JaxprEqn) -> Iterator[Passage]:
    """Yield the ways in which an operation can run piece by piece along dim 0 of its values."""
    if eqn.effects or is_control_flow(eqn) or not operator_of(eqn).runs_in_pieces:
        return
    rule = sharding_rule(eqn)
    if rule is None:
        return
    sides = (*rule.operands, *rule.results)
    for factor in dict.fromkeys(dims[0][0] for dims in sides if dims and len(dims[0]) == 1):
        found = _passage(eqn, rule, factor)
        if found is not None:
            yield found


def resized(eqn: JaxprEqn, length: int) -> Params:
    """Return the parameters of an operation on a piece of `length` layers."""
    adjusted = operator_of(eqn).piece_params
    return dict(eqn.params) if adjusted is None else adjusted(eqn, length)


def _passage(eqn: JaxprEqn, rule: ShardingRule, factor: str) -> Passage | None:
    operands, results = _having(rule.operands, factor), _having(rule.results, factor)
    if operands is None or results is None:
        return None
    if any(isinstance(eqn.invars[k], Literal) for k in operands):
        return None
    kind = rule.factor(factor)
    if kind.kind in ("replicate", "permutation"):
        return None
    if len(results) == len(eqn.outvars):
        return Passage(operands, results)
    if not results and kind.kind == "reduction" and kind.reduction in _REDUCTIONS:
        return Passage(operands, results, kind.reduction) if len(eqn.outvars) == 1 else None
    return None


def _having(sides: Sequence[Sequence[Sequence[str]]], factor: str) -> frozenset[int] | None:
    """Return which tensors have `factor` as their dim 0; None if one has it elsewhere."""
    found = set()
    for number, dims in enumerate(sides):
        places = [place for place, dim in enumerate(dims) if factor in dim]
        if places and (places != [0] or len(dims[0]) != 1):
            return None
        if places:
            found.add(number)
    return frozenset(found)


def _carriers(eqn: JaxprEqn) -> Iterator[list[Var]]:
    """Yield the variables whose dims 0 an equation joins."""
    if is_scan(eqn):
        if is_cuttable(eqn):
            yield [*cast(list[Var], stacked_inputs(eqn)), *stacked_outputs(eqn)]
        return
    for passage in passages(eqn):
        carried = cast(list[Var], [eqn.invars[k] for k in passage.operands])
        yield carried + [eqn.outvars[k] for k in passage.results if not is_drop(eqn.outvars[k])]


class _Links:
    """Disjoint sets of variables, kept apart by the size of dim 0."""

    def __init__(self) -> None:
        self._parent: dict[Var, Var] = {}

    def root(self, var: Var) -> Var:
        """Return the variable that stands for the set of `var`."""
        self._parent.setdefault(var, var)
        while self._parent[var] is not var:
            self._parent[var] = self._parent[self._parent[var]]
            var = self._parent[var]
        return var

    def join(self, variables: Sequence[Var]) -> None:
        """Put variables into one set."""
        for var in variables[1:]:
            assert shape_of(var)[0] == shape_of(variables[0])[0]
            self._parent[self.root(var)] = self.root(variables[0])

    def has(self, var: Var) -> bool:
        """Return whether a variable was met."""
        return var in self._parent

    def known(self) -> list[Var]:
        """Return every variable met."""
        return list(self._parent)


def even_bounds(length: int, most: int = MOST_PIECES) -> tuple[int, ...]:
    """Return the ends of nearly equal pieces of `length` layers, from 0 to `length`.

    Equal pieces share one selection problem: a divisor is taken unless it is below half of `most`.
    """
    count = max(divisor for divisor in range(1, most + 1) if length % divisor == 0)
    if 2 * count < min(most, length):
        count = min(most, length)
    return tuple(length * k // count for k in range(count + 1))

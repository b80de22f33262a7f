"""A layer is computed again only when the backward pass of the layer behind it is done.

What a layer computes again waits for its cotangent, as with `jax.checkpoint`. But only the update
waits for weight gradients: XLA's scheduler for GPUs runs them all at the end, and what every layer
computed again for them is held until then. So the barrier in front of a recomputation also waits
for all that the backward pass before it comes to. What of it is summed over devices is summed
behind the barrier, while the next layer is computed again; what only rearranges or converts it
moves behind the barrier, too, where XLA makes it part of what reads it.

Not on host devices, which are scheduled by memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve
from jax import lax

from alpa_interchange import ShardingSpec, Strategy
from alpa_meta.compat import (
    Atom,
    JaxprEqn,
    Literal,
    Var,
    consts,
    is_drop,
    is_plain,
    open_jaxpr,
    scan_counts,
    with_outer_name_stack,
)
from alpa_meta.inter_op.layering import tensor_bytes
from alpa_meta.operators import flops, kernel_kind, operator_of, sharding_rule
from alpa_meta.operators.elementwise import is_barrier
from alpa_meta.operators.regions import bodies, is_region, is_remat, is_scan
from alpa_meta.passes.added_equations import equations_of
from alpa_meta.passes.shared_reads import read_once
from alpa_meta.spmd import JaxprPlan, RegionPlan, natural_result, stacked

Step = Strategy | RegionPlan


def with_fences(
    eqns: Sequence[JaxprEqn], plan: JaxprPlan, outvars: Sequence[Var], phases: Sequence[str]
) -> tuple[tuple[JaxprEqn, ...], JaxprPlan, tuple[Var, ...], tuple[str, ...]]:
    """Return the equations of a task, their plan, the task's results and the equations' phases,
    each recomputation waiting for the backward pass before it."""
    steps = [
        inner
        for eqn, step, phase in zip(eqns, plan.strategies, phases, strict=True)
        for inner in (_inlined(eqn, step, phase) if phase == "backward" else [(eqn, step, phase)])
    ]
    if not any(is_barrier(eqn) and phase == "backward" for eqn, _, phase in steps):
        return tuple(eqns), plan, tuple(outvars), tuple(phases)
    wanted: dict[Var, set[ShardingSpec]] = {}
    reads = [(eqn.invars, step.operands) for eqn, step, _ in steps]
    for atoms, specs in (*reads, (outvars, plan.outputs)):
        for atom, spec in zip(atoms, specs, strict=True):
            if isinstance(atom, Var):
                wanted.setdefault(atom, set()).add(spec)
    fenced = _Fenced(wanted)
    for eqn, step, phase in steps:
        fenced.add(eqn, step, phase)
    results = tuple(fenced.read(var) for var in outvars)
    found, strategies, places = zip(*fenced.steps, strict=True)
    return found, JaxprPlan(plan.inputs, strategies, plan.outputs), results, places


class _Fenced:
    """The equations of a task up to some place; `wanted` are the specs each value is read in."""

    def __init__(self, wanted: Mapping[Var, set[ShardingSpec]]) -> None:
        self.steps: list[tuple[JaxprEqn, Step, str]] = []
        self._wanted = wanted
        self._names: dict[Var, Var] = {}  # of values behind barriers
        self._moved: dict[Var, tuple[JaxprEqn, Step, str]] = {}  # what is not read yet, by result
        self._ends: dict[Var, int] = {}  # unread results of the backward pass, by whom

    def add(self, eqn: JaxprEqn, step: Step, phase: str) -> None:
        """Add an equation, behind a barrier if it recomputes."""
        if phase == "backward" and _is_light(eqn):
            self._moved[eqn.outvars[0]] = eqn, step, phase
            return
        atoms = [atom if isinstance(atom, Literal) else self.read(atom) for atom in eqn.invars]
        eqn = eqn.replace(invars=atoms)
        if phase == "backward" and is_barrier(eqn):
            self._wait(eqn, step, phase)
            return
        for var in eqn.outvars:
            if phase == "backward" and not is_drop(var) and is_plain(var):
                self._ends[var] = len(self.steps)
        self.steps.append((eqn, step, phase))

    def read(self, var: Var) -> Var:
        """Return what is read for `var` from here on."""
        if var in self._moved:
            eqn, step, phase = self._moved.pop(var)
            atoms = [a if isinstance(a, Literal) else self.read(a) for a in eqn.invars]
            self.steps.append((eqn.replace(invars=atoms), step, phase))
        self._ends.pop(var, None)
        return self._names.get(var, var)

    def _wait(self, barrier: JaxprEqn, step: Step, phase: str) -> None:
        """Add a barrier that waits for the ends of the backward pass, too; they are read from
        behind it, as XLA drops from barriers what nothing reads."""
        ends = {var: self._unsummed(var, k) for var, k in self._ends.items()}
        fresh = [Var(var.aval) for var in ends]
        self._names.update(zip(ends, fresh, strict=True))
        self._ends.clear()
        waiting = barrier.replace(
            invars=[*barrier.invars, *ends], outvars=[*barrier.outvars, *fresh]
        )
        kept = tuple(ends.values())
        strategy = evolve(step, operands=(*step.operands, *kept), results=(*step.results, *kept))
        self.steps.append((waiting, strategy, phase))

    def _unsummed(self, var: Var, maker: int) -> ShardingSpec:
        """Return the spec that a value is left in until it is read: with its sums partial, if all
        readers want them completed in the same way."""
        eqn, step, phase = self.steps[maker]
        k = eqn.outvars.index(var)
        natural, final = _natural(eqn, step, k), step.results[k]
        if natural is None or natural == final or self._wanted.get(var) != {final}:
            return final
        results = (*step.results[:k], natural, *step.results[k + 1 :])
        self.steps[maker] = eqn, evolve(step, results=results), phase
        return natural


def _inlined(eqn: JaxprEqn, step: Step, phase: str) -> list[tuple[JaxprEqn, Step, str]]:
    """Return the equations of a recomputation region of the user's, and the barrier it reads
    behind; of other equations themselves."""
    given = [atom for atom in eqn.invars if isinstance(atom, Var) and is_plain(atom)]
    if not is_remat(eqn) or not isinstance(step, RegionPlan) or not given or not _held(eqn):
        return [(eqn, step, phase)]
    (closed_body,), (plan,) = bodies(eqn), step.bodies
    body = open_jaxpr(closed_body)
    specs = dict(zip(eqn.invars, step.operands, strict=True))
    given = list(dict.fromkeys(given))
    fresh = {var: Var(var.aval) for var in given}
    (barrier,) = equations_of(
        lambda *values: lax.optimization_barrier(values), given, [*fresh.values()]
    )
    kept = tuple(specs[var] for var in given)
    found: list[tuple[JaxprEqn, Step, str]] = [
        (barrier, Strategy(assignment=(), operands=kept, results=kept), phase)
    ]
    names: dict[Var, Atom] = {
        var: atom if isinstance(atom, Literal) else fresh.get(atom, atom)
        for var, atom in zip(body.invars, eqn.invars, strict=True)
    }
    for inner, strategy in zip(body.eqns, plan.strategies, strict=True):
        stack = eqn.source_info.name_stack + inner.source_info.name_stack
        made = {var: var if is_drop(var) else Var(var.aval) for var in inner.outvars}
        invars = [a if isinstance(a, Literal) else names[a] for a in inner.invars]
        named = inner.replace(source_info=with_outer_name_stack(inner, stack))
        found.append((named.replace(invars=invars, outvars=[*made.values()]), strategy, phase))
        names.update(made)
    for var, atom, spec in zip(eqn.outvars, body.outvars, step.results, strict=True):
        if not is_drop(var):
            source = atom if isinstance(atom, Literal) else names[atom]
            strategy = Strategy(assignment=(), operands=(spec,), results=(spec,))
            found.append((read_once(source, var, eqn), strategy, phase))
    return found


def _held(eqn: JaxprEqn) -> bool:
    """Return whether a region must not be merged with the first run, and can be inlined."""
    prevented = eqn.params.get("prevent_cse", True)
    held = any(prevented) if isinstance(prevented, (tuple, list)) else bool(prevented)
    return held and not consts(bodies(eqn)[0])


def _is_light(eqn: JaxprEqn) -> bool:
    """Return whether an equation only rearranges, repeats or converts one value, without making
    it smaller."""
    if is_region(eqn) or is_barrier(eqn) or eqn.effects or len(eqn.outvars) != 1:
        return False
    read = [atom for atom in eqn.invars if isinstance(atom, Var)]
    operator = operator_of(eqn)
    light = not flops(eqn) and kernel_kind(eqn) == "elementwise" and not operator.heavy
    grows = tensor_bytes(eqn.outvars[0]) >= sum(map(tensor_bytes, read))
    return light and len(read) <= 1 and grows


def _natural(eqn: JaxprEqn, step: Step, result: int) -> ShardingSpec | None:
    """Return the spec a result is made in before its sums are completed; None if it is not known,
    or reduced otherwise."""
    if isinstance(step, Strategy):
        rule = sharding_rule(eqn)
        natural, others = (None, {}) if rule is None else natural_result(rule, step, result)
        return None if others else natural
    if is_scan(eqn):
        num_consts, num_carry, _ = scan_counts(eqn)
        if result < num_carry:
            return step.operands[num_consts + result]
        return stacked(step.bodies[0].outputs[result])
    return None

"""What is gathered for the forward pass is gathered again for the backward pass.

A plan that keeps a parameter in pieces (FSDP; ZeRO stage 3, Rajbhandari et al. 2020) or an
activation (sequence parallelism; Korthikanti et al. 2022) pays for gathering it in each pass, and
holds it whole only there. Where one program runs both passes, a gather for both is one expression:
computed once, the whole value would be held in between. So what follows the forward pass reads such
values from behind a barrier, which also waits for the forward pass. Not on host devices, where XLA
drops barriers and merges the gathers again, nor where all together are a small share of the stage's
memory: a barrier is in the way of XLA's scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax import lax

from alpa_interchange import LogicalMesh, ShardingSpec, Strategy
from alpa_meta.compat import Atom, JaxprEqn, Literal, Var, is_drop, is_plain
from alpa_meta.inter_op.layering import tensor_bytes
from alpa_meta.passes.added_equations import equations_of
from alpa_meta.spmd import JaxprPlan

WORTH = 0.05
"""Of a stage's memory, what values gathered for both passes must take for a barrier."""


def with_second_gathers(
    eqns: Sequence[JaxprEqn],
    plan: JaxprPlan,
    invars: Sequence[Atom],
    phases: Sequence[str],
    mesh: LogicalMesh,
    least: float = 0.0,
) -> tuple[tuple[JaxprEqn, ...], JaxprPlan]:
    """Return the equations of a task and their plan, with a barrier where the forward pass ends.

    `phases` are those of the equations; without a barrier, what is gathered for both passes would
    have to take `least` bytes per device.
    """
    specs = dict(zip(invars, plan.inputs, strict=True))
    gathered: set[tuple[Var, ShardingSpec]] = set()
    again: dict[Var, float] = {}  # bytes per device
    last, position = None, len(eqns)
    for k, (eqn, step, phase) in enumerate(zip(eqns, plan.strategies, phases, strict=True)):
        for atom, spec in zip(eqn.invars, step.operands, strict=True):
            if isinstance(atom, Literal) or atom not in specs or not _gathers(specs[atom], spec):
                continue
            if phase == "forward":
                gathered.add((atom, spec))
            elif (atom, spec) in gathered:
                axes = tuple(axis for dim in spec.dims for axis in dim)
                again[atom] = tensor_bytes(atom) / mesh.size(axes)
                position = min(position, k)
        if position == len(eqns):
            for var, spec in zip(eqn.outvars, step.results, strict=True):
                if not is_drop(var) and is_plain(var):
                    specs[var] = spec
                    last = var if phase == "forward" else last
    if not again or last is None or sum(again.values()) < least:
        return tuple(eqns), plan
    held = list(dict.fromkeys([last, *again]))
    fresh = [Var(var.aval) for var in held]
    added = equations_of(lambda *values: lax.optimization_barrier(values), held, fresh)
    kept = tuple(specs[var] for var in held)
    renamed = dict(zip(held, fresh, strict=True))
    rest = [
        eqn if phase == "forward" else _reading(eqn, renamed)
        for eqn, phase in zip(eqns[position:], phases[position:], strict=True)
    ]
    barrier = Strategy(assignment=(), operands=kept, results=kept)
    strategies = (*plan.strategies[:position], barrier, *plan.strategies[position:])
    return (*eqns[:position], *added, *rest), JaxprPlan(plan.inputs, strategies, plan.outputs)


def _gathers(held: ShardingSpec, wanted: ShardingSpec) -> bool:
    """Return whether some dim is wanted along fewer axes than it is held along."""
    pairs = zip(held.dims, wanted.dims, strict=True)
    return any(axis not in more for less, more in pairs for axis in less)


def _reading(eqn: JaxprEqn, renamed: dict[Var, Var]) -> JaxprEqn:
    """Return an equation that reads the renamed values."""
    atoms = [atom if isinstance(atom, Literal) else renamed.get(atom, atom) for atom in eqn.invars]
    read: JaxprEqn = eqn.replace(invars=atoms)
    return read

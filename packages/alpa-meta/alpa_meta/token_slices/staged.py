"""Which token slice each equation of a staged program belongs to."""

from __future__ import annotations

from alpa_meta.compat import JaxprEqn, Literal, Var, is_drop
from alpa_meta.inter_op.layering import Layering
from alpa_meta.inter_op.staging import Staging
from alpa_meta.step.program import Program


def slice_number(program: Program, eqn: JaxprEqn) -> int | None:
    """Return the slice that an equation of a program is said to be of; None of what was added."""
    made = (program.origin.get(var, var) for var in eqn.outvars if not is_drop(var))
    return next((program.slice_of[var] for var in made if var in program.slice_of), None)


def slice_numbers(program: Program, staging: Staging | Layering) -> tuple[int, ...]:
    """Return the slice of each equation; 0 in the update, and where sequences are not cut.

    What was added to the slices' own equations (cuts of the batch, copies of constants in the stage
    that reads them) is of the first slice, in the order of its sweep, that reads it, and of none
    before those that it reads.
    """
    if program.slices is None:
        return (0,) * len(staging.eqns)
    last = program.slices.count - 1
    sweeps = [{"forward": 1, "backward": -1}.get(phase, 0) for phase in staging.phases]
    found: list[int | None] = []
    for eqn, sweep in zip(staging.eqns, sweeps, strict=True):
        found.append(slice_number(program, eqn) if sweep else 0)
    first_reader: dict[tuple[Var, int], int] = {}
    for k in range(len(found) - 1, -1, -1):
        eqn, sweep = staging.eqns[k], sweeps[k]
        if found[k] is None:
            readers = [first_reader[v, sweep] for v in eqn.outvars if (v, sweep) in first_reader]
            found[k] = sweep * min(readers) if readers else None
        place = found[k]
        for atom in eqn.invars if place is not None else ():
            if not isinstance(atom, Literal):
                assert place is not None
                known = first_reader.get((atom, sweep), sweep * place)
                first_reader[atom, sweep] = min(known, sweep * place)
    latest: dict[tuple[Var, int], int] = {}
    numbers = []
    for eqn, sweep, place in zip(staging.eqns, sweeps, found, strict=True):
        read = [
            latest[a, sweep]
            for a in eqn.invars
            if not isinstance(a, Literal) and (a, sweep) in latest
        ]
        start = 0 if sweep >= 0 else -last
        order = max([start if place is None else sweep * place, *read])
        latest.update(((var, sweep), order) for var in eqn.outvars if not is_drop(var))
        numbers.append(abs(order))
    return tuple(numbers)

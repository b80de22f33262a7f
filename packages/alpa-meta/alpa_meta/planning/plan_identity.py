"""Whether a saved plan belongs to a program: hashes, and a readable diff where it does not."""

from __future__ import annotations

import functools
import hashlib

from alpa_interchange import (
    ParallelPlan,
)
from alpa_meta.errors import PlanError
from alpa_meta.intra_op.selection import Selection
from alpa_meta.step.program import Program


def check_choice(selection: Selection, choice: tuple[int, ...] | None, stage: int) -> None:
    """Raise PlanError unless `choice` names a strategy for every node of the stage's problem."""
    counts = selection.problem.num_strategies
    held = -1 if choice is None else len(choice)
    if held != len(counts):
        raise PlanError(
            f"the choice of stage {stage} of the plan must name a strategy for each of "
            f"{len(counts)} nodes, but names {max(held, 0)}; the plan is damaged, plan again"
        )
    for node, (number, count) in enumerate(zip(choice or (), counts, strict=True)):
        if not 0 <= number < count:
            raise PlanError(
                f"the choice of stage {stage} of the plan names strategy {number} for node {node}, "
                f"which has {count}; the plan is damaged, plan again"
            )


def check_program(plan: ParallelPlan, program: Program) -> None:
    """Raise PlanError with a readable diff unless `plan` was made for `program`."""
    ours = {path: (shape, dtype) for path, shape, dtype in program.signature()}
    theirs = {item.path: (item.shape, item.dtype) for item in plan.program.inputs}
    lines = []
    for path in sorted(set(ours) | set(theirs)):
        here, there = ours.get(path), theirs.get(path)
        if here != there:
            lines.append(f"  {path}: plan {_typed(there)}, program {_typed(here)}")
    if lines:
        more = f"\n  ... and {len(lines) - 12} more" if len(lines) > 12 else ""
        raise PlanError(
            "the plan was made for another program; inputs differ:\n"
            + "\n".join(lines[:12])
            + more
            + "\nplan this program, or load the plan that was made for it"
        )
    if plan.program.fingerprint != fingerprint(program):
        raise PlanError(
            "the plan was made for another program: the inputs agree, but the operations differ "
            f"({plan.program.num_ops} in the plan, {len(program.jaxpr.eqns)} in the program); "
            "plan this program again"
        )


def _typed(value: tuple[tuple[int, ...], str] | None) -> str:
    if value is None:
        return "has none"
    shape, dtype = value
    return f"{dtype}[{','.join(map(str, shape))}]"


def fingerprint(program: Program) -> str:
    """Return a hash of the program's operations and types."""
    digest = hashlib.sha256()
    text = functools.cache(str)
    for eqn in program.jaxpr.eqns:
        types = [text(getattr(atom, "aval", atom)) for atom in (*eqn.invars, *eqn.outvars)]
        digest.update(f"{eqn.primitive.name} {types}\n".encode())
    return digest.hexdigest()


def problem_hash(selection: Selection) -> str:
    """Return a hash of a selection problem's nodes and strategies."""
    digest = hashlib.sha256()
    for name, strategies in zip(
        selection.problem.node_names, selection.problem.strategy_names, strict=True
    ):
        digest.update(f"{name}: {' | '.join(strategies)}\n".encode())
    return digest.hexdigest()

"""Whether a saved plan belongs to a program: hashes, and a readable diff where it does not."""

from __future__ import annotations

import hashlib
from pathlib import Path

from alpa_interchange import ParallelPlan
from alpa_meta.errors import OtherProgramError, PlanError
from alpa_meta.intra_op.selection import Selection
from alpa_meta.planning.program_hash import program_hash
from alpa_meta.program_caches import cached_by_program
from alpa_meta.step.program import Program, Step


def check_program(plan: ParallelPlan, program: Program, step: Step) -> None:
    """Raise PlanError with a readable diff unless `plan` was made for `program`, made of `step`."""
    if not all(sharding.operators for sharding in plan.shardings):
        raise PlanError(
            "the plan names strategies by number only, as plans of schema 0.1 do, and numbers mean "
            "nothing to another version; plan again, or run it with the version that wrote it"
        )
    ours = {path: (shape, dtype) for path, shape, dtype in program.signature()}
    theirs = {item.path: (item.shape, item.dtype) for item in plan.program.inputs}
    lines = []
    for path in sorted(set(ours) | set(theirs)):
        here, there = ours.get(path), theirs.get(path)
        if here != there:
            lines.append(f"  {path}: plan {_typed(there)}, program {_typed(here)}")
    if lines:
        more = f"\n  ... and {len(lines) - 12} more" if len(lines) > 12 else ""
        raise OtherProgramError(
            "the plan was made for another program; inputs differ:\n"
            + "\n".join(lines[:12])
            + more
            + "\nplan this program, or load the plan that was made for it"
        )
    if plan.program.fingerprint != fingerprint(step):
        raise OtherProgramError(
            "the plan was made for another program: the inputs agree, but the operations differ "
            f"({plan.program.num_ops} in the plan, {len(program.jaxpr.eqns)} in the program); "
            "plan this program again"
        )


def _typed(value: tuple[tuple[int, ...], str] | None) -> str:
    if value is None:
        return "has none"
    shape, dtype = value
    return f"{dtype}[{','.join(map(str, shape))}]"


@cached_by_program(4)  # asked for by the plan and by its menu
def fingerprint(step: Step) -> str:
    """Return a hash of the operations of a step as they were traced, for the whole batch.

    Passes of this version have not touched them yet; what constants hold does not count.
    """
    return program_hash(step.traced(step.batch_size)[0], values=False)


def problem_hash(selection: Selection) -> str:
    """Return what equal stages of one plan share: a hash of nodes and strategies."""
    digest = hashlib.sha256()
    for name, strategies in zip(
        selection.problem.node_names, selection.problem.strategy_names, strict=True
    ):
        digest.update(f"{name}: {' | '.join(strategies)}\n".encode())
    return digest.hexdigest()


def files_hash(folder: Path, pattern: str) -> str:
    """Return a hash of the names and contents of files; empty folders and absent ones are equal."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob(pattern)):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(folder)} {content}\n".encode())
    return digest.hexdigest()

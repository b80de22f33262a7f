"""The order of updates in a program of the whole step that hosts run: the last array's first.

XLA orders what only results wait for by counts of users along all paths that lead to it, which it
cuts off at the number of instructions (`DFSMemoryScheduler`). In large programs all counts of
gradients are cut off, and names decide, which fusion gives away from the end of the program on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from alpa_meta.intra_op.held_values import Value

__all__ = ["copied_by", "update_last_first"]


def update_last_first(values: Sequence[Value]) -> bool:
    """Let the updates of a stage run in the reverse order; return whether they do.

    What the update of an array computes is of one time. Where updates wait for one another, as for
    a norm of all gradients, or where the program is small, they run in the order that they have.
    """
    updates = [value for value in values if value.phase == 2]
    gradients = [
        (operand, value) for value in updates for operand in value.operands if operand.phase == 1
    ]
    late = [operand.paths for operand, _ in gradients if operand.late]
    if 2 * len(late) <= len(gradients) or median(late) <= len(values):
        return False
    began = min(value.born for _, value in gradients)
    updates = [value for value in updates if value.born >= began]
    now = max(value.born for value in updates)
    if any(
        began <= operand.born < value.born
        for value in updates
        for operand in value.operands
        if operand.phase == 2 and operand.source.shape
    ):
        return False
    moved = set(updates)
    for value in values:
        for read in value.reads:
            if read.put_off in moved and read.phase == 2:
                read.stop += began + now - 2 * read.put_off.born
    for value in updates:
        value.born = began + now - value.born
    return True


def copied_by(values: Sequence[Value], copies: Mapping[Value, int]) -> dict[Value, int]:
    """Return when each of the copies of arrays, by when an equation first reads them, was surely
    made: those of which the first readers do not wait for one another are made in any order."""
    depth: dict[Value, int] = {}
    for value in values:
        depth[value] = 1 + max((depth[one] for one in value.operands), default=0)
    reader = {value: _first_reader(value) for value in copies}
    of = {value: 0 if one is None else depth[one] for value, one in reader.items()}
    last: dict[int, int] = {}
    for value, made in copies.items():
        last[of[value]] = max(last.get(of[value], 0), made)
    return {value: last[of[value]] for value in copies}


def _first_reader(value: Value) -> Value | None:
    """Return the first value that is computed from another, by any name."""
    for read in value.reads:
        for one in (read.put_off, *read.results):
            found = _first_reader(one) if one is not None and one.form == "alias" else one
            if found is not None:
                return found
    return None

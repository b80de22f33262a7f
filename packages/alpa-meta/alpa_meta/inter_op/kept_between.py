"""What layers hold from the program of one token slice to that of another, beyond activations.

A stage runs a program for each pass of each slice. What a later one reads is held by all layers of
the stage at once: keys and values that recomputation makes once more, for all slices that look back
on them, and their gradients, which add up until their own slice is reached. Activations are there
of the slices between whose two passes it is. With a value v of layer l made by program m(v) and
last read by program r(v) > m(v), a layer holds beyond its activations, which rows have,

    max over t of sum of bytes(v) over m(v) <= t <= r(v), less the activations of all slices

-> Between.beyond(). Gradients of weights are sums over the slices, of which each program reads one
and makes the next. With one microbatch the last is the gradient itself, which rows have too.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import cast

import numpy as np
from attrs import frozen

from alpa_meta.compat import Var
from alpa_meta.inter_op.held_bytes import HeldBytes
from alpa_meta.inter_op.scope_facts import ScopeFacts, redone_of
from alpa_meta.intra_op.liveness import PHASES
from alpa_meta.intra_op.selection import Selection
from alpa_meta.operators import operator_of
from alpa_meta.types import Floats, Ints

_UPDATE = PHASES.index("update")
ACTIVATION, KEPT, SUMMED, GRADIENT = range(4)


@frozen(eq=False)
class Between:
    """Values that layers hold from one program to another, and activations.

    `begins`, `ends` [values]: positions of the first equation of the program that makes each, and
    of the last one of that which reads it last: the memory of all results and operands is there
    while a program runs. `kinds` [values]: `ACTIVATION`, `KEPT`, `SUMMED` over some slices, or
    `GRADIENT`, over all. `programs` [equations]: the number of the program of each, in their order.
    `alone` [sizes]: whether there is one microbatch.
    """

    held: HeldBytes
    begins: Ints
    ends: Ints
    kinds: Ints
    programs: Ints
    alone: tuple[bool, ...]

    def beyond(self, choice: Sequence[int], size: int, num_layers: int) -> Floats:
        """Return [layers] the most bytes held beyond the activations of all slices."""
        layers, bytes = self.held.layers, self.held.under(choice, size)
        changes = np.zeros((num_layers, int(self.programs.max(initial=0)) + 2))
        np.add.at(changes, (layers, self.programs[self.begins]), bytes)
        np.add.at(changes, (layers, self.programs[self.ends] + 1), -bytes)
        own = np.bincount(layers, bytes * (self.kinds == ACTIVATION), num_layers)
        if self.alone[size]:
            own += np.bincount(layers, bytes * (self.kinds == GRADIENT), num_layers)
        most: Floats = np.maximum(changes.cumsum(axis=1).max(axis=1) - own, 0.0)
        return most

    def alive(self, choice: Sequence[int], size: int) -> Floats:
        """Return [equations] the bytes of these values that are temporaries while each runs."""
        others = (ACTIVATION, GRADIENT) if self.alone[size] else (ACTIVATION,)
        bytes = self.held.under(choice, size) * ~np.isin(self.kinds, others)
        count = len(self.programs) + 1
        changes = np.bincount(self.begins, bytes, count)
        changes -= np.bincount(self.ends + 1, bytes, count)
        alive: Floats = changes.cumsum()[:-1]
        return alive


def between_of(selection: Selection, sizes: Sequence[ScopeFacts], kind: str) -> Between | None:
    """Return what layers hold between programs where they recompute as `kind` says, None where
    they do not run slice by slice; `sizes` are the facts at every size, those of `selection`
    first."""
    facts = sizes[0]
    eqns, tasks = facts.scope.eqns.eqns, facts.scope.eqns.tasks
    if not tasks:
        return None
    number_of = {task: number for number, task in enumerate(dict.fromkeys(tasks))}
    programs = np.array([number_of[task] for task in tasks], dtype=np.int64)
    starts = np.searchsorted(programs, np.arange(len(number_of)))
    stops = np.append(starts[1:], len(tasks)) - 1
    readers: dict[Var, int] = {}
    for k in np.flatnonzero(facts.phases != _UPDATE).tolist():
        readers.update((atom, k) for atom in eqns[k].invars if isinstance(atom, Var))
    redone = None if kind == "none" else redone_of(facts, kind)
    kept = frozenset(() if redone is None else redone.kept)
    summed = _summed(facts)
    found: list[tuple[tuple[int, int], int, int, int]] = []
    for var, end in readers.items():
        if var not in facts.scope.eqns.defined:
            continue
        k = facts.scope.eqns.defined[var]
        place = k, eqns[k].outvars.index(var)
        residual = var in facts.scope.residuals if redone is None else place in kept
        if residual:
            found.append((place, k, _freed(tasks, k, end), ACTIVATION))
        elif redone is not None and facts.phases[k] == 0 and facts.phases[end] != 0:
            continue  # made again
        elif programs[k] != programs[end]:
            found.append((place, k, end, SUMMED if var in summed else KEPT))
    if redone is not None:
        for place, (begin, end) in zip(redone.made_again, redone.lifetimes.tolist(), strict=True):
            if programs[begin] != programs[end]:
                found.append((place, begin, end, KEPT))
    for var in facts.scope.eqns.accumulated:
        k = facts.scope.eqns.defined[var]
        found.append(((k, eqns[k].outvars.index(var)), k, k, GRADIENT))
    held = HeldBytes.of(selection, [one.held_at([place for place, *_ in found]) for one in sizes])
    begins, ends, kinds = np.array([one[1:] for one in found], dtype=np.int64).reshape(-1, 3).T
    alone = tuple(one.scope.eqns.num_microbatches == 1 for one in sizes)
    return Between(held, starts[programs[begins]], stops[programs[ends]], kinds, programs, alone)


def _freed(tasks: Sequence[Hashable], k: int, end: int) -> int:
    """Return the position of the last equation of the backward pass of the slice that makes an
    activation, or of what reads it later: recomputation reads it there."""
    phase, place, _ = cast(tuple[int, int, bool], tasks[k])
    backward = [n for n, task in enumerate(tasks) if task == (1, -place, False)]
    return max([end, *backward[-1:]])


def _summed(facts: ScopeFacts) -> frozenset[Var]:
    """Return the sums over some of the slices that gradients are made of."""
    scope = facts.scope.eqns
    found: set[Var] = set()
    pending = list(scope.accumulated)
    while pending:
        at = scope.defined.get(pending.pop())
        if at is not None and operator_of(scope.eqns[at]).passes_sums(scope.eqns[at]):
            operands = [a for a in scope.eqns[at].invars if isinstance(a, Var) and a not in found]
            found.update(operands)
            pending += operands
    return frozenset(found)

"""From layers to stages: every equation gets the stage that runs it.

A stage is a range of layers. What remains to be settled is the update: sums of gradients that come
from several stages (tied weights) move out of the backward pass, so that each stage accumulates its
own part; scalars that depend on several stages (a global norm) are computed on stage 0; scalars
that depend on none (a learning-rate schedule) are computed by every stage that reads them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from attrs import frozen

from alpa_meta.compat import Atom, JaxprEqn, Literal, Var, is_drop
from alpa_meta.inter_op.layering import Layering, clone_into_readers
from alpa_meta.operators import operator_of

HUB = 0  # the stage that computes scalars of several stages


@frozen(eq=False)
class Staging:
    """Equations with phase and stage; `levels` order the update: a level reads what lower ones
    sent.

    Stage s runs on mesh s mod `num_meshes` (None: each on its own). `by_weight` are the positions
    of backward equations that run in a task of their own (None: the backward is one task; see
    `split_backward`). `forward_only`: there is no backward pass, the step is evaluated.
    """

    eqns: tuple[JaxprEqn, ...]
    phases: tuple[str, ...]
    stages: tuple[int, ...]
    layers: tuple[int | None, ...]
    levels: tuple[int, ...]
    num_stages: int
    by_weight: frozenset[int] | None = None
    num_meshes: int | None = None
    forward_only: bool = False

    def mesh_of(self, stage: int) -> int:
        """Return the mesh that runs `stage`."""
        return stage if self.num_meshes is None else stage % self.num_meshes

    @functools.cached_property
    def positions(self) -> Mapping[int, list[int]]:
        """The positions of the equations of each stage, in order."""
        found: dict[int, list[int]] = {}
        for k, stage in enumerate(self.stages):
            found.setdefault(stage, []).append(k)
        return found

    @functools.cached_property
    def makers(self) -> Mapping[Var, int]:
        """The stage that makes each value."""
        pairs = zip(self.eqns, self.stages, strict=True)
        return {var: stage for eqn, stage in pairs for var in eqn.outvars if not is_drop(var)}

    @functools.cached_property
    def made_forward(self) -> frozenset[Var]:
        """The values that forward passes make."""
        pairs = zip(self.eqns, self.phases, strict=True)
        return frozenset(var for eqn, phase in pairs if phase == "forward" for var in eqn.outvars)

    @functools.cached_property
    def readers(self) -> Mapping[Var, set[int]]:
        """The stages that read each value."""
        found: dict[Var, set[int]] = {}
        for eqn, stage in zip(self.eqns, self.stages, strict=True):
            for atom in eqn.invars:
                if not isinstance(atom, Literal):
                    found.setdefault(atom, set()).add(stage)
        return found


def assign_stages(layering: Layering, cuts: Sequence[int], outvars: Sequence[Atom]) -> Staging:
    """Return the staging of layers [0, cuts[0]), [cuts[0], cuts[1]), ... up to the last layer."""
    bounds = [*cuts, layering.num_layers]
    starts = zip([0, *cuts], bounds, strict=True)
    stage_of = [stage for stage, (start, stop) in enumerate(starts) for _ in range(start, stop)]
    eqns, layers = list(layering.eqns), list(layering.layers)
    stages = [None if layer is None else stage_of[layer] for layer in layers]
    phases = with_sunk_sums(eqns, layering.phases, stages)
    independent = _settle_scalars(eqns, stages)
    labels: list[tuple[int | None, str, int | None]] = [
        (stage, phase, layer) for stage, phase, layer in zip(stages, phases, layers, strict=True)
    ]
    reader_labels = [label[:2] for label in labels]
    copied, copied_labels = clone_into_readers(
        eqns, reader_labels, independent, outvars, (HUB, "update")
    )
    kept_layers = _layers_after_cloning(eqns, copied, layers)
    final_stages = [label[0] for label in copied_labels]  # type: ignore[index]
    final_phases = [label[1] for label in copied_labels]  # type: ignore[index]
    levels = _levels(copied, final_phases, final_stages)
    return Staging(
        tuple(copied),
        tuple(final_phases),
        tuple(final_stages),
        tuple(kept_layers),
        tuple(levels),
        len(bounds),
    )


def with_sunk_sums(
    eqns: Sequence[JaxprEqn], phases: Sequence[str], stages: Sequence[int | None]
) -> list[str]:
    """Return the phases of equations, those of additions of gradients from several stages, read by
    the update only, that of the update."""
    phases = list(phases)
    producer = {var: k for k, eqn in enumerate(eqns) for var in eqn.outvars if not is_drop(var)}
    inner_readers: dict[Var, int] = {}
    for eqn, phase in zip(eqns, phases, strict=True):
        if phase != "update":
            for atom in eqn.invars:
                if not isinstance(atom, Literal):
                    inner_readers[atom] = inner_readers.get(atom, 0) + 1
    for k in range(len(eqns) - 1, -1, -1):
        eqn = eqns[k]
        if phases[k] != "backward" or not _adds(eqn):
            continue
        operands = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
        homes = {stages[producer[atom]] for atom in operands if atom in producer}
        if len(homes) > 1 and not inner_readers.get(eqn.outvars[0]):
            phases[k] = "update"
            for atom in operands:
                inner_readers[atom] -= 1
    return phases


def _adds(eqn: JaxprEqn) -> bool:
    """Return whether an equation is linear in two operands together, as a sum is."""
    return operator_of(eqn).linear_groups(eqn) == ((0, 1),)


def _settle_scalars(eqns: Sequence[JaxprEqn], stages: list[int | None]) -> set[int]:
    """Give equations without a stage one where they need it; return those that depend on no
    stage."""
    origins: dict[Var, frozenset[int]] = {}
    independent = set()
    for k, eqn in enumerate(eqns):
        stage = stages[k]
        if stage is None:
            found: set[int] = set()
            for atom in eqn.invars:
                if not isinstance(atom, Literal):
                    found |= origins.get(atom, frozenset())
            if not found and not eqn.effects:
                independent.add(k)
                continue
            stages[k] = found.pop() if len(found) == 1 else HUB
        origin = frozenset({stages[k]}) if stages[k] is not None else frozenset()
        for var in eqn.outvars:
            if not is_drop(var):
                origins[var] = origin  # type: ignore[assignment]
    return independent


def _layers_after_cloning(
    before: Sequence[JaxprEqn], after: Sequence[JaxprEqn], layers: Sequence[int | None]
) -> list[int | None]:
    by_output = {
        eqn.outvars[0]: layer for eqn, layer in zip(before, layers, strict=True) if eqn.outvars
    }
    return [by_output.get(eqn.outvars[0]) if eqn.outvars else None for eqn in after]


def _levels(eqns: Sequence[JaxprEqn], phases: Sequence[str], stages: Sequence[int]) -> list[int]:
    """Return the level of each update equation: one more whenever a value comes from another
    stage."""
    known: dict[Var, tuple[int, int]] = {}
    levels = []
    for eqn, phase, stage in zip(eqns, phases, stages, strict=True):
        level = 0
        if phase == "update":
            for atom in eqn.invars:
                if not isinstance(atom, Literal) and atom in known:
                    produced, home = known[atom]
                    level = max(level, produced + (home != stage))
            known.update((var, (level, stage)) for var in eqn.outvars if not is_drop(var))
        levels.append(level)
    return levels

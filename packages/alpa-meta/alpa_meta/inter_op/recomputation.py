"""Recomputation chosen per layer: forward equations cloned into the backward pass that reads them.

    full       the backward pass of a layer keeps what the layer was given, and redoes the rest
    selective  it also keeps the results that are dear to redo for their size

The layers of a scan are redone one by one, in the backward scan (`scan_recomputation`).

Clones read what the layer was given from behind an optimisation barrier, together with the last
cotangent that reaches the layer, as those of `jax.checkpoint` do: XLA can neither merge them with
the first run nor run them before the layer's turn. -> `layer_clones`

Dear are inner products, loops and kernels that do at least `DEAR` of the layer's mean operations
per byte of results. In a transformer those are the projections; the scores of attention are not,
whose inner products are as short as a head (Korthikanti et al. 2022, section 5), nor what is
elementwise.

Layers with recomputations of the user's own (`jax.checkpoint`) are left as they are, what other
layers keep is not redone, and effects happen once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from attrs import evolve

from alpa_meta.compat import JaxprEqn, Var
from alpa_meta.errors import PlanError
from alpa_meta.inter_op.layer_clones import LayerClones
from alpa_meta.inter_op.layering import Layering
from alpa_meta.inter_op.scan_recomputation import (
    layer_scans,
    own_recomputed,
    with_recomputed_scan,
)
from alpa_meta.inter_op.stacks import stacks_of
from alpa_meta.options import Recomputation
from alpa_meta.step.program import Program
from alpa_meta.token_slices.staged import slice_numbers


def chosen_recomputation(given: Recomputation, num_layers: int) -> dict[int, str]:
    """Return what each layer computes again; PlanError if `given` names other layers."""
    if given is None or isinstance(given, str):
        return dict.fromkeys(range(num_layers), given or "none")
    named = dict(given) if isinstance(given, Mapping) else dict(enumerate(given))
    if isinstance(given, Mapping) and max(named, default=0) >= num_layers:
        raise PlanError(
            f"recompute names layer {max(named)}, but the forward pass of the step is cut into "
            f"{num_layers} layers, numbered from 0; name those, or set num_layers"
        )
    if not isinstance(given, Mapping) and len(named) != num_layers:
        raise PlanError(
            f"recompute names {len(named)} layers, but the forward pass of the step is cut into "
            f"{num_layers}; name as many, or set num_layers={len(named)}"
        )
    return {layer: named.get(layer, "none") for layer in range(num_layers)}


def recomputed(layering: Layering, choice: Mapping[int, str], program: Program) -> Layering:
    """Return the layering of `program` whose layers redo in their backward pass what `choice` says.

    `choice[layer]` is one of `RECOMPUTATIONS`; a layer that is absent redoes nothing.
    """
    present = set(layering.layers)  # a short program has not all of them
    chosen = {
        layer: kind for layer, kind in sorted(choice.items()) if kind != "none" and layer in present
    }
    if not chosen:
        return layering
    results = frozenset(atom for atom in program.jaxpr.outvars if isinstance(atom, Var))
    stacked = frozenset(var for stack in stacks_of(program) for var in stack.members)
    in_scans: set[Var] = set()
    for layer, kind in chosen.items():
        for scan in layer_scans(layering, layer, stacked):
            layering = with_recomputed_scan(layering, scan, layer, kind == "selective", results)
        for scan in layer_scans(layering, layer, stacked):
            in_scans.update(scan.outvars)
    numbers = slice_numbers(program, layering) if program.slices is not None else None
    again = _clones(layering, chosen, in_scans, numbers)
    eqns: list[JaxprEqn] = []
    phases: list[str] = []
    layers: list[int | None] = []
    places = zip(layering.eqns, layering.phases, layering.layers, strict=True)
    for eqn, phase, home in places:
        found = [eqn]
        if phase == "backward" and home in again:
            found = [*again[home].before(eqn), again[home].reading(eqn)]
        eqns += found
        phases += [phase] * len(found)
        layers += [home] * len(found)
    return evolve(
        layering,
        eqns=tuple(eqns),
        phases=tuple(phases),
        layers=tuple(layers),
        recomputation=tuple(choice.get(layer, "none") for layer in range(layering.num_layers)),
    )


def clones_of_layers(
    eqns: Sequence[JaxprEqn], phases: Sequence[str], layers: Sequence[int | None], kind: str
) -> dict[int, LayerClones]:
    """Return what each layer's backward pass would run again if all of them were of one `kind`."""
    present = sorted({layer for layer in layers if layer is not None})
    layering = Layering(tuple(eqns), tuple(phases), tuple(layers), len(present), (), ())
    return _clones(layering, dict.fromkeys(present, kind), frozenset())


_NONE: frozenset[int | None] = frozenset()


def _clones(
    layering: Layering,
    chosen: Mapping[int, str],
    kept: Collection[Var],
    numbers: Sequence[int] | None = None,
) -> dict[int, LayerClones]:
    again: dict[int, LayerClones] = {}
    held = _read_by(layering)
    for layer in sorted(chosen, reverse=True):  # a layer keeps what those behind it were given
        made = (var for eqn in layering.of("forward", layer) for var in eqn.outvars)
        spared = {*kept, *(var for var in made if held.get(var, _NONE) - {layer})}
        spared |= own_recomputed(layering, layer)
        selective = chosen[layer] == "selective"
        again[layer] = LayerClones(layering, layer, selective, spared, numbers=numbers)
        for var in again[layer].given:
            held.setdefault(var, set()).add(layer)
    return again


def _read_by(layering: Layering) -> dict[Var, set[int | None]]:
    """Return the layers whose backward pass reads each value."""
    readers: dict[Var, set[int | None]] = {}
    for eqn, phase, layer in zip(layering.eqns, layering.phases, layering.layers, strict=True):
        if phase == "backward":
            for atom in eqn.invars:
                if isinstance(atom, Var):
                    readers.setdefault(atom, set()).add(layer)
    return readers

"""Which layer every equation of a step belongs to: forward by clustering, the rest by data flow.

    forward   consecutive clusters of equal work and small boundaries (stage_dp.cluster_layers)
    backward  the highest layer that is not above its cotangent's and that already has the forward
              values it reads: cotangents flow down the layers
    update    the layer of its largest operand: the optimiser follows its parameters

Values that depend on no input (masks, zeros, iota) are cloned into every layer that reads them. Scalar
equations of the update that depend on no layer, or on several, have no layer (None).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from attrs import frozen

from alpa_meta.compat import Literal, Var, is_drop, subjaxprs
from alpa_meta.program import Program


@frozen(eq=False)
class Layering:
    """Equations in program order with their phase and layer, constants cloned where they are read.

    `input_layers[k]` are the layers whose forward or backward pass reads input k.
    """

    eqns: tuple[Any, ...]
    phases: tuple[str, ...]
    layers: tuple[int | None, ...]
    num_layers: int
    input_layers: tuple[frozenset[int], ...]


def tensor_bytes(atom: Any) -> float:
    """Return the bytes of an array value; 8 for extended dtypes such as keys."""
    aval = atom.aval
    return float(math.prod(getattr(aval, "shape", ())) * getattr(aval.dtype, "itemsize", 8))


def assign_layers(
    program: Program, cluster: Callable[[Sequence[Any], Sequence[Any]], Sequence[int]]
) -> Layering:
    """Return the layering of `program`.

    `cluster(forward_eqns, inputs)` gives the layer of each forward equation, non-decreasing.
    """
    jaxpr = program.jaxpr
    eqns, phases = list(jaxpr.eqns), list(program.phases.of_eqn)
    floating = _floating(eqns)
    forward = [
        k for k, phase in enumerate(phases) if phase == "forward" and k not in floating
    ]
    clustered = cluster([eqns[k] for k in forward], jaxpr.invars) if forward else []
    layers: list[int | None] = [None] * len(eqns)
    for k, layer in zip(forward, clustered, strict=True):
        layers[k] = int(layer)
    num_layers = max((int(layer) for layer in clustered), default=0) + 1
    held = _backward_layers(eqns, phases, layers, floating, num_layers, jaxpr.invars)
    _update_layers(eqns, phases, layers, floating, held, jaxpr)
    eqns, phases, layers = _clone_floating(eqns, phases, layers, floating, jaxpr.outvars)
    inputs = set(jaxpr.invars)
    readers: dict[Any, set[int]] = {var: set() for var in inputs}
    for eqn, phase, layer in zip(eqns, phases, layers, strict=True):
        if phase != "update" and layer is not None:
            for atom in eqn.invars:
                if not isinstance(atom, Literal) and atom in inputs:
                    readers[atom].add(layer)
    return Layering(
        tuple(eqns),
        tuple(phases),
        tuple(layers),
        num_layers,
        tuple(frozenset(readers[var]) for var in jaxpr.invars),
    )


def _floating(eqns: Sequence[Any]) -> set[int]:
    """Return the equations that depend on no input and contain no region."""
    free: set[Any] = set()
    found = set()
    for k, eqn in enumerate(eqns):
        if eqn.effects or subjaxprs(eqn):
            continue
        if all(isinstance(atom, Literal) or atom in free for atom in eqn.invars):
            found.add(k)
            free.update(eqn.outvars)
    return found


def _backward_layers(
    eqns: Sequence[Any],
    phases: Sequence[str],
    layers: list[int | None],
    floating: set[int],
    num_layers: int,
    inputs: Sequence[Any],
) -> dict[Any, int]:
    """Assign layers to backward equations; return the layer of every value computed so far."""
    home: dict[Any, int] = {}
    available: dict[Any, set[int]] = {}
    input_set = set(inputs)
    for eqn, phase, layer in zip(eqns, phases, layers, strict=True):
        if phase != "forward" or layer is None:
            continue
        for atom in eqn.invars:
            if not isinstance(atom, Literal) and (atom in home or atom in input_set):
                available.setdefault(atom, set()).add(layer)
        for var in eqn.outvars:
            if not is_drop(var):
                home[var] = layer
                available[var] = {layer}
    cotangents: set[Any] = set()
    for k, (eqn, phase) in enumerate(zip(eqns, phases, strict=True)):
        if phase != "backward" or k in floating:
            continue
        read = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
        ceiling = min((home[a] for a in read if a in cotangents), default=num_layers - 1)
        candidates = set(range(ceiling + 1))
        residuals = [a for a in read if a not in cotangents and a in available]
        for atom in residuals:
            candidates &= available[atom]
        if candidates:
            layer = max(candidates)
        else:
            layer = max(
                range(ceiling + 1),
                key=lambda q: (sum(tensor_bytes(a) for a in residuals if q in available[a]), q),
            )
        layers[k] = layer
        for var in eqn.outvars:
            if not is_drop(var):
                home[var] = layer
                cotangents.add(var)
    for var in inputs:
        if available.get(var):
            home[var] = min(available[var])
    return home


def _update_layers(
    eqns: Sequence[Any],
    phases: Sequence[str],
    layers: list[int | None],
    floating: set[int],
    home: dict[Any, int],
    jaxpr: Any,
) -> None:
    """Assign layers to the tensor equations of the update, following parameters and gradients."""
    update = [k for k, phase in enumerate(phases) if phase == "update" and k not in floating]
    inputs = set(jaxpr.invars)

    def rank(atom: Any) -> int:
        return len(getattr(atom.aval, "shape", ()))

    changed = True
    while changed:
        changed = False
        for k in update:
            eqn = eqns[k]
            known = [
                atom
                for atom in eqn.invars
                if not isinstance(atom, Literal) and rank(atom) and atom in home
            ]
            tensors = [var for var in eqn.outvars if not is_drop(var)]
            if known:
                layer = home[max(known, key=tensor_bytes)]
            elif layers[k] is None and any(var in home and rank(var) for var in tensors):
                layer = home[next(var for var in tensors if var in home and rank(var))]
            else:
                continue
            if layers[k] != layer:
                layers[k] = layer
                changed = True
            for var in tensors:
                if rank(var) and home.get(var) != layer:
                    home[var] = layer
                    changed = True
            for atom in eqn.invars:
                if not isinstance(atom, Literal) and atom in inputs and atom not in home:
                    if rank(atom):
                        home[atom] = layer
                        changed = True


def _clone_floating(
    eqns: Sequence[Any],
    phases: Sequence[str],
    layers: Sequence[int | None],
    floating: set[int],
    outvars: Sequence[Any],
) -> tuple[list[Any], list[str], list[int | None]]:
    """Return the equations with one clone of each input-free equation per (layer, phase) reading it."""
    producer = {var: k for k in floating for var in eqns[k].outvars}
    readers: dict[int, set[tuple[int | None, str]]] = {k: set() for k in floating}
    for atom in outvars:
        if not isinstance(atom, Literal) and atom in producer:
            readers[producer[atom]].add((None, "update"))
    for k in range(len(eqns) - 1, -1, -1):
        keys = readers[k] if k in floating else {(layers[k], phases[k])}
        for atom in eqns[k].invars:
            if not isinstance(atom, Literal) and atom in producer:
                readers[producer[atom]] |= keys
    clones: dict[tuple[Any, tuple[int | None, str]], Any] = {}
    result: tuple[list[Any], list[str], list[int | None]] = ([], [], [])

    def emit(eqn: Any, key: tuple[int | None, str], outputs: list[Any]) -> None:
        operands = [
            atom
            if isinstance(atom, Literal) or atom not in producer
            else clones[atom, key]
            for atom in eqn.invars
        ]
        result[0].append(eqn.replace(invars=operands, outvars=outputs))
        result[1].append(key[1])
        result[2].append(key[0])

    kept_names = {atom for atom in outvars if not isinstance(atom, Literal)}
    for k, eqn in enumerate(eqns):
        if k not in floating:
            emit(eqn, (layers[k], phases[k]), list(eqn.outvars))
            continue
        for key in sorted(readers[k], key=lambda pair: (pair[0] is None, pair[0] or 0, pair[1])):
            outputs = []
            for var in eqn.outvars:
                keep = key == (None, "update") and var in kept_names or is_drop(var)
                outputs.append(var if keep else Var(var.aval))
                clones[var, key] = outputs[-1]
            emit(eqn, key, outputs)
    return result

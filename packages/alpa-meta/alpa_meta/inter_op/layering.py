"""Which layer every equation of a step belongs to: forward by clustering, the rest by data flow.

    forward   consecutive clusters of equal work and small boundaries (stage_dp.cluster_layers)
    backward  the highest layer that is not above its cotangent's and that already has the forward
              values it reads: cotangents flow down the layers
    update    the layer of its largest operand: the optimiser follows its parameters

Values that depend on no input (masks, zeros, iota) are cloned into every layer and pass that reads
them. Parameters in another form (cast, transposed) are cloned into every layer that reads them: the
first would send a tied embedding's to the last with each microbatch. So is a shared read of the
backward pass, unless it is of a cotangent: the weights of all layers that attend to one memory
would have their gradients where that is read first.
Scalar equations of the update that depend on no layer, or on several, have no layer (None).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import cast

import jax.numpy as jnp
from attrs import frozen

from alpa_meta.compat import Atom, JaxprEqn, Literal, Var, dtype_of, is_drop, shape_of, subjaxprs
from alpa_meta.operators import is_heavy
from alpa_meta.passes.shared_reads import is_shared_read, read_once
from alpa_meta.step.program import Program

Place = tuple[int | None, str]
"""The layer and the phase of an equation."""


@frozen(eq=False)
class Layering:
    """Equations in program order with their phase and layer, constants cloned where they are read.

    `input_layers[k]` are the layers whose forward or backward pass reads input k. What each layer's
    backward pass computes again is one of `alpa_interchange.menu.RECOMPUTATIONS`.
    """

    eqns: tuple[JaxprEqn, ...]
    phases: tuple[str, ...]
    layers: tuple[int | None, ...]
    num_layers: int
    input_layers: tuple[frozenset[int], ...]
    recomputation: tuple[str, ...]

    @functools.cached_property
    def positions(self) -> Mapping[tuple[str, int | None], list[int]]:
        """The positions of the equations of each phase and layer, in order."""
        found: dict[tuple[str, int | None], list[int]] = {}
        for k, place in enumerate(zip(self.phases, self.layers, strict=True)):
            found.setdefault(place, []).append(k)
        return found

    @functools.cached_property
    def made_at(self) -> Mapping[Var, int]:
        """The position of the equation that makes each value that is no input."""
        return {
            var: k for k, eqn in enumerate(self.eqns) for var in eqn.outvars if not is_drop(var)
        }

    def of(self, phase: str, layer: int | None) -> list[JaxprEqn]:
        """Return the equations of a layer in one phase, in order."""
        return [self.eqns[k] for k in self.positions.get((phase, layer), ())]


def tensor_bytes(atom: Atom) -> float:
    """Return the bytes of an array value; 8 for extended dtypes such as keys."""
    aval = atom.aval  # asked of every value, often: without the steps of `shape_of`, `dtype_of`
    size = math.prod(getattr(aval, "shape", ()))
    return float(size * getattr(getattr(aval, "dtype", None), "itemsize", 8))


def _whole_bytes(program: Program, var: Var) -> float:
    """Return the bytes of a value of the whole batch, so that layers are the same at every size of
    microbatches."""
    placement = program.placements.get(var)
    parts = program.num_microbatches if placement is not None and placement.kind == "split" else 1
    return parts * tensor_bytes(var)


def clustered_positions(program: Program) -> list[int]:
    """Return the positions of the forward equations that are clustered into layers, in order."""
    return _clustered(program, _floating(program) | _formed(program))


def _clustered(program: Program, floating: Collection[int]) -> list[int]:
    return [
        k
        for k, phase in enumerate(program.phases.of_eqn)
        if phase == "forward" and k not in floating
    ]


def assign_layers(
    program: Program, cluster: Callable[[Sequence[JaxprEqn], Sequence[Var]], Sequence[int]]
) -> Layering:
    """Return the layering of `program`.

    `cluster(forward_eqns, inputs)` gives the layer of each equation at `clustered_positions`.
    """
    jaxpr = program.jaxpr
    eqns, phases = list(jaxpr.eqns), list(program.phases.of_eqn)
    formed = _formed(program)
    floating = _floating(program) | formed
    forward = _clustered(program, floating)
    clustered = cluster([eqns[k] for k in forward], jaxpr.invars) if forward else []
    layers: list[int | None] = [None] * len(eqns)
    for k, place in zip(forward, clustered, strict=True):
        layers[k] = int(place)
    num_layers = max((int(place) for place in clustered), default=0) + 1
    inputs, sizes = jaxpr.invars, functools.partial(_whole_bytes, program)
    held, available = _backward_layers(
        eqns, phases, layers, floating, num_layers, inputs, program.totals, sizes
    )
    _update_layers(eqns, phases, layers, floating, held, sizes)
    pairs = list(zip(layers, phases, strict=True))
    outputs = jaxpr.outvars, (None, "update")
    eqns, labels = clone_into_readers(eqns, pairs, floating, *outputs, once=formed)
    places = [cast(Place, label) for label in labels]
    eqns, pairs = _with_own_reads(eqns, places, available, inputs)
    layers, phases = [layer for layer, _ in pairs], [phase for _, phase in pairs]
    readers: dict[Var, set[int]] = {var: set() for var in inputs}
    for eqn, phase, layer in zip(eqns, phases, layers, strict=True):
        if phase != "update" and layer is not None:
            for atom in eqn.invars:
                if not isinstance(atom, Literal) and atom in readers:
                    readers[atom].add(layer)
    return Layering(
        tuple(eqns),
        tuple(phases),
        tuple(layers),
        num_layers,
        tuple(frozenset(readers[var]) for var in jaxpr.invars),
        ("none",) * num_layers,
    )


def _floating(program: Program) -> set[int]:
    """Return the equations that depend on no input and contain no region."""
    free: set[Var] = set()
    found = set()
    for k, eqn in enumerate(program.jaxpr.eqns):
        for atom in eqn.invars:
            if not isinstance(atom, Literal) and atom not in free:
                break
        else:
            if not eqn.effects and not subjaxprs(eqn):
                found.add(k)
                free.update(eqn.outvars)
    return found


def _formed(program: Program) -> set[int]:
    """Return the equations of the forward pass that give parameters another form."""
    pairs = zip(program.jaxpr.invars, program.inputs, strict=False)
    parameters = {var for var, leaf in pairs if leaf.role in ("state", "constant")}
    found = set()
    for k, eqn in enumerate(program.jaxpr.eqns):
        if program.phases.of_eqn[k] == "forward" and _forms(eqn, parameters):
            found.add(k)
            parameters.update(eqn.outvars)
    return found


def _forms(eqn: JaxprEqn, parameters: Collection[Var]) -> bool:
    """Return whether an equation gives one of the `parameters` another form: its elements, each by
    itself, and as many."""
    if is_shared_read(eqn) or len(eqn.invars) != 1 or len(eqn.outvars) != 1 or subjaxprs(eqn):
        return False
    (source,), (result,) = eqn.invars, eqn.outvars
    if isinstance(source, Literal) or source not in parameters or is_heavy(eqn):
        return False
    floats = all(jnp.issubdtype(dtype_of(var), jnp.inexact) for var in (source, result))
    return floats and math.prod(shape_of(source)) == math.prod(shape_of(result))


def _backward_layers(
    eqns: Sequence[JaxprEqn],
    phases: Sequence[str],
    layers: list[int | None],
    floating: set[int],
    num_layers: int,
    inputs: Sequence[Var],
    totals: Mapping[Var, Var],
    sizes: Callable[[Var], float],
) -> tuple[dict[Var, int], dict[Var, set[int]]]:
    """Assign layers to backward equations but shared reads of what is no cotangent; return the
    layer of every value computed so far, and those that have what the forward pass made or read.

    An input that is a total over the microbatches is a value of the layer that adds it up.
    """
    home: dict[Var, int] = {}
    available: dict[Var, set[int]] = {}
    shared: dict[Atom, Var] = {}  # by value, the shared read of the forward pass
    input_set = set(inputs)
    origin: dict[Atom, Atom] = {}  # of parameters in another form, what they are made from
    for k in sorted(floating):
        origin.update((var, atom) for var in eqns[k].outvars for atom in eqns[k].invars)
    for eqn, phase, layer in zip(eqns, phases, layers, strict=True):
        if phase != "forward" or layer is None:
            continue
        for atom in eqn.invars:
            source: Atom | None = atom
            while source is not None and not isinstance(source, Literal):
                if source in home or source in input_set or source in origin:
                    available.setdefault(source, set()).add(layer)
                source = origin.get(source)
        for var in eqn.outvars:
            if not is_drop(var):
                home[var] = layer
                available[var] = {layer}
        if is_shared_read(eqn):
            shared[eqn.invars[0]] = eqn.outvars[0]
    for total, value in totals.items():
        if value in home:
            available.setdefault(total, set()).add(home[value])
    cotangents: set[Var] = set()
    for k, (eqn, phase) in enumerate(zip(eqns, phases, strict=True)):
        if phase != "backward" or k in floating:
            continue
        read = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
        if is_shared_read(eqn) and read[0] not in cotangents:
            there = (read[0], shared.get(read[0], read[0]))
            available[eqn.outvars[0]] = set().union(*(available.get(var, ()) for var in there))
            continue
        ceiling = min((home[a] for a in read if a in cotangents), default=num_layers - 1)
        residuals = [a for a in read if a not in cotangents and a in available]
        # The last layer that has all of them, found in as little time however many layers there are
        candidates = set.intersection(*(available[a] for a in residuals)) if residuals else set()
        candidates = {q for q in candidates if q <= ceiling}
        if not residuals:
            layer = ceiling
        elif candidates:
            layer = max(candidates)
        else:
            layer = max(
                range(ceiling + 1),
                key=lambda q: (sum(sizes(a) for a in residuals if q in available[a]), q),
            )
        layers[k] = layer
        for var in eqn.outvars:
            if not is_drop(var):
                home[var] = layer
                cotangents.add(var)
    for var in inputs:
        if available.get(var):
            home[var] = min(available[var])
    return home, available


def _with_own_reads(
    eqns: Sequence[JaxprEqn],
    places: Sequence[Place],
    available: Mapping[Var, Collection[int]],
    inputs: Sequence[Var],
) -> tuple[list[JaxprEqn], list[Place]]:
    """Return equations and their places with a copy of each shared read that has no layer in every
    place that reads it, in front of its first reader: of the value or, in a layer that has only
    the forward pass' shared read of that, of the shared read."""
    given = set(inputs)
    shared: dict[Atom, Var] = {}  # of the forward pass, by what is read and no input
    value_of: dict[Var, Atom] = {}  # by the result of one without a layer
    copies: dict[tuple[Var, Place], Var] = {}
    found: list[tuple[JaxprEqn, Place]] = []
    for eqn, place in zip(eqns, places, strict=True):
        layer, phase = place
        if is_shared_read(eqn) and phase == "forward" and eqn.invars[0] not in given:
            shared[eqn.invars[0]] = eqn.outvars[0]
        if is_shared_read(eqn) and phase == "backward" and layer is None:
            value_of[eqn.outvars[0]] = eqn.invars[0]
            continue
        operands = list(eqn.invars)
        for number, atom in enumerate(operands):
            if isinstance(atom, Literal) or atom not in value_of:
                continue
            if (atom, place) not in copies:
                value = value_of[atom]
                there = isinstance(value, Literal) or layer in available.get(value, (layer,))
                copies[atom, place] = Var(atom.aval)
                read = value if there else shared.get(value, value)
                found.append((read_once(read, copies[atom, place], eqn), place))
            operands[number] = copies[atom, place]
        found.append((eqn.replace(invars=operands) if operands != eqn.invars else eqn, place))
    return [eqn for eqn, _ in found], [place for _, place in found]


def _update_layers(
    eqns: Sequence[JaxprEqn],
    phases: Sequence[str],
    layers: list[int | None],
    floating: set[int],
    home: dict[Var, int],
    sizes: Callable[[Var], float],
) -> None:
    """Assign layers to the tensor equations of the update, following parameters and gradients."""
    update = [k for k, phase in enumerate(phases) if phase == "update" and k not in floating]
    # By equation, the arrays that it reads and makes.
    arrays = {k: (_arrays(eqns[k].invars), _arrays(eqns[k].outvars)) for k in update}
    touching: dict[Var, list[int]] = {}
    for k, (read, made) in arrays.items():
        for var in (*read, *made):
            touching.setdefault(var, []).append(k)
    pending = set(update)

    def settle(var: Var, layer: int) -> None:
        home[var] = layer
        pending.update(touching.get(var, ()))

    while pending:
        for k in update:
            if k not in pending:
                continue
            pending.discard(k)
            read, made = arrays[k]
            known = [atom for atom in read if atom in home]
            if known:
                layer = home[max(known, key=sizes)]
            elif layers[k] is None and any(var in home for var in made):
                layer = home[next(var for var in made if var in home)]
            else:
                continue
            layers[k] = layer
            for var in made:
                if home.get(var) != layer:
                    settle(var, layer)
            for atom in read:
                if atom not in home:
                    settle(atom, layer)  # so that what computes it, or what else reads it, follows


def _arrays(atoms: Sequence[Atom]) -> list[Var]:
    """Return the variables of one dim or more."""
    return [a for a in atoms if not isinstance(a, Literal) and not is_drop(a) and shape_of(a)]


def clone_into_readers(
    eqns: Sequence[JaxprEqn],
    labels: Sequence[Hashable],
    cloned: set[int],
    outvars: Sequence[Atom],
    output_label: Hashable,
    once: Collection[int] = (),
) -> tuple[list[JaxprEqn], list[Hashable]]:
    """Return (equations, labels) with one copy of each equation in `cloned` per label reading it;
    of those `once`, whose labels are places, that of the forward pass is the backward pass' too.

    Copies for different labels define different variables; program outputs are computed by the
    copies labelled `output_label`.
    """
    producer = {var: k for k in cloned for var in eqns[k].outvars}
    readers: dict[int, dict[Hashable, None]] = {k: {} for k in cloned}
    outputs = {atom for atom in outvars if not isinstance(atom, Literal)}
    for output in outputs:
        if output in producer:
            readers[producer[output]][output_label] = None
    for k in range(len(eqns) - 1, -1, -1):
        if k in once:
            readers[k] = {_copy_read(label, readers[k]): None for label in readers[k]}
        wanted = readers[k] if k in cloned else {labels[k]: None}
        for atom in eqns[k].invars:
            if not isinstance(atom, Literal) and atom in producer:
                readers[producer[atom]].update(wanted)
    copies: dict[tuple[Atom, Hashable], Var] = {}
    result: list[JaxprEqn] = []
    result_labels: list[Hashable] = []
    for k, eqn in enumerate(eqns):
        reads = any(not isinstance(atom, Literal) and atom in producer for atom in eqn.invars)
        if k not in cloned and not reads:
            result.append(eqn)  # the same object, of which much is remembered
            result_labels.append(labels[k])
            continue
        for label in readers[k] if k in cloned else (labels[k],):
            operands: list[Atom] = []
            for atom in eqn.invars:
                if isinstance(atom, Literal) or atom not in producer:
                    operands.append(atom)
                    continue
                at = producer[atom]
                operands.append(
                    copies[atom, _copy_read(label, readers[at]) if at in once else label]
                )
            defined = list(eqn.outvars)
            if k in cloned:
                for number, var in enumerate(eqn.outvars):
                    named = is_drop(var) or label == output_label and var in outputs
                    defined[number] = var if named else Var(var.aval)
                    copies[var, label] = defined[number]
            result.append(eqn.replace(invars=operands, outvars=defined))
            result_labels.append(label)
    return result, result_labels


def _copy_read(label: Hashable, readers: Collection[Hashable]) -> Hashable:
    """Return the label of the copy that is read: of a layer's passes that read it, the forward."""
    layer, phase = cast(Place, label)
    there = (layer, "forward")
    return there if phase == "backward" and there in readers else label

"""Recomputation chosen per layer: forward equations cloned into the backward pass that reads them.

    full       the backward pass of a layer keeps what the layer was given, and redoes the rest
    selective  it also keeps the results that are dear to redo for their size

Clones read what the layer was given from behind an optimisation barrier, together with the last
cotangent that reaches the layer, as those of `jax.checkpoint` do: XLA can neither merge them with
the first run nor run them before the layer's turn. -> `_LayerAgain.barrier`

Dear are inner products, loops and kernels that do at least `DEAR` of the layer's mean operations
per byte of results. In a transformer those are the projections; the scores of attention are not,
whose inner products are as short as a head (Korthikanti et al. 2022, section 5), nor what is
elementwise. -> `_dear`

The user's own recomputations (`jax.checkpoint`) keep what they keep, what other layers keep is not
redone, and effects happen once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import jax
from attrs import evolve
from jax import lax

from alpa_meta.compat import JaxprEqn, Literal, Var, is_drop, is_plain, subjaxprs
from alpa_meta.errors import PlanError
from alpa_meta.inter_op.layering import Layering, tensor_bytes
from alpa_meta.operators import flops, kernel_kind
from alpa_meta.operators.regions import is_remat, is_scan
from alpa_meta.passes.added_equations import equations_of

RECOMPUTATIONS = ("none", "selective", "full")

DEAR = 0.25
"""Of the mean operations per byte of a layer's results, from which a result is kept.

A projection of width h does h of them (in two bytes), the scores of heads of width d only d. In the
layers of GPTs from 350M to 39B, whose heads are 64 or 128 wide, the mean is from h/2 to h.
"""


Recomputation = str | Sequence[str] | Mapping[int, str] | None
"""What the backward pass computes again: the same for every layer, or of each layer by number;
None: nothing."""


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


def recomputed(layering: Layering, choice: Mapping[int, str]) -> Layering:
    """Return the layering whose layers redo in their backward pass what `choice` says.

    `choice[layer]` is one of `RECOMPUTATIONS`; a layer that is absent redoes nothing.
    """
    again: dict[int, _LayerAgain] = {}
    held = _read_by(layering)
    for layer in sorted(choice, reverse=True):  # a layer keeps what those behind it were given
        if choice[layer] != "none":
            others = {var for var, readers in held.items() if readers - {layer}}
            again[layer] = _LayerAgain(layering, layer, choice[layer] == "selective", others)
            for var in again[layer].given:
                held.setdefault(var, set()).add(layer)
    eqns: list[JaxprEqn] = []
    phases: list[str] = []
    layers: list[int | None] = []
    for eqn, phase, layer in zip(layering.eqns, layering.phases, layering.layers, strict=True):
        found = [eqn]
        if phase == "backward" and layer in again:
            found = again[layer].before(eqn)
            found.append(again[layer].reading(eqn))
        eqns += found
        phases += [phase] * len(found)
        layers += [layer] * len(found)
    return evolve(
        layering,
        eqns=tuple(eqns),
        phases=tuple(phases),
        layers=tuple(layers),
        recomputation=tuple(choice.get(layer, "none") for layer in range(layering.num_layers)),
    )


class _LayerAgain:
    """One layer's forward equations, cloned as its backward pass comes to read their results.

    `kept` are values that others keep; `given` is what the clones read from outside.
    """

    def __init__(self, layering: Layering, layer: int, selective: bool, kept: set[Var]) -> None:
        places = list(zip(layering.phases, layering.layers, strict=True))
        self._eqns, self._layer = layering.eqns, layer
        self._backward = [k for k, place in enumerate(places) if place == ("backward", layer)]
        own = [k for k, place in enumerate(places) if place == ("forward", layer)]
        once = {var for k in own if self._eqns[k].effects for var in self._eqns[k].outvars}
        regions = [self._eqns[k] for k in self._backward if is_remat(self._eqns[k])]
        spared = kept | once.union(*map(_read, regions))
        self._producer = {
            var: k
            for k in own
            for var in self._eqns[k].outvars
            if not is_drop(var) and var not in spared
        }
        read = [atom for k in self._backward for atom in _read(self._eqns[k])]
        redone = self._needed(read)
        if selective:
            dear = _dear([self._eqns[k] for k in redone])
            self._producer = {v: k for v, k in self._producer.items() if v not in dear}
            redone = self._needed(read)
        made = {var for k in redone for var in self._eqns[k].outvars}
        operands = (atom for k in sorted(redone) for atom in _read(self._eqns[k]))
        self.given = tuple(dict.fromkeys(atom for atom in operands if atom not in made))
        self._cotangent = self._last_cotangent(places)
        self._cloned: set[int] = set()
        self._inside: dict[Var, Var] = {}  # what clones read instead
        self._outside: dict[Var, Var] = {}  # what the layer's backward pass reads instead

    def before(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """Return the clones that an equation of the backward pass is the first to need."""
        new = sorted(self._needed(_read(eqn)) - self._cloned)
        found = [] if self._cloned or not new else self._barrier()
        self._cloned.update(new)
        for k in new:
            original = self._eqns[k]
            results = [var if is_drop(var) else Var(var.aval) for var in original.outvars]
            found.append(_renamed(original, self._inside).replace(outvars=results))
            for var, result in zip(original.outvars, results, strict=True):
                if var in self._producer:
                    self._inside[var] = self._outside[var] = result
        return found

    def reading(self, eqn: JaxprEqn) -> JaxprEqn:
        """Return an equation of the backward pass as a reader of the clones."""
        return _renamed(eqn, self._outside)

    def _barrier(self) -> list[JaxprEqn]:
        """Return equations for what the clones read, available with the layer's cotangent."""
        held = [var for var in self.given if is_plain(var) or _is_key(var)]
        behind = [Var(var.aval) for var in held]
        self._inside.update(zip(held, behind, strict=True))
        if self._cotangent is not None:
            self._outside[self._cotangent] = Var(self._cotangent.aval)
            held.append(self._cotangent)
            behind.append(self._outside[self._cotangent])
        return equations_of(_behind_barrier, held, behind) if held else []

    def _needed(self, atoms: Iterable[Var]) -> set[int]:
        """Return the forward equations that make `atoms` of what the layer was given."""
        pending, found = list(atoms), set()
        while pending:
            k = self._producer.get(pending.pop())
            if k is not None and k not in found:
                found.add(k)
                pending += _read(self._eqns[k])
        return found

    def _last_cotangent(self, places: Sequence[tuple[str, int | None]]) -> Var | None:
        """Return what the layer's backward pass is given last by other layers, before it needs
        clones; None for the last layer."""
        begins = next((k for k in self._backward if self._needed(_read(self._eqns[k]))), 0)
        read = {atom for k in self._backward for atom in _read(self._eqns[k])}
        for k in range(begins - 1, -1, -1):
            phase, layer = places[k]
            if phase == "backward" and layer != self._layer:
                for var in self._eqns[k].outvars:
                    if not is_drop(var) and var in read and is_plain(var):
                        return var
        return None


def _behind_barrier(*values: jax.Array) -> list[jax.Array]:
    """Return the values behind one optimisation barrier; of keys their bits are."""
    keys = [jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key) for value in values]
    bits = [jax.random.key_data(v) if key else v for v, key in zip(values, keys, strict=True)]
    return [
        jax.random.wrap_key_data(held, impl=jax.random.key_impl(value)) if key else held
        for value, key, held in zip(values, keys, lax.optimization_barrier(bits), strict=True)
    ]


def _is_key(var: Var) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def _read(eqn: JaxprEqn) -> list[Var]:
    return [atom for atom in eqn.invars if not isinstance(atom, Literal)]


def _renamed(eqn: JaxprEqn, names: Mapping[Var, Var]) -> JaxprEqn:
    """Return an equation that reads renamed values: the same object if it reads none."""
    if not any(atom in names for atom in _read(eqn)):
        return eqn
    atoms = [atom if isinstance(atom, Literal) else names.get(atom, atom) for atom in eqn.invars]
    renamed: JaxprEqn = eqn.replace(invars=atoms)
    return renamed


def _read_by(layering: Layering) -> dict[Var, set[int | None]]:
    """Return the layers whose backward pass reads each value."""
    readers: dict[Var, set[int | None]] = {}
    for eqn, phase, layer in zip(layering.eqns, layering.phases, layering.layers, strict=True):
        if phase == "backward":
            for atom in _read(eqn):
                readers.setdefault(atom, set()).add(layer)
    return readers


def _dear(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """Return the results that take long to redo for the bytes they take."""
    work = [(eqn, _operations(eqn), sum(map(tensor_bytes, eqn.outvars))) for eqn in eqns]
    all_bytes = sum(size for eqn, _, size in work if _multiplies(eqn))
    least = DEAR * sum(count for _, count, _ in work) / max(all_bytes, 1.0)
    return {
        var
        for eqn, count, size in work
        if _multiplies(eqn) and count >= least * size
        for var in eqn.outvars
        if not is_drop(var)
    }


def _multiplies(eqn: JaxprEqn) -> bool:
    """Return whether an equation may do many operations per byte: products, loops, kernels."""
    return bool(subjaxprs(eqn)) or kernel_kind(eqn) != "elementwise"


def _operations(eqn: JaxprEqn) -> float:
    return float(flops(eqn) * (eqn.params["length"] if is_scan(eqn) else 1))

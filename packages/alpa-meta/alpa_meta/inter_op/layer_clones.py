"""One layer's forward equations, cloned into its backward pass (see `recomputation`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
from attrs import define, field
from jax import lax

from alpa_meta.compat import JaxprEqn, Literal, Var, is_drop, is_plain, subjaxprs
from alpa_meta.inter_op.layering import Layering, tensor_bytes
from alpa_meta.operators import flops, kernel_kind
from alpa_meta.operators.regions import is_remat, is_scan
from alpa_meta.passes.added_equations import equations_of

DEAR = 0.25
"""Of the mean operations per byte of a layer's results, from which a result is kept.

A projection of width h does h of them (in two bytes), the scores of heads of width d only d. In the
layers of GPTs from 350M to 39B, whose heads are 64 or 128 wide, the mean is from h/2 to h.
"""


@define
class _Barrier:
    """What clones wait for, how many of the two barriers they may wait behind there are, and what
    they read from behind them."""

    cotangent: Var | None
    made: int
    given: dict[Var, Var] = field(factory=dict)


class LayerClones:
    """One layer's forward equations, cloned as its backward pass comes to read their results.

    `kept` are values that are not to be redone; `redone` are the positions of the equations that
    are, `given` is what the clones read from outside, from behind a barrier if there is to be one
    and if it is there by then: of a second gradient in the step, the forward pass may follow the
    backward pass of the first.

    `numbers` says of which token slice each equation is. A clone is of the first slice of the
    backward pass, the last one of the tokens, that needs it, and each slice has a barrier of its
    own: behind one of all, the first would wait for the last.
    """

    def __init__(
        self,
        layering: Layering,
        layer: int,
        selective: bool,
        kept: Collection[Var] = (),
        *,
        barrier: bool = True,
        numbers: Sequence[int] | None = None,
    ) -> None:
        self._eqns, self._layer = layering.eqns, layer
        self._backward = layering.positions.get(("backward", layer), [])
        own = layering.positions.get(("forward", layer), [])
        once = {var for k in own if self._eqns[k].effects for var in self._eqns[k].outvars}
        if any(is_remat(self._eqns[k]) for k in self._backward):
            once.update(var for k in own for var in self._eqns[k].outvars)
        spared = once.union(kept)
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
        self.redone = tuple(sorted(redone))
        made = {var for k in redone for var in self._eqns[k].outvars}
        operands = (atom for k in self.redone for atom in _read(self._eqns[k]))
        self.given = tuple(dict.fromkeys(atom for atom in operands if atom not in made))
        self._made_at = layering.made_at
        self._place = {self._eqns[k]: k for k in self._backward}
        self._own = {var for k in self._backward for var in self._eqns[k].outvars}
        self._cloned: set[int] = set()
        self.clones: dict[int, JaxprEqn] = {}  # made so far, by the position of the first run
        self._made: dict[Var, Var] = {}  # what clones read instead, of one another
        self._outside: dict[Var, Var] = {}  # what the layer's backward pass reads instead
        self._slice: dict[int, int] = {}  # of each clone
        self._behind: dict[int, _Barrier] = {}  # of each slice
        slices = numbers or (0,) * len(self._eqns)
        for number in sorted({slices[k] for k in self._backward}, reverse=True):
            its = [k for k in self._backward if slices[k] == number]
            read = [atom for k in its for atom in _read(self._eqns[k])]
            self._slice.update(dict.fromkeys(self._needed(read, self._slice), number))
            cotangent = self._last_cotangent(layering, its, set(read))
            self._behind[number] = _Barrier(cotangent, 0 if barrier else 2)

    def before(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """Return the clones that an equation of the backward pass is the first to need."""
        new = sorted(self._needed(_read(eqn), self._cloned))
        found: list[JaxprEqn] = []
        for number in sorted({self._slice[k] for k in new}, reverse=True):
            if self._behind[number].made < 2:
                own = [k for k in new if self._slice[k] == number]
                found += self._barrier_before(eqn, own, self._behind[number])
        self._cloned.update(new)
        for k in new:
            original, given = self._eqns[k], self._behind[self._slice[k]].given
            results = [var if is_drop(var) else Var(var.aval) for var in original.outvars]
            self.clones[k] = _renamed(original, {**given, **self._made}).replace(outvars=results)
            found.append(self.clones[k])
            for var, result in zip(original.outvars, results, strict=True):
                if var in self._producer:
                    self._made[var] = self._outside[var] = result
        return found

    @property
    def renamed(self) -> list[tuple[Var, Var]]:
        """Return the values that clones and readers so far read under another name, and that."""
        given = (pair for one in self._behind.values() for pair in one.given.items())
        return [*given, *self._made.items(), *self._outside.items()]

    def lifetimes(self) -> dict[Var, tuple[int, int]]:
        """Return, for each result that is made again, the positions of the backward equations that
        are the first to need it and the last to read it."""
        begins: dict[int, int] = {}
        ends: dict[Var, int] = {}
        for k in self._backward:
            new = self._needed(_read(self._eqns[k]), begins)
            begins.update(dict.fromkeys(new, k))
            read = [*_read(self._eqns[k]), *(v for one in new for v in _read(self._eqns[one]))]
            ends.update((var, k) for var in read if var in self._producer)
        return {var: (begins[self._producer[var]], stop) for var, stop in ends.items()}

    def reading(self, eqn: JaxprEqn) -> JaxprEqn:
        """Return an equation of the backward pass as a reader of the clones."""
        return _renamed(eqn, self._outside)

    def _barrier_before(
        self, eqn: JaxprEqn, new: Collection[int], barrier: _Barrier
    ) -> list[JaxprEqn]:
        """Return the barrier of the first clones. The last layer, which no other gives a cotangent,
        has another in front of its first products: it waits for what the loss and the head of a
        model, which are part of that layer, have come to by then."""
        multiplies = any(_multiplies(self._eqns[k]) for k in new)
        if barrier.cotangent is not None or multiplies:
            barrier.made = 2
        elif barrier.made:
            return []
        else:
            barrier.made = 1
        if barrier.cotangent is None and multiplies:
            own = (atom for atom in _read(eqn) if atom in self._own and is_plain(atom))
            barrier.cotangent = next(own, None)
        return self._made_barrier(self._place[eqn], barrier)

    def _made_barrier(self, place: int, barrier: _Barrier) -> list[JaxprEqn]:
        """Return equations for what the barrier's clones read and what is made before `place`,
        available with the layer's cotangent."""
        its = (k for k in self.redone if self._behind[self._slice[k]] is barrier)
        read = {atom for k in its for atom in _read(self._eqns[k])}
        held = [
            var
            for var in self.given
            if var in read
            and (is_plain(var) or _is_key(var))
            and self._made_at.get(var, -1) < place
        ]
        behind = [Var(var.aval) for var in held]
        barrier.given.update(zip(held, behind, strict=True))
        cotangent = barrier.cotangent
        if cotangent is not None:
            self._outside[cotangent] = Var(cotangent.aval)
            held.append(cotangent)
            behind.append(self._outside[cotangent])
        return equations_of(_behind_barrier, held, behind) if held else []

    def _needed(self, atoms: Iterable[Var], known: Collection[int] = ()) -> set[int]:
        """Return the forward equations that make `atoms` of what the layer was given, without the
        `known` ones."""
        pending, found = list(atoms), set()
        while pending:
            k = self._producer.get(pending.pop())
            if k is not None and k not in found and k not in known:
                found.add(k)
                pending += _read(self._eqns[k])
        return found

    def _last_cotangent(
        self, layering: Layering, own: Sequence[int], read: Collection[Var]
    ) -> Var | None:
        """Return what equations of the layer's backward pass, which `read` it, are given last by
        other layers, before they need clones; None for the last layer."""
        begins = next((k for k in own if self._needed(_read(self._eqns[k]))), 0)
        for k in range(begins - 1, -1, -1):
            if layering.phases[k] == "backward" and layering.layers[k] != self._layer:
                results: list[Var] = self._eqns[k].outvars
                for var in results:
                    if not is_drop(var) and var in read and is_plain(var):
                        return var
        return None


def _behind_barrier(*values: jax.Array) -> list[jax.Array]:
    """Return the values behind one optimisation barrier; of keys their bits are."""
    keys = [jnp.issubdtype(value.dtype, jax.dtypes.prng_key) for value in values]
    bits = [jax.random.key_data(v) if key else v for v, key in zip(values, keys, strict=True)]
    return [
        jax.random.wrap_key_data(held, impl=jax.random.key_impl(value)) if key else held
        for value, key, held in zip(values, keys, lax.optimization_barrier(bits), strict=True)
    ]


def _is_key(var: Var) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _read(eqn: JaxprEqn) -> list[Var]:
    return [atom for atom in eqn.invars if not isinstance(atom, Literal)]


def _renamed(eqn: JaxprEqn, names: Mapping[Var, Var]) -> JaxprEqn:
    """Return an equation that reads renamed values: the same object if it reads none."""
    if not any(atom in names for atom in _read(eqn)):
        return eqn
    atoms = [atom if isinstance(atom, Literal) else names.get(atom, atom) for atom in eqn.invars]
    renamed: JaxprEqn = eqn.replace(invars=atoms)
    return renamed


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

"""A step without most of its repeated layers: what its layers cost is priced from it.

Of a unit of layers that is repeated the first two copies and the last stay:

    step    a  b1 b2 b3 b4 b5  c        short step    a  b1 b2 b5  c

What a copy read from one before it that was left out, as in the forward pass, it reads from the
second; what it read from one behind it, as in the backward pass, from the last. The short step is a
step like any other, which is cut into microbatches, put in layers and recomputed at the price of
kinds of layers. Its window (`window`) is that of the whole step: the second copy stands for those
left out, whose neighbours are copies as its own are. Where the last copy turns out to be unlike the
others in microbatches, the last but one stays too.

Layers keep their numbers. What cannot be left out: layers of a scan, and equations with effects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from attrs import evolve, field, frozen

from alpa_meta.compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var, consts, is_drop, open_jaxpr
from alpa_meta.inter_op.layering import Layering
from alpa_meta.inter_op.stacks import stacks_of
from alpa_meta.inter_op.window import Run, repeated_units
from alpa_meta.intra_op.folding import fold_keys, layer_classes
from alpa_meta.passes.added_equations import jaxpr_of
from alpa_meta.pinning import pin_marks
from alpa_meta.step.leaves import LeftOut
from alpa_meta.step.program import Program, Step, Whole, cut_into
from alpa_meta.types import Spec

KEPT = (3, 4)  # copies of a unit; the last but one too where microbatches tell the last apart


@frozen(eq=False)
class ShortStep:
    """A step without most of its repeated layers; its programs are parts of `source`'s."""

    whole: Whole
    left_out: LeftOut
    source: Program  # of the whole batch, with all layers
    _programs: dict[int, Program] = field(factory=dict, repr=False)

    def program(self, num_microbatches: int) -> Program:
        """Return the program of one of `num_microbatches` equal parts of the batch."""
        if num_microbatches not in self._programs:
            program = cut_into(self.whole, num_microbatches)
            self._programs[num_microbatches] = evolve(
                program, whole=self.source, left_out=self.left_out
            )
        return self._programs[num_microbatches]


def short_step(
    step: Step,
    layering: Layering,
    pins: Mapping[str, Spec],
    recomputation: Mapping[int, str],
    kept: int,
) -> ShortStep | None:
    """Return `step` with `kept` copies of repeated layers, None if that leaves nothing out.

    `layering` is that of the program of the whole batch. Layers are no repetition where `pins`
    shards their inputs otherwise, or where their `recomputation` is to be another.
    """
    program = step.program(1)
    if program.jaxpr.effects or stacks_of(program):
        return None
    marks = pin_marks(program, pins)
    keys = fold_keys(layering.eqns, layering.phases, layering.layers, marks)
    classes = layer_classes(keys, layering.layers, layering.num_layers)
    facts = zip(classes, _zeros(layering), map(recomputation.get, range(len(classes))), strict=True)
    numbers: dict[object, int] = {}
    classes = [numbers.setdefault(fact, len(numbers)) for fact in facts]
    runs = [run for run in repeated_units(classes) if run.count > kept]
    if not runs:
        return None
    return _Shortener(step, program, layering, _places(keys), runs, kept).short()


def _places(keys: Sequence[object]) -> list[int | None]:
    return [int(key[1]) if isinstance(key, tuple) else None for key in keys]


def _zeros(layering: Layering) -> list[tuple[bool, ...]]:
    """Return, by layer, which literals are zero, which tells sums apart in a cut."""
    found: list[list[bool]] = [[] for _ in range(layering.num_layers)]
    for eqn, layer in zip(layering.eqns, layering.layers, strict=True):
        if layer is not None:
            found[layer] += [_is_zero(atom) for atom in eqn.invars if isinstance(atom, Literal)]
    return [tuple(one) for one in found]


def _is_zero(atom: Literal) -> bool:
    value = np.asarray(atom.val)
    return value.dtype != object and not value.any()


class _Shortener:
    """What leaves layers out of a whole step."""

    def __init__(
        self,
        step: Step,
        program: Program,
        layering: Layering,
        places: Sequence[int | None],
        runs: Sequence[Run],
        kept: int,
    ) -> None:
        self.program, self.layering = program, layering
        self.whole, self.kept = step.whole, kept
        self.run_of = {layer: run for run in runs for layer in run.layers()}
        self.like = {
            layer: run.first(layer) + run.period
            for layer, run in self.run_of.items()
            if 1 < run.unit(layer) < run.count - kept + 2
        }
        self._places = places
        self._at = {
            (layer, place): k
            for k, (layer, place) in enumerate(zip(layering.layers, places, strict=True))
        }
        self._maker = {
            var: (k, number)
            for k, eqn in enumerate(layering.eqns)
            for number, var in enumerate(eqn.outvars)
            if not is_drop(var)
        }
        self._readers: dict[Var, set[int | None]] = {}  # of inputs
        for eqn, layer in zip(layering.eqns, layering.layers, strict=True):
            for atom in eqn.invars:
                if isinstance(atom, Var) and atom not in self._maker:
                    self._readers.setdefault(atom, set()).add(layer)

    def short(self) -> ShortStep | None:
        """Return the short step, None where a value would be read before it is made, or where only
        the layers left out read a value of the microbatches."""
        whole, jaxpr = self.whole, open_jaxpr(self.whole.closed)
        outputs = [
            output
            for output in zip(jaxpr.outvars, whole.outputs, whole.aliases, strict=True)
            if not self._is_left_out(output[0])
        ]
        eqns, phases = self._chosen(jaxpr.eqns, [atom for atom, _, _ in outputs])
        read = _variables(atom for eqn in eqns for atom in eqn.invars)
        read |= _variables(atom for atom, _, _ in outputs)
        for eqn, phase in zip(eqns, phases, strict=True):
            if read.isdisjoint(eqn.outvars):  # results keep what layers left out read in the update
                if phase != "update":
                    return None
                outputs += [(var, "", None) for var in eqn.outvars if not is_drop(var)]
        if not _in_order(eqns):
            return None
        read.update(jaxpr.invars[alias] for _, _, alias in outputs if alias is not None)
        before = _variables(atom for eqn in jaxpr.eqns for atom in eqn.invars)
        inputs = [
            k
            for k, (var, leaf) in enumerate(zip(jaxpr.invars, whole.inputs, strict=True))
            if var in read or var not in before or leaf.role == "batch"
        ]
        place = {k: number for number, k in enumerate(inputs)}
        flat = jaxpr_of(
            jaxpr,
            list(jaxpr.constvars),
            [jaxpr.invars[k] for k in inputs],
            [atom for atom, _, _ in outputs],
            eqns,
        )
        left = evolve(
            whole,
            closed=ClosedJaxpr(flat, consts(whole.closed)),
            phases=evolve(whole.phases, of_eqn=tuple(phases)),
            inputs=tuple(whole.inputs[k] for k in inputs),
            outputs=tuple(path for _, path, _ in outputs),
            aliases=tuple(None if alias is None else place[alias] for _, _, alias in outputs),
        )
        paths = {leaf.leaf_path for leaf in whole.inputs} - {one.leaf_path for one in left.inputs}
        return ShortStep(left, LeftOut(self.like, frozenset(paths), self._copies()), self.program)

    def _chosen(
        self, eqns: Sequence[JaxprEqn], results: Sequence[Atom]
    ) -> tuple[list[JaxprEqn], list[str]]:
        """Return the equations that stay, and their phases; of those without a layer, such as
        constants and scalars of the update, only what is read stays.
        """
        needed = {atom for atom in results if isinstance(atom, Var)}
        found: list[tuple[JaxprEqn, str]] = []
        pairs = list(zip(eqns, self.whole.phases.of_eqn, strict=True))
        for eqn, phase in reversed(pairs):
            layer = self._layer(eqn)
            if layer in self.like or layer is None and needed.isdisjoint(eqn.outvars):
                continue
            operands = [
                a if isinstance(a, Literal) else self._stand_in(a, layer) for a in eqn.invars
            ]
            if any(one is not two for one, two in zip(operands, eqn.invars, strict=True)):
                eqn = eqn.replace(invars=operands)
            needed.update(atom for atom in operands if isinstance(atom, Var))
            found.append((eqn, phase))
        found.reverse()
        return [eqn for eqn, _ in found], [phase for _, phase in found]

    def _layer(self, eqn: JaxprEqn) -> int | None:
        made = next((var for var in eqn.outvars if var in self._maker), None)
        return None if made is None else self.layering.layers[self._maker[made][0]]

    def _is_left_out(self, atom: Atom) -> bool:
        """Return whether a result is a layer's that is left out, or an input that only it has."""
        if isinstance(atom, Literal):
            return False
        if atom in self._maker:
            return self.layering.layers[self._maker[atom][0]] in self.like
        return atom in self._readers and self._readers[atom] <= self.like.keys()

    def _stand_in(self, var: Var, reader: int | None) -> Var:
        """Return the value that stays and stands for `var`, which layer `reader` reads.

        A copy that read one before it reads the second, one that read one behind it the next.
        """
        if var not in self._maker:
            return var
        k, number = self._maker[var]
        layer = self.layering.layers[k]
        if layer not in self.like:
            return var
        run = self.run_of[layer]
        if reader is not None and reader in run.layers():
            behind = run.unit(layer) > run.unit(reader)
        else:
            behind = self.layering.phases[k] == "backward"  # the one that is made first
        last = run.last(layer) - (self.kept - 3) * run.period
        like = last if behind else self.like[layer]
        return self.layering.eqns[self._at[like, self._places[k]]].outvars[number]

    def _copies(self) -> dict[Var, int]:
        """Return how often the equations count that stand for those left out."""
        times = {layer: self.run_of[layer].count - self.kept + 1 for layer in self.like.values()}
        return {
            var: times[layer]
            for eqn, layer in zip(self.layering.eqns, self.layering.layers, strict=True)
            if layer in times
            for var in eqn.outvars
        }


def _variables(atoms: Iterable[Atom]) -> set[Var]:
    return {atom for atom in atoms if isinstance(atom, Var)}


def _in_order(eqns: Sequence[JaxprEqn]) -> bool:
    """Return whether every equation is behind those whose results it reads."""
    waiting = {var for eqn in eqns for var in eqn.outvars}
    for eqn in eqns:
        if not waiting.isdisjoint(_variables(eqn.invars)):
            return False
        waiting.difference_update(eqn.outvars)
    return True

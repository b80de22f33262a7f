"""The program of the slices, written from its analysis.

Every equation is written once for each slice, in the order of its sweep, beside the others of the
same equation, so that layers stay stretches of the program. Known values are made where they are
first read: whole, or, where an operator can make a part of its result, only a slice's part of a
mask or of random bits.

    rows of a known value     made, or cut out of the whole
    keys of a sliced value    the rows of all slices up to this one, joined
    sums over the slices      added up slice by slice
    gradients of keys         each slice adds to those of the slices before it; its own are complete
                              when the backward sweep reaches it
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import jax
from attrs import frozen
from jax import Array

from alpa_meta.compat import (
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    abstract_of,
    array_type,
    is_drop,
    open_jaxpr,
    shape_of,
)
from alpa_meta.operators import operator_of, operator_signature
from alpa_meta.operators.operator import run_unchanged
from alpa_meta.operators.rewrites.replacement import instantiated
from alpa_meta.step.trace import inline
from alpa_meta.token_slices.bounds import operand_layouts
from alpa_meta.token_slices.key_moves import write_keys_moved
from alpa_meta.token_slices.moves import stretch_of, write_moved
from alpa_meta.token_slices.parts import (
    UnsupportedError,
    cut_out,
    joined_parts,
    joined_rows,
    run_local,
)
from alpa_meta.token_slices.places import KEY, Layout, whole
from alpa_meta.token_slices.reading import Reading, keys_of
from alpa_meta.token_slices.recomputed_keys import write_recomputed
from alpa_meta.token_slices.recurrences import write_running, write_token_loop
from alpa_meta.token_slices.scattering import write_scattered
from alpa_meta.token_slices.sums import add_part, write_of_parts
from alpa_meta.token_slices.values import (
    AFTER,
    BEFORE,
    Added,
    Analysis,
    Blocks,
    Branches,
    Decision,
    KeyBlocks,
    Known,
    Moved,
    MovedKeys,
    OneToken,
    Recomputed,
    Region,
    Running,
    Sliced,
    TokenLoop,
    Value,
    Window,
    WindowSum,
)
from alpa_meta.token_slices.windows import write_window, write_window_sum
from alpa_meta.types import Function

PHASES = ("forward", "backward", "update")

Regions = Region | Blocks | KeyBlocks | Branches

Again = tuple[int, Var, Layout, int]
"""The number of a result that is recomputed from the first token on, as what, its layout, and the
slice."""


@frozen(eq=False)
class Written:
    """An equation of the slices: its phase, and the slice that it is of, None in the update."""

    eqn: JaxprEqn
    phase: str
    slice_number: int | None


class Writer:
    """Writes the equations of all slices of one program or body.

    `lists` has them in order; of a body by slice. Values of the slices are in `parts`, known values
    in `made`, whole or a slice's part.
    """

    def __init__(
        self,
        analysis: Analysis,
        templates: dict[Hashable, ClosedJaxpr],
        write_region: Callable[[Writer, JaxprEqn, Regions, Again | None], None],
    ) -> None:
        self.write_region, self.templates = write_region, templates
        self.analysis, self.slices = analysis, analysis.slices
        self.written: list[Written] = []
        self.parts: dict[tuple[Var, int], Atom] = {}
        self.sums: dict[Var, Atom] = {}  # of the slices so far
        self.pending: dict[Var, tuple[Atom, int]] = {}  # gradients of keys before a slice
        self.carries: dict[Var, Atom] = {}  # running values and states after a slice
        self._converted: dict[Hashable, Atom] = {}
        jaxpr = open_jaxpr(analysis.closed)
        self.producer = {
            var: (eqn, k)
            for k, eqn in enumerate(jaxpr.eqns)
            for var in eqn.outvars
            if not is_drop(var)
        }
        self.given = {*jaxpr.invars, *jaxpr.constvars}
        self.batch = {var for var in jaxpr.invars if analysis.values[var].of_batch}
        self.made: set[Var] = set(self.given)
        self.sweep = BEFORE

    # ------------------------------------------------------------------ the walk

    def write(self) -> None:
        """Write all equations, and what the results need."""
        jaxpr = open_jaxpr(self.analysis.closed)
        steps = zip(jaxpr.eqns, self.analysis.decisions, self.analysis.sweeps, strict=True)
        for eqn, decision, self.sweep in steps:
            if isinstance(decision, Known | Recomputed):
                if eqn.effects or self.sweep == AFTER:
                    self._make_whole(eqn)
                continue
            for number in self.order(self.sweep):
                self._write_slice(eqn, decision, number)

    def order(self, sweep: int) -> range:
        """Return the slices in the order of a sweep."""
        count = self.slices.count
        return range(count) if sweep == BEFORE else range(count - 1, -1, -1)

    def _write_slice(self, eqn: JaxprEqn, decision: Decision, number: int) -> None:
        if isinstance(decision, Sliced):
            self._operator(eqn, decision.reading, number)
        elif isinstance(decision, Added):
            write_of_parts(self, eqn, decision.group, number)
        elif isinstance(decision, Running):
            write_running(self, eqn, decision, number)
        elif isinstance(decision, TokenLoop):
            write_token_loop(self, eqn, decision, number)
        elif isinstance(decision, Window):
            write_window(self, eqn, decision, number)
        elif isinstance(decision, WindowSum):
            write_window_sum(self, eqn, decision, number)
        elif isinstance(decision, Moved):
            write_moved(self, eqn, decision, number)
        elif isinstance(decision, MovedKeys):
            write_keys_moved(self, eqn, decision, number)
        elif isinstance(decision, OneToken):
            if number == decision.slice_number:
                (source,) = (atom for atom in eqn.invars if isinstance(atom, Var))
                self.emit(eqn.replace(invars=[self.part(source, number)]), number)
                self.made.update(eqn.outvars)
        else:
            assert isinstance(decision, Regions)
            if number == self.order(self.sweep)[0]:
                self.write_region(self, eqn, decision, None)

    # ------------------------------------------------------------------ writing equations

    def emit(self, eqn: JaxprEqn, number: int | None, sweep: int | None = None) -> None:
        """Write an equation of a slice."""
        phase = PHASES[self.sweep if sweep is None else sweep]
        self.written.append(Written(eqn, phase, None if phase == "update" else number))

    def compute(
        self,
        key: Hashable,
        function: Function[object],
        operands: Sequence[Atom],
        results: Sequence[Var],
        number: int | None,
        source: JaxprEqn | None = None,
        sweep: int | None = None,
    ) -> None:
        """Write the equations of a jax function of `operands`, traced once for each `key`."""
        avals = tuple(abstract_of(atom) for atom in operands)
        full = key, tuple((a.shape, str(a.dtype), a.weak_type) for a in avals)
        if full not in self.templates:
            self.templates[full] = inline(jax.make_jaxpr(function)(*avals))
        template = open_jaxpr(self.templates[full])
        for eqn in instantiated(template, operands, results, source):
            self.emit(eqn, number, sweep)

    def result(self, var: Var, layout: Layout, number: int) -> Var:
        """Return a variable for what a slice holds of a value."""
        shape = self.slices.shape(shape_of(var), layout, number)
        return Var(array_type(var).update(shape=shape))

    def once(self, key: Hashable, make: Callable[[], Atom]) -> Atom:
        """Return what `make` writes the first time that a key is asked for."""
        if key not in self._converted:
            self._converted[key] = make()
        return self._converted[key]

    # ------------------------------------------------------------------ operands

    def operand(self, atom: Atom, layout: Layout, number: int) -> Atom:
        """Return what a slice reads of an operand."""
        if isinstance(atom, Literal):
            return atom
        value = self.analysis.value(atom)
        if not value.in_parts:
            return self.known(atom, layout, number)
        if any(value.layout) and not any(layout):
            return self.all_tokens(atom, number)
        keys = [d for d, place in enumerate(layout) if place and place.kind == KEY]
        if any(value.layout[d] is not None and value.layout[d] != layout[d] for d in keys):
            return self._keys(atom, value, layout, number)
        for d, (have, want) in enumerate(zip(value.layout, layout, strict=True)):
            if have is not None and want is not None and have.cuts != want.cuts:
                held = self.stretch_of(atom, d, *self.slices.held(want, number), number)
                return self._cut_further(held, value.layout, layout, number)
        return self._cut_further(self.part(atom, number), value.layout, layout, number)

    def all_tokens(self, var: Var, _: int) -> Atom:
        """Return all of a value that an earlier sweep made."""
        return self.full(var)

    def stretch_of(self, atom: Atom, dim: int, start: int, stop: int, number: int) -> Atom:
        """Return elements [start, stop) along a dim of a value, of whichever slices made them."""
        return stretch_of(self, atom, dim, start, stop, number)

    def part(self, var: Var, number: int) -> Atom:
        """Return what a slice made of a value."""
        return self.parts[var, number]

    def _cut_further(self, held: Atom, have: Layout, want: Layout, number: int) -> Atom:
        missing = tuple(b if a is None else None for a, b in zip(have, want, strict=True))
        if not any(missing):
            return held
        return self._convert(held, missing, number)

    def _convert(self, held: Atom, layout: Layout, number: int) -> Atom:
        """Return what a slice holds of a value that is whole along the dims of `layout`."""
        ahead = held in self.batch  # by the first slice for all: others are alike but for the place
        sweep, writer = (BEFORE, 0) if ahead else (self.sweep, number)
        key = held, layout, number, sweep
        if key not in self._converted:
            aval = array_type(held)
            shape = self.slices.shape(aval.shape, layout, number)
            if shape == aval.shape:
                return held
            result = Var(aval.update(shape=shape))
            slices = self.slices
            self.compute(
                ("cut", layout, number),
                lambda value: cut_out(value, layout, slices, number),
                [held],
                [result],
                writer,
                sweep=sweep,
            )
            self._converted[key] = result
        return self._converted[key]

    def _keys(self, var: Var, value: Value, layout: Layout, number: int) -> Atom:
        """Return the rows of all slices up to this one, joined."""
        if not self.is_recomputed(var) or number == 0:
            return self._joined_parts(var, value, layout, number)
        have = keys_of(value.layout)
        assert all(h is None or w is None or h.cuts == w.cuts for h, w in zip(have, layout)), var
        return self._cut_further(self.recomputed(var, have, number), have, layout, number)

    def is_recomputed(self, var: Var) -> bool:
        """Return whether the backward sweep makes a value, for earlier slices after this one."""
        value = self.analysis.value(var)
        return value.in_parts and value.when == self.sweep != BEFORE and var not in self.given

    def _joined_parts(self, var: Var, value: Value, layout: Layout, number: int) -> Atom:
        key = "keys", var, layout, number, self.sweep
        if key not in self._converted:
            held = [
                self._cut_rows(var, value, layout, earlier, number) for earlier in range(number + 1)
            ]
            self._converted[key] = self.join(held, value.layout, layout, var, number)
        return self._converted[key]

    def _cut_rows(self, var: Var, value: Value, layout: Layout, part: int, number: int) -> Atom:
        """Return the part of slice `part`, cut along dims whole in it as slice `number` holds."""
        return self._cut_further(self.part(var, part), value.layout, layout, number)

    def join(
        self, held: Sequence[Atom], have: Layout, layout: Layout, var: Var, number: int
    ) -> Atom:
        """Return the parts of several slices as one value."""
        if len(held) == 1:
            return held[0]
        (dim,) = (d for d, place in enumerate(have) if place is not None)
        place = have[dim]
        assert place is not None
        result = self.result(var, layout, number)
        self.compute(
            ("join", dim, place),
            lambda *parts: joined_rows(dim, place, *parts),
            list(held),
            [result],
            number,
        )
        return result

    def recomputed(self, var: Var, layout: Layout, number: int) -> Atom:
        """Return the keys of a recomputed value, made of the keys of what it is made of."""
        key = "recomputed", var, layout, number
        if key not in self._converted:
            eqn, position = self.producer[var]
            decision = self.analysis.decisions[position]
            if isinstance(decision, Branches):
                made = self._converted[key] = self.result(var, layout, number)
                self.write_region(
                    self, eqn, decision, (eqn.outvars.index(var), made, layout, number)
                )
                return made
            for out, held, made in write_recomputed(self, eqn, decision, number):
                self._converted["recomputed", out, held, number] = made
        return self._converted[key]

    def full(self, atom: Atom) -> Atom:
        """Return all of a value, once every slice has made its own."""
        if isinstance(atom, Literal):
            return atom
        value = self.analysis.value(atom)
        if not value.in_parts:
            return self.known(atom, whole(len(value.layout)), None)
        if atom in self.made:
            return atom
        last = self.order(value.when)[-1]
        parts = [self.part(atom, number) for number in range(self.slices.count)]
        shape, layout = shape_of(atom), value.layout
        self.compute(
            ("join", shape, layout),
            lambda *held: joined_parts(shape, layout, held),
            parts,
            [atom],
            last,
            sweep=value.when,
        )
        self.made.add(atom)
        return atom

    # ------------------------------------------------------------------ known values

    def known(self, var: Var, layout: Layout, number: int | None) -> Atom:
        """Return a known value, or what a slice holds of it."""
        if not any(layout):
            return self.known_whole(var, number)
        assert number is not None
        key = "known", var, layout, number
        if key not in self._converted:
            self._converted[key] = self._known_part(var, layout, number)
        return self._converted[key]

    def known_whole(self, var: Var, number: int | None) -> Atom:
        """Return all of a known value; a slice has its own view of an input, such as a transposed
        weight: it costs nothing there, and memory where it is handed from slice to slice."""
        if number is not None and self.sweep != AFTER and self._is_view(var):
            return self._own_view(var, number)
        if var not in self.made and var in self.producer:
            eqn, position = self.producer[var]
            if isinstance(self.analysis.decisions[position], Known):
                self._make_whole(eqn)
        return var

    def _is_view(self, atom: Atom) -> bool:
        if isinstance(atom, Literal) or atom in self.given:
            return True
        eqn, position = self.producer[atom]
        known = isinstance(self.analysis.decisions[position], Known)
        laid_out = known and len(eqn.outvars) == 1 and operator_of(eqn).layout
        return bool(laid_out) and all(map(self._is_view, eqn.invars))

    def _own_view(self, var: Atom, number: int) -> Atom:
        if isinstance(var, Literal) or var in self.given:
            return var
        key = "view", var, number, self.sweep
        if key not in self._converted:
            eqn, _ = self.producer[var]
            operands = [self._own_view(atom, number) for atom in eqn.invars]
            made = Var(var.aval)
            self.emit(eqn.replace(invars=operands, outvars=[made]), number)
            self._converted[key] = made
        return self._converted[key]

    def has_whole(self, var: Var, _: int) -> bool:
        """Return whether all of a known value is made already."""
        return var in self.made

    def note_known(self, var: Var, number: int) -> Var | None:
        """Return the variable that slice `number` makes for a known value; None: it makes none."""
        if number != self.order(self.sweep)[0]:
            return None
        self.made.add(var)
        return var

    def _make_whole(self, eqn: JaxprEqn) -> None:
        """Write an equation of known values, unless it is written."""
        made = [var for var in eqn.outvars if not is_drop(var)]
        if made and all(var in self.made for var in made):
            return
        own = self.analysis.sweeps[self.producer[made[0]][1]] if made else self.sweep
        sweep = own if self.sweep == AFTER else max(own, self.sweep)
        for atom in eqn.invars:
            self.full(atom)
        when = max((self.analysis.value(var).when for var in made), default=BEFORE)
        number = self.order(sweep)[0 if when <= sweep and not (sweep == BEFORE and when) else -1]
        self.made.update(made)
        self.emit(eqn, number, sweep)

    def _known_part(self, var: Var, layout: Layout, number: int) -> Atom:
        if self.has_whole(var, number) or var not in self.producer:
            return self._convert(self.known_whole(var, number), layout, number)
        eqn, position = self.producer[var]
        decision = self.analysis.decisions[position]
        plain = isinstance(decision, Known | Recomputed) and len(eqn.outvars) == 1
        layouts = operand_layouts(eqn, layout, self.slices) if plain else None
        if layouts is not None and not eqn.effects and self._has_parts(eqn, layouts):
            reading = Reading(tuple(layouts), (layout,))
            result = self.result(var, layout, number)
            try:
                self.run_operator(eqn, reading, number, [result])
            except UnsupportedError:
                pass
            else:
                return result
        return self._convert(self.known_whole(var, number), layout, number)

    def _has_parts(self, eqn: JaxprEqn, layouts: Sequence[Layout]) -> bool:
        """Return whether parts of all tokens' values can be read of the rows that slices made."""
        pairs = zip(map(self.analysis.value, eqn.invars), layouts, strict=True)
        return not any(
            have is not None and (want is None or KEY in (have.kind, want.kind))
            for value, layout in pairs
            if value.in_parts and any(layout)
            for have, want in zip(value.layout, layout, strict=True)
        )

    # ------------------------------------------------------------------ operators

    def _operator(self, eqn: JaxprEqn, reading: Reading, number: int) -> None:
        results = [
            self.result(var, layout, number)
            for var, layout in zip(eqn.outvars, reading.results, strict=True)
        ]
        self.run_operator(eqn, reading, number, results)
        for k, (var, made) in enumerate(zip(eqn.outvars, results, strict=True)):
            if is_drop(var):
                continue
            if reading.scatters(k):
                write_scattered(self, var, reading.results[k], made, number)
            elif reading.is_sum(k):
                add_part(self, var, made, number, reading.combined)
            else:
                self.parts[var, number] = made

    def run_operator(
        self, eqn: JaxprEqn, reading: Reading, number: int, results: Sequence[Var]
    ) -> None:
        """Write what a slice runs for an operator."""
        operands = [
            self.operand(atom, layout, number)
            for atom, layout in zip(eqn.invars, reading.operands, strict=True)
        ]
        operator = operator_of(eqn)
        if operator.local is run_unchanged or not any(
            map(any, (*reading.operands, *reading.results))
        ):
            self.emit(eqn.replace(invars=operands, outvars=list(results)), number)
            return
        place = self.order(self.sweep).index(number)

        def run(*values: Array) -> list[Array]:
            return run_local(eqn, reading, self.slices, number, place, values)

        key = operator_signature(eqn), reading, number, place
        self.compute(key, run, operands, results, number, eqn)

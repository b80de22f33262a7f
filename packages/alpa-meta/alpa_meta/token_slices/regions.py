"""Scans over layers and recomputations in slices: one loop, or region, for each slice.

A slice's body reads and makes the slice's parts. Where it looks back on what the body of an earlier
slice made (the keys of each layer), that body hands it out, from a scan stacked over the layers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from alpa_meta.compat import (
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    array_type,
    consts,
    is_drop,
    open_jaxpr,
    shape_of,
)
from alpa_meta.operators.regions import scan_of, with_bodies
from alpa_meta.passes.added_equations import jaxpr_of
from alpa_meta.passes.live import live_eqns
from alpa_meta.token_slices.places import Layout, whole
from alpa_meta.token_slices.sums import add_part, addend
from alpa_meta.token_slices.values import Region, Value
from alpa_meta.token_slices.writer import Writer

_Inputs = dict[tuple[Var, Hashable], tuple[Var, Atom]]


class BodyWriter(Writer):
    """Writes the bodies of a region, by slice."""

    def __init__(self, parent: Writer, eqn: JaxprEqn, region: Region) -> None:
        super().__init__(region.body, parent.templates, parent.write_region)
        self.parent, self.eqn, self.region = parent, eqn, region
        self.sweep, self.batch = parent.sweep, set()
        count = self.slices.count
        self.lists: list[list[JaxprEqn]] = [[] for _ in range(count)]
        # by slice: the body's input for (input of the whole body, part), and what it is outside
        self.fixed: list[_Inputs] = [{} for _ in range(count)]
        self.scanned: list[_Inputs] = [{} for _ in range(count)]
        self.carried: list[list[Var]] = [[] for _ in range(count)]
        self._wholes: dict[tuple[Var, int], Atom] = {}
        self.sums_made: list[tuple[Var, Var, int]] = []  # of results, by slice
        jaxpr = open_jaxpr(region.body.closed)
        first = region.num_consts + region.num_carry
        self.carries_in = list(jaxpr.invars[region.num_consts : first])
        pairs = list(zip(jaxpr.invars, eqn.invars, strict=True))
        self.outer = dict([*pairs[: region.num_consts], *pairs[first:]])
        self.from_scan = set(jaxpr.invars[first:])
        for number in range(count):
            for var in self.carries_in:
                value = self.analysis.value(var)
                held = self.result(var, value.layout, number)
                self.carried[number].append(held)
                if value.in_parts:
                    self.parts[var, number] = held
                else:
                    self._wholes[var, number] = held

    def emit(self, eqn: JaxprEqn, number: int | None, sweep: int | None = None) -> None:
        """Write an equation of a slice's body."""
        assert number is not None
        self.lists[number].append(eqn)

    def _input(self, var: Var, layout: Layout, number: int) -> Atom:
        """Return the body's input for what a slice reads of an input of the whole body."""
        scanned = var in self.from_scan
        inputs = (self.scanned if scanned else self.fixed)[number]
        if (var, layout) not in inputs:
            held = self.parent.operand(self.outer[var], self.outer_layout(var, layout), number)
            if isinstance(held, Literal) and not scanned:
                return held
            inputs[var, layout] = self.result(var, layout, number), held
        return inputs[var, layout][0]

    def outer_layout(self, var: Var, layout: Layout) -> Layout:
        """Return the layout outside of what a body reads."""
        return (None, *layout) if var in self.from_scan else layout

    def stretch_of(self, atom: Atom, dim: int, start: int, stop: int, number: int) -> Atom:
        """Return elements [start, stop) along a dim of a value, of whichever slices made them."""
        if not isinstance(atom, Var) or atom not in self.outer:
            return super().stretch_of(atom, dim, start, stop, number)
        scanned = atom in self.from_scan
        inputs = (self.scanned if scanned else self.fixed)[number]
        key = atom, (dim, start, stop)
        if key not in inputs:
            held = self.parent.stretch_of(self.outer[atom], dim + scanned, start, stop, number)
            shape = shape_of(held)[scanned:]
            inputs[key] = Var(array_type(atom).update(shape=shape)), held
        return inputs[key][0]

    def part(self, var: Var, number: int) -> Atom:
        """Return what a slice made of a value, or was given."""
        if var in self.outer:
            return self._input(var, self.analysis.value(var).layout, number)
        return super().part(var, number)

    def _joined_parts(self, var: Var, value: Value, layout: Layout, number: int) -> Atom:
        if var in self.outer:
            return self._input(var, layout, number)
        return super()._joined_parts(var, value, layout, number)

    def is_recomputed(self, var: Var) -> bool:
        """Return whether the backward sweep makes a value, for earlier slices after this one."""
        outer = self.outer.get(var)
        if isinstance(outer, Var) and var not in self.from_scan:
            return self.parent.is_recomputed(outer)
        return super().is_recomputed(var)

    def recomputed(self, var: Var, layout: Layout, number: int) -> Atom:
        """Return the keys of a recomputed value, made here or given."""
        if var in self.outer:
            return self._input(var, layout, number)
        return super().recomputed(var, layout, number)

    def all_tokens(self, var: Var, number: int) -> Atom:
        """Return all of a value that an earlier sweep made, or that is recomputed of such."""
        return self.known(var, _whole(var), number)

    def known(self, var: Var, layout: Layout, number: int | None) -> Atom:
        """Return a known value in a slice's body, or what the slice holds of it."""
        assert number is not None
        if var in self.outer:
            return self._input(var, layout, number)
        return super().known(var, layout, number)

    def has_whole(self, var: Var, number: int) -> bool:
        """Return whether a slice's body has all of a known value already."""
        return var in self.given or (var, number) in self._wholes

    def known_whole(self, var: Var, number: int | None) -> Atom:
        """Return all of a known or recomputed value, of which each body makes its own."""
        assert number is not None
        if (var, number) in self._wholes or var in self.given:
            return self._wholes.get((var, number), var)
        eqn, _ = self.producer[var]
        operands = [
            atom if isinstance(atom, Literal) else self.known(atom, _whole(atom), number)
            for atom in eqn.invars
        ]
        results = [out if is_drop(out) else Var(out.aval) for out in eqn.outvars]
        self._wholes.update(((out, number), made) for out, made in zip(eqn.outvars, results))
        self.emit(eqn.replace(invars=operands, outvars=results), number)
        return self._wholes[var, number]

    def note_known(self, var: Var, number: int) -> Var | None:
        """Return the variable that a slice's body makes for a known value."""
        made = Var(var.aval)
        self._wholes[var, number] = made
        return made

    # ------------------------------------------------------------------ the regions of the slices

    def finish(self) -> None:
        """Write one region for each slice where the whole one was."""
        order = self.parent.order(self.sweep)
        results = {number: self.results(number) for number in order}
        for number in order:
            self.lists[number] = self.live(number, results[number])
        foreign = {number: self.foreign(number, results[number]) for number in order}
        owner = {var: number for number in order for var in self.defined(number)}
        handed: dict[Var, Var] = {}
        for number in order:
            for var in foreign[number]:
                handed.setdefault(var, self._outside(var))
        for number in order:
            out = [var for var in handed if owner[var] == number]
            self._region(number, results[number], foreign[number], out, handed)

    def _outside(self, var: Var) -> Var:
        """Return what a value of a body is outside: stacked over the iterations of a scan."""
        aval = array_type(var)
        if self.region.is_scan:
            aval = aval.update(shape=(self.eqn.params["length"], *aval.shape))
        return Var(aval)

    def value_of(self, k: int) -> Value:
        """Return what is known of a result of the body."""
        carry = k < self.region.num_carry
        atom = self.carries_in[k] if carry else open_jaxpr(self.analysis.closed).outvars[k]
        return self.analysis.value(atom)

    def results(self, number: int) -> list[tuple[Var, Atom]]:
        """Return the results of a slice's region: their variables outside and in the body."""
        found: list[tuple[Var, Atom]] = []
        for k, atom in enumerate(open_jaxpr(self.analysis.closed).outvars):
            made, value = self.outside(k, number), self.value_of(k)
            if made is not None:
                of_sum = value.state == "addend"
                inner = addend(self, atom, number) if of_sum else None
                found.append((made, inner or self.operand(atom, value.layout, number)))
        return found

    def outside(self, k: int, number: int) -> Var | None:
        """Return the variable outside for a result of a slice's region, None if it makes none."""
        var, value, carry = self.eqn.outvars[k], self.value_of(k), k < self.region.num_carry
        if value.state == "addend":
            made = Var(var.aval)
            if not is_drop(var):
                self.sums_made.append((var, made, number))
        elif value.state == "sliced":
            stacked = self.region.is_scan and not carry
            layout = (None, *value.layout) if stacked else value.layout
            made = self.parent.result(var, layout, number)
            if not is_drop(var):
                self.parent.parts[var, number] = made
        else:
            noted = None if is_drop(var) else self.parent.note_known(var, number)
            first = number == self.parent.order(self.sweep)[0]
            if noted is None and not carry and not (first and not is_drop(var)):
                return None
            made = noted or Var(var.aval)
        return made

    def _inputs(self, number: int) -> list[Var]:
        return [
            *(var for var, _ in self.fixed[number].values()),
            *self.carried[number],
            *(var for var, _ in self.scanned[number].values()),
        ]

    def defined(self, number: int) -> set[Var]:
        made = {var for eqn in self.lists[number] for var in eqn.outvars if not is_drop(var)}
        return made | set(self._inputs(number))

    def foreign(self, number: int, results: Sequence[tuple[Var, Atom]]) -> list[Var]:
        """Return what a slice's body reads of the bodies of others."""
        own = self.defined(number) | set(open_jaxpr(self.analysis.closed).constvars)
        read = [atom for eqn in self.lists[number] for atom in eqn.invars]
        read += [atom for _, atom in results]
        return list(dict.fromkeys(a for a in read if isinstance(a, Var) and a not in own))

    def live(self, number: int, results: Sequence[tuple[Var, Atom]]) -> list[JaxprEqn]:
        """Return the equations of a slice's body that anything is made of."""
        wanted: list[Atom] = [atom for _, atom in results]
        for other, eqns in enumerate(self.lists):
            if other != number:
                wanted += [atom for eqn in eqns for atom in eqn.invars]
        return list(live_eqns(self.lists[number], wanted))

    def _region(
        self,
        number: int,
        results: Sequence[tuple[Var, Atom]],
        foreign: Sequence[Var],
        out: Sequence[Var],
        handed: dict[Var, Var],
    ) -> None:
        scan = self.region.is_scan
        fixed, scanned = list(self.fixed[number].values()), list(self.scanned[number].values())
        (scanned if scan else fixed).extend((var, handed[var]) for var in foreign)
        inner = [*(var for var, _ in fixed), *self.carried[number], *(var for var, _ in scanned)]
        carry = [self.carry_in(k, number) for k in range(self.region.num_carry)]
        operands = [*(held for _, held in fixed), *carry, *(held for _, held in scanned)]
        outvars = [*(atom for _, atom in results), *out]
        made = [*(var for var, _ in results), *(handed[var] for var in out)]
        jaxpr = open_jaxpr(self.analysis.closed)
        body = ClosedJaxpr(
            jaxpr_of(jaxpr, list(jaxpr.constvars), inner, outvars, self.lists[number]),
            consts(self.analysis.closed),
        )
        if scan:
            self.write_scan(body, len(fixed), operands, made, number)
        else:
            changed = with_bodies(self.eqn, lambda _: body)
            self.parent.emit(changed.replace(invars=operands, outvars=made), number)
        for var, held, of in self.sums_made:
            if of == number:
                self.add_up(var, held, number)

    def add_up(self, var: Var, made: Var, number: int) -> None:
        """Add a slice's part of a sum over the slices."""
        add_part(self.parent, var, made, number)

    def carry_in(self, k: int, number: int) -> Atom:
        """Return what a slice's scan starts a carry from."""
        atom = self.eqn.invars[self.region.num_consts + k]
        value = self.analysis.value(self.carries_in[k])
        if value.state == "addend":
            return addend(self.parent, atom, number)
        return self.parent.operand(atom, value.layout, number)

    def loop(self, number: int) -> JaxprEqn:
        """Return the scan of a slice."""
        return self.eqn

    def write_scan(
        self,
        body: ClosedJaxpr,
        num_consts: int,
        operands: Sequence[Atom],
        results: Sequence[Var],
        number: int,
    ) -> None:
        """Write a slice's scan."""
        run = scan_of(self.loop(number), body, num_consts, self.region.num_carry)
        self.parent.compute(object(), run, operands, results, number, self.eqn)


def _whole(var: Var) -> Layout:
    return whole(len(shape_of(var)))


def write_region(parent: Writer, eqn: JaxprEqn, region: Region) -> None:
    """Write a scan over layers or a recomputation for all slices."""
    writer = BodyWriter(parent, eqn, region)
    writer.write()
    writer.finish()

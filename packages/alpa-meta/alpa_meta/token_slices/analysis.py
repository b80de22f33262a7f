"""How a whole program runs in token slices, or why it cannot.

The equations are walked in order. A value is

    known    the same for all slices: before the step's microbatch runs (weights, masks), after its
             forward sweep (the loss, the number of labels) or after the backward sweep (gradients)
    sliced   each slice has its rows of it, and may look back on those of the slices before
    addend   each slice has a part of a sum over the slices; inside loops, elsewhere it is added up

The forward sweep runs the slices in order, the backward sweep in reverse. What a sweep reads must
be known before it. Which of two dims of tokens holds the keys is tried: a wrong choice meets an
operator that cannot run, or a mask that does not hide what comes after.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from attrs import evolve

from alpa_meta.compat import (
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Var,
    consts,
    dtype_of,
    is_drop,
    open_jaxpr,
    shape_of,
    source_line,
)
from alpa_meta.operators import operator_of, operator_signature
from alpa_meta.operators.ordering import running_dim
from alpa_meta.operators.regions import bodies, is_region
from alpa_meta.token_slices.bodies import region
from alpa_meta.token_slices.bounds import Scope
from alpa_meta.token_slices.choices import Choices, Refusal, place_of
from alpa_meta.token_slices.convolved import met_elements
from alpa_meta.token_slices.cuts import Cutting
from alpa_meta.token_slices.hints import input_value, longer_dim, token_hints
from alpa_meta.token_slices.key_moves import keys_moved
from alpa_meta.token_slices.later_blocks import Unknowns
from alpa_meta.token_slices.looking_back import is_recomputed, looks_back, recomputed_values
from alpa_meta.token_slices.mask_facts import MaskFacts
from alpa_meta.token_slices.masking import is_soft, rest_of
from alpa_meta.token_slices.mixing import mixing_of
from alpa_meta.token_slices.moves import moved, moved_dim, one_token
from alpa_meta.token_slices.places import KEY, ROW, Layout, Place, Slices, kinds, whole
from alpa_meta.token_slices.reading import UnreadableError, keys_of, reading_of
from alpa_meta.token_slices.recurrences import runs_again
from alpa_meta.token_slices.values import (
    AFTER,
    BEFORE,
    Added,
    Analysis,
    Decision,
    Known,
    Recomputed,
    Running,
    Sliced,
    SlicingError,
    TokenLoop,
    Value,
    Window,
    WindowSum,
    is_joinable,
)
from alpa_meta.token_slices.windows import layout_of_window, window_of

_MOST_TRIES = 256


def analysed(
    closed: ClosedJaxpr, phases: Sequence[str], tokens: Sequence[bool], slices: Slices
) -> Analysis:
    """Return how a program runs in slices; SlicingError if it cannot.

    `tokens` says which inputs hold the tokens of the batch.
    """
    jaxpr = open_jaxpr(closed)
    inputs = [
        input_value(var, held, slices) for var, held in zip(jaxpr.invars, tokens, strict=True)
    ]
    sweeps = tuple(("forward", "backward", "update").index(phase) for phase in phases)
    first, backward, chunk = "", False, 0
    for choices in map(Choices, ("", "refused", "all")):
        for _ in range(_MOST_TRIES):
            choices.position = 0
            walk = Walk(closed, sweeps, slices, choices, None)
            try:
                walk.run(inputs)
            except Refusal as refusal:
                first, chunk = first or refusal.reason, chunk or choices.chunk
                backward = backward or sweeps[len(walk.found.decisions)] != BEFORE
                if not refusal.chosen or not choices.turn_last():
                    break
            else:
                return walk.found
        if not backward:
            break
    raise SlicingError(first, chunk)


class Walk:
    """The walk through a program or a body. In a body, sums over the slices stay parts."""

    def __init__(
        self,
        closed: ClosedJaxpr,
        sweeps: tuple[int, ...],
        slices: Slices,
        choices: Choices,
        parent: Walk | None,
        outer: Mapping[Var, Atom] | None = None,
        scanned: frozenset[Var] = frozenset(),
    ) -> None:
        jaxpr = open_jaxpr(closed)
        self.found = Analysis(closed, sweeps, slices)
        self.eqns, self.inside = jaxpr.eqns, parent is not None
        self.slices, self.choices, self.parent = slices, choices, parent
        scope: Scope | None = parent.scope if parent is not None else None
        constants = {
            var: np.asarray(value)
            for var, value in zip(jaxpr.constvars, consts(closed), strict=True)
            if isinstance(dtype_of(var), np.dtype)
        }
        self.scope: Scope = Scope(jaxpr.eqns, constants, slices, scope, outer, scanned)
        self.found.scope = self.scope
        self.masks = MaskFacts(self.found, self.scope)
        self.unknowns: Unknowns = parent.unknowns if parent is not None else Unknowns()
        for var in jaxpr.constvars:
            layout = whole(len(shape_of(var)))
            self.found.values[var] = Value("known", layout, of_batch=True)

    @functools.cached_property
    def read(self) -> set[Atom]:
        """All that the equations read or the body returns."""
        atoms = itertools.chain(
            open_jaxpr(self.found.closed).outvars, *(e.invars for e in self.eqns)
        )
        return {atom for atom in atoms if isinstance(atom, Var)}

    def run(self, inputs: Sequence[Value]) -> Analysis:
        """Walk all equations, given what is known of the inputs."""
        values, pairs = self.found.values, zip(open_jaxpr(self.found.closed).invars, inputs)
        values.update(pairs)
        if not self.inside:
            self.scope.weights = frozenset(v for v, value in values.items() if not value.of_batch)
        for k, (eqn, sweep) in enumerate(zip(self.eqns, self.found.sweeps, strict=True)):
            try:
                decision, results = self._decided(eqn, sweep)
            except (UnreadableError, Refusal) as error:
                self._note(error)
                if self.choices.recomputes and is_recomputed(self, eqn, sweep):
                    decision, results = Recomputed(), recomputed_values(eqn)
                elif isinstance(error, Refusal):
                    raise
                else:
                    raise self._refusal(k, error.reason) from None
            self.found.decisions.append(decision)
            for var, value in zip(eqn.outvars, results, strict=True):
                if not is_drop(var):
                    values[var] = value
        return self.found

    def _note(self, error: UnreadableError | Refusal) -> None:
        """Note what slices must be multiples of for an equation."""
        if isinstance(error, UnreadableError) and error.chunk:
            self.choices.chunk = math.lcm(self.choices.chunk or 1, error.chunk)

    def _refusal(self, k: int, reason: str) -> Refusal:
        """Return the refusal of an equation; its line may only be known of what follows."""
        lines = (line for eqn in self.eqns[k:] if (line := source_line(eqn)))
        place = " at ".join([self.eqns[k].primitive.name, *itertools.islice(lines, 1)])
        told = f"{place} {reason}"
        if not self.found.is_sliced and self.found.whole:
            told = self.found.whole  # why all that precedes is whole
        return Refusal(told, bool(self.choices.position))

    # ------------------------------------------------------------------ deciding

    def _decided(self, eqn: JaxprEqn, sweep: int) -> tuple[Decision, list[Value]]:
        operands = [self.found.value(atom) for atom in eqn.invars]
        in_parts = any(value.in_parts for value in operands)
        if in_parts and self.choices.recomputes == "all" and is_recomputed(self, eqn, sweep):
            return Recomputed(), recomputed_values(eqn)
        of_batch = all(value.of_batch for value in operands)
        meets = any(any(value.layout) for value in operands if not value.in_parts)
        if sweep == AFTER or not in_parts and (of_batch or not meets):
            return self._known(eqn, operands, sweep)
        if max((one.when for one in operands if not one.in_parts), default=BEFORE) > sweep:
            if not in_parts:
                return self._known(eqn, operands, sweep)
            late = (one for one in operands if not one.in_parts and one.when > sweep)
            why = next((f": {value.why}" for value in late if value.why), "")
            return self._whole_after(
                eqn,
                operands,
                sweep,
                f"needs a value of all tokens, which is known after the last slice{why}",
            )
        if any(value.state == "addend" for value in operands):
            return self._added(eqn, operands, sweep)
        if eqn.effects and in_parts:
            raise UnreadableError("has effects, which slices would repeat")
        if is_region(eqn):
            return region(self, eqn, operands, sweep)
        running = running_dim(eqn)
        if running is not None and in_parts and operands[0].layout[running] is not None:
            return self._running(eqn, operands, running, sweep)
        if in_parts and (taken := one_token(eqn, operands[0])) is not None:
            if self.inside:
                raise UnreadableError("takes one token inside a loop or recomputation")
            return taken, [Value("known", whole(len(shape_of(eqn.outvars[0]))), sweep + 1)]
        dim = moved_dim(eqn, self.layouts(operands)) if in_parts else None
        if dim is not None:
            return self._moved(eqn, dim, operands, sweep)
        try:
            window = window_of(eqn, [value.layout for value in operands], sweep)
            if window is not None:
                return self._window(eqn, operands, window, sweep)
            return self._sliced(eqn, operands, sweep)
        except UnreadableError as error:
            self._note(error)
            if not in_parts:
                self.found.whole = self.found.whole or f"{place_of(eqn)} {error.reason}"
                return self._known(eqn, operands, sweep)
            return self._whole_after(eqn, operands, sweep, error.reason)

    def _whole_after(
        self, eqn: JaxprEqn, operands: Sequence[Value], sweep: int, reason: str
    ) -> tuple[Decision, list[Value]]:
        """Return how an equation of the backward pass that cannot run in slices runs after them."""
        if sweep == BEFORE or self.inside or not all(map(is_joinable, operands)):
            raise UnreadableError(reason)
        decision, results = self._known(eqn, operands, AFTER)
        return decision, [evolve(value, why=f"{place_of(eqn)} {reason}") for value in results]

    def _cutting(self, operands: Sequence[Value], sweep: int) -> Cutting:
        free = tuple(not value.in_parts or value.when < sweep for value in operands)
        return Cutting(self.slices, sweep == BEFORE, () if all(free) else free)

    def _known(
        self, eqn: JaxprEqn, operands: Sequence[Value], sweep: int
    ) -> tuple[Decision, list[Value]]:
        if sweep != AFTER and any(value.in_parts for value in operands):
            raise UnreadableError("needs all tokens at once")
        when = max((value.done for value in operands), default=BEFORE)
        of_batch = all(value.of_batch for value in operands) and not eqn.effects
        layouts = token_hints(eqn, operands, self.slices) if of_batch else None
        why = next((value.why for value in operands if value.why and value.done == when), "")
        results = [
            Value(
                "known",
                whole(len(shape_of(var))) if layouts is None else layouts[k],
                when,
                of_batch,
                longer=longer_dim(eqn, operands, layouts) if of_batch else None,
                why=why,
            )
            for k, var in enumerate(eqn.outvars)
        ]
        return Known(), results

    def layouts(self, operands: Sequence[Value]) -> list[Layout]:
        """Return the layouts that count: of known values only where there are no others."""
        in_parts = any(value.in_parts for value in operands)
        return [
            value.layout if value.in_parts or not in_parts else whole(len(value.layout))
            for value in operands
        ]

    def _sliced(
        self, eqn: JaxprEqn, operands: Sequence[Value], sweep: int
    ) -> tuple[Decision, list[Value]]:
        kind = operator_signature(eqn), sweep
        mixing, unproved = mixing_of(eqn, operands, self.masks, self.slices)
        reading = mixing or reading_of(
            eqn,
            self.layouts(operands),
            self._cutting(operands, sweep),
            lambda names: self.choices.choose(names, kind),
        )
        for atom, value, layout in zip(eqn.invars, operands, reading.operands, strict=True):
            self.check_read(atom, value, layout, sweep)
        pairs = list(zip(eqn.invars, operands, reading.operands, strict=True))
        rests = [self.masks.operand_rest(atom, value, layout) for atom, value, layout in pairs]
        rest = rest_of(eqn, reading, rests) if self.slices.count > 1 else None
        rest = rest if self.masks.tells_apart(eqn, reading, rests) else None
        dead = self.masks.is_dead(eqn, reading)
        self.masks.follow(eqn)
        if dead and is_soft(rest, dtype_of(eqn.outvars[0])):
            raise UnreadableError(
                "masks with a finite constant, and a token all of whose keys are masked cannot be "
                "excluded, which would then look at later ones; mask with -inf, or so that each "
                "token may look at itself"
            )
        results = []
        for k, (var, layout) in enumerate(zip(eqn.outvars, reading.results, strict=True)):
            if reading.is_sum(k):
                results.append(self._sum(eqn, var, sweep, reading.combined, unproved))
            elif reading.scatters(k):
                if sweep == BEFORE:
                    raise UnreadableError("gives later tokens a part in earlier ones")
                layout = tuple(place and evolve(place, kind=ROW) for place in layout)
                results.append(Value("sliced", layout, sweep))
            else:
                results.append(Value("sliced", layout, sweep, rest=rest, dead=dead))
        return Sliced(reading), results

    def _sum(
        self, eqn: JaxprEqn, var: Var, sweep: int, combined: str = "add", why: str = ""
    ) -> Value:
        """Return the value of a sum over the slices, or of another combination of their parts."""
        if self.inside and combined != "add":
            raise UnreadableError(f"takes the {combined} over all tokens")
        layout, why = whole(len(shape_of(var))), f"{place_of(eqn)} {why or 'reduces the tokens'}"
        if not self.inside:
            return Value("known", layout, sweep + 1, why=why)
        return Value("addend", layout, sweep, why=why)

    def check_read(self, atom: Atom, value: Value, layout: Layout, sweep: int) -> None:
        """Raise UnreadableError unless a slice can be given an operand in a layout."""
        if not value.in_parts:
            return
        for have, want in zip(value.layout, layout, strict=True):
            if have is not None and want != have:
                if want is None or have.kind == KEY:
                    raise UnreadableError("reads the keys of a slice as its rows")
                if want.kind == ROW:
                    if KEY in kinds(value.layout) and not self._has_keys(value, have, want):
                        raise UnreadableError("takes rows of several slices, which differ in keys")
                    cutting = Cutting(self.slices, sweep == BEFORE)
                    if value.when < sweep or cutting.is_ready(have, want):
                        continue
                    raise UnreadableError("reads tokens after its own")
                if have.cuts != want.cuts:
                    raise UnreadableError("looks back on what is made of later tokens")
                if not looks_back(self, atom):
                    raise UnreadableError("looks back on tokens from the backward pass")

    def _has_keys(self, value: Value, have: Place, want: Place) -> bool:
        """Return whether rows can be taken at another place: of slices that have no more keys, and
        nothing behind those."""
        pairs = zip(self.slices.cuts_of(want), self.slices.cuts_of(have), strict=True)
        alone = all(one is None or one.outer == 1 and not one.after for one in value.layout)
        return value.rest == 0.0 and alone and all(one <= two for one, two in pairs)

    # ------------------------------------------------------------------ other kinds

    def _added(
        self, eqn: JaxprEqn, operands: Sequence[Value], sweep: int
    ) -> tuple[Decision, list[Value]]:
        """Return how an operator runs on parts of sums: one that is linear in them together."""
        parts = {k for k, value in enumerate(operands) if value.state == "addend"}
        operator = operator_of(eqn)
        why = next((value.why for value in operands if value.why), "")
        reason = f"needs a value of all tokens inside a loop or recomputation{why and ': '}{why}"
        if any(value.state == "sliced" for value in operands) or is_region(eqn):
            raise UnreadableError(reason)
        for group in operator.linear_groups(eqn):
            if parts <= set(group) and operator.sums_survive(eqn):
                layouts = (whole(len(shape_of(var))) for var in eqn.outvars)
                return Added(tuple(group)), [
                    Value("addend", layout, sweep, why=why) for layout in layouts
                ]
        if operator.passes_on:
            return Added(tuple(sorted(parts))), list(operands)
        raise UnreadableError(reason)

    def _moved(
        self, eqn: JaxprEqn, dim: int, operands: Sequence[Value], sweep: int
    ) -> tuple[Decision, list[Value]]:
        keys = keys_moved(eqn, dim, operands, self.slices, sweep)
        if keys is not None:
            for atom, value, layout in zip(eqn.invars, operands, keys[0].operands, strict=True):
                self.check_read(atom, value, layout, sweep)
            return keys
        decision, results = moved(eqn, dim, operands, self._cutting(operands, sweep), sweep)
        dead = any(value.dead for value in operands)
        results = [evolve(value, dead=dead) for value in results]
        atoms = zip(eqn.invars, operands, strict=True)
        if sweep == BEFORE or not any(place.cuts for place in decision.places):
            return decision, results
        if self.choices.recomputes and is_recomputed(self, eqn, sweep):
            return Recomputed(), recomputed_values(eqn)
        if all(not one.in_parts or looks_back(self, atom) for atom, one in atoms):
            again, remade = moved(eqn, dim, operands, Cutting(self.slices, True), sweep)
            if again == decision or not any(place.cuts for place in again.places):
                return evolve(again, again=True), [evolve(one, dead=dead) for one in remade]
        return decision, results

    def _running(
        self, eqn: JaxprEqn, operands: Sequence[Value], dim: int, sweep: int
    ) -> tuple[Decision, list[Value]]:
        layout = operands[0].layout
        place = layout[dim]
        alone = place is not None and place == Place(ROW, cuts=place.cuts)
        if layout.count(None) < len(layout) - 1 or not alone:
            raise UnreadableError("runs along tokens that are merged with another dim, or keys")
        again = runs_again(bool(eqn.params["reverse"]), sweep)
        found = Running(layout, again), [Value("sliced", layout, sweep)]
        return self.again(eqn, operands, *found, sweep)

    def _window(
        self, eqn: JaxprEqn, operands: Sequence[Value], window: Window | WindowSum, sweep: int
    ) -> tuple[Decision, list[Value]]:
        if isinstance(window, WindowSum):
            self._check_met(eqn, operands[0], window, sweep)
            return window, [self._sum(eqn, eqn.outvars[0], sweep)]
        if window.high and operands[0].state != "sliced":
            raise UnreadableError("convolves from later tokens of what is no gradient")
        if window.low:
            self.check_read(eqn.invars[0], operands[0], keys_of(operands[0].layout), sweep)
        return window, [Value("sliced", layout_of_window(eqn, window), sweep)]

    def _check_met(self, eqn: JaxprEqn, met: Value, window: WindowSum, sweep: int) -> None:
        """Raise UnreadableError unless each slice has what its rows meet of the left operand."""
        if not met.in_parts or met.when < sweep:
            return
        there = looks_back(self, eqn.invars[0])
        for number in range(self.slices.count):
            rows = self.slices.held(window.rows, number)
            last = met_elements(eqn, window.dim, rows)[1]
            if not there or last > self.slices.cuts_of(window.met)[number + 1]:
                raise UnreadableError("convolves tokens of the backward pass with others")

    def again(
        self,
        eqn: JaxprEqn,
        operands: Sequence[Value],
        decision: TokenLoop | Running,
        results: list[Value],
        sweep: int,
    ) -> tuple[Decision, list[Value]]:
        """Return a decision, if a slice may be given all tokens up to its own where it needs
        them."""
        if decision.again:
            layouts = decision.operands if isinstance(decision, TokenLoop) else [decision.layout]
            for atom, value, layout in zip(eqn.invars, operands, layouts, strict=True):
                self.check_read(atom, value, keys_of(layout), sweep)
        return decision, results

    def body(
        self,
        eqn: JaxprEqn,
        number: int,
        inputs: Sequence[Value],
        outer: Mapping[Var, Atom],
        sweep: int,
        carried: range | None = None,
        place: Place | None = None,
        within: Mapping[Var, frozenset[int]] | None = None,
    ) -> Walk:
        """Return the walk through a body of a region that has these inputs; `outer` says which of
        them are what outside. Of a scan, those in `carried` are its carry; `place` is that of the
        blocks of tokens that it runs over, `within` has their dims in a block of keys."""
        body = bodies(eqn)[number]
        jaxpr, stacked = open_jaxpr(body), carried is not None
        scanned = frozenset(jaxpr.invars[carried.stop :]) if carried is not None else frozenset()
        sweeps = (sweep,) * len(jaxpr.eqns)
        walk = Walk(body, sweeps, self.slices, self.choices, self, outer, scanned)
        walk.scope.place = place
        walk.masks.within.update(within or {})
        walk.run(inputs)
        first = 0 if carried is None else len(carried)
        for var, atom in list(zip(eqn.outvars, jaxpr.outvars, strict=True))[first:]:
            self.scope.made_in[var] = walk.scope, atom, stacked
        return walk

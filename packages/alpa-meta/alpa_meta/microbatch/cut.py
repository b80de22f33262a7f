"""A step cut into microbatches: what one microbatch runs, and what it is given beside its examples.

The program of the whole batch is walked in order (`flow`). Where an operator cannot run on what a
microbatch holds, as in `sum(loss * mask) / sum(mask)`, it is given what it lacks:

    statistic   what depends on no parameter (counts, weights, places of the data) is computed once
                per step on the whole batch, before the microbatches
    total       a sum that depends on parameters (the share of tokens that each expert got, the
                gradient of an earlier loss) is added up over the microbatches by a forward pass of
                its own, before the others, and read whole: gradients are linear in what reads it,
                so they add up
    number      which microbatch it is: random bits and counted places are those of its own examples

What no gradient depends on is moved into the update instead (`gathering`). What is left, such as
the statistics of batch normalisation, which every layer takes of the last one's results, is refused
with the user's line.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray

from alpa_meta.compat import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    consts,
    dtype_of,
    is_drop,
    open_jaxpr,
    shape_of,
)
from alpa_meta.microbatch.batched_while import ends_alone, shared_counters, steered
from alpa_meta.microbatch.cut_step import Cut, Given, place_of, statistics_of, variables
from alpa_meta.microbatch.demand import with_parts_made
from alpa_meta.microbatch.flow import Atom, Run, read, run_of
from alpa_meta.microbatch.gathering import aside, gathered
from alpa_meta.microbatch.placement import MIXED, REPLICATED, MixedError, Placement, Reading, split
from alpa_meta.microbatch.slicing import Writer
from alpa_meta.operators import operator_of
from alpa_meta.operators.regions import is_region
from alpa_meta.passes.added_equations import equations_of, jaxpr_of
from alpa_meta.passes.live import live_eqns


def cut_program(
    closed: ClosedJaxpr,
    phases: Sequence[str],
    inputs: Sequence[Placement],
    trained: Sequence[bool],
    num_microbatches: int,
) -> Cut:
    """Return the whole program cut into microbatches.

    `inputs` are the placements of its inputs, `trained` says which are parameters: values that
    depend on them are not computed on the whole batch.
    """
    walk = _Walk(closed, phases, inputs, trained, num_microbatches)
    walk.walk()
    if not walk.reasons:
        cut = walk.written()
        walk.check_gradients(phases, cut)
        if not walk.reasons:
            return cut
    return Cut(closed, tuple(phases), {}, (), None, {}, tuple(walk.reasons))


class _Walk:
    """The walk through a whole program, and what it found."""

    def __init__(
        self,
        closed: ClosedJaxpr,
        phases: Sequence[str],
        inputs: Sequence[Placement],
        trained: Sequence[bool],
        num_microbatches: int,
    ) -> None:
        self.closed, self.jaxpr = closed, open_jaxpr(closed)
        self.phases = list(phases)
        self.count = num_microbatches
        self.known: dict[Var, Placement] = dict(zip(self.jaxpr.invars, inputs, strict=True))
        self.trained = {
            var for var, is_trained in zip(self.jaxpr.invars, trained, strict=True) if is_trained
        }
        self.runs: list[Run | None] = []
        self.whole: dict[Var, Var] = {}  # given statistic -> the value of the whole program
        self.totals: dict[Var, Var] = {}  # given total -> the value that is added up
        self.read_whole: dict[int, dict[Var, Var]] = {}  # by equation: operands given whole
        self.before: dict[int, list[JaxprEqn]] = {}  # by equation: those of the wholes it reads
        self.from_statistics: set[int] = set()  # equations that only the statistics run
        self.gathered: dict[Var, Var] = {}  # the whole of a value -> the value, which is split
        self.reasons: list[str] = []
        self._aside = aside(self.jaxpr.eqns, self.phases)
        self._given: dict[Var, Var] = {}  # value -> the variable that holds the whole of it
        self._narrowed: dict[Var, Var] = {}  # total, added up in float32 -> in its own type
        self._after_total: set[Var] = set()
        self._phase_of: dict[Var, str] = {}
        self._maker: dict[Var, JaxprEqn] = {}
        self._cause: dict[Var, str] = {}
        self._own: set[Var] = set()  # replicated in name: what steers a microbatch is its own
        self._first_total = ""

    def walk(self) -> None:
        for k, (eqn, phase) in enumerate(zip(self.jaxpr.eqns, self.phases, strict=True)):
            if phase == "update":
                self._update(k, eqn)
                self.runs.append(None)
                continue
            run = self._run(k, eqn)
            self.runs.append(run)
            if self.phases[k] == "update":
                continue
            results = map(self._of_statistic, eqn.outvars) if run is None else run.reading.results
            depends = [self.read_whole.get(k, {}).get(a, a) for a in variables(eqn)]
            for var, placement in zip(eqn.outvars, results, strict=True):
                if is_drop(var):
                    continue
                self.known[var], self._phase_of[var] = placement, phase
                self._maker[var] = eqn
                if any(atom in self.trained for atom in depends):
                    self.trained.add(var)
                if any(atom in self._after_total for atom in depends):
                    self._after_total.add(var)
            own = any(atom in self._own for atom in depends)
            if run is not None and (own or steered(eqn, run)):
                self._note_own(eqn, run, k)
        for number, atom in enumerate(self.jaxpr.outvars):
            if not isinstance(atom, Literal):
                if self.known.get(atom, REPLICATED).outer > 1 and gathered(atom) is not None:
                    atom = self._put_together(number, atom)
                self._leaves(atom)

    def check_gradients(self, phases: Sequence[str], cut: Cut) -> None:
        """Refuse microbatches that make no gradients of their examples, as the update makes all."""
        of_gradients = zip(open_jaxpr(cut.closed).eqns, cut.phases, strict=True)
        used = (v for eqn, phase in of_gradients if phase == "backward" for v in variables(eqn))
        if any(cut.placements.get(var, REPLICATED).kind != "replicated" for var in used):
            return
        eqns = self.jaxpr.eqns[: len(phases)]
        for k, (eqn, phase) in enumerate(zip(eqns, phases, strict=True)):
            kinds = {read(atom, self.known).kind for atom in eqn.invars}
            statistic = k in self.from_statistics and "split" in kinds
            if statistic or self.read_whole.get(k) and phase != self.phases[k]:
                return self._refuse(
                    f"{place_of(self.jaxpr.eqns[k:])} takes more examples of the batch at a time "
                    "than a microbatch has, and all gradients come after it"
                )

    def _note_own(self, eqn: JaxprEqn, run: Run, k: int) -> None:
        """Note results that each microbatch has its own of: they may say where its examples stand
        in a loop's buffer, but are no part of any result."""
        made = [var for var in eqn.outvars if not is_drop(var)]
        replicated = {var for var in made if self.known[var].kind == "replicated"}
        if ends_alone(eqn, run):
            body = run.bodies[1]
            carries = open_jaxpr(body.body).invars[eqn.params["body_nconsts"] :]
            counters = shared_counters(eqn, body)
            pairs = zip(eqn.outvars, carries, strict=True)
            replicated &= {var for var, carry in pairs if carry in counters}
        self._own |= replicated
        indices = operator_of(eqn).indices
        places = () if indices is None else indices(eqn)
        operands = [atom for n, atom in enumerate(eqn.invars) if n not in places]
        used = any(isinstance(atom, Var) and atom in self._own for atom in operands)
        for var in made if used and not is_region(eqn) else ():
            if var not in replicated and self.known[var].kind != "mixed":
                self.known[var] = MIXED
                self._cause[var] = self._own_used([eqn, *self.jaxpr.eqns[k + 1 :]])

    def _own_used(self, eqns: Sequence[JaxprEqn]) -> str:
        return (
            f"{place_of(eqns)} uses how long the examples of the batch were worked on, which every "
            "microbatch has its own of"
        )

    def _update(self, k: int, eqn: JaxprEqn) -> None:
        """Note what the update reads that no microbatch can give, and what it is given whole."""
        parts = []
        for atom in variables(eqn):
            if self.known.get(atom, REPLICATED).kind != "split" or atom in self._own:
                self._leaves(atom)
            elif gathered(atom) is None:
                self._refuse(
                    f"{place_of([eqn])} works on the examples of the batch after the update"
                )
            else:
                parts.append(atom)
        self._gather(k, parts)
        self.known.update((var, REPLICATED) for var in eqn.outvars if not is_drop(var))

    def _gather(self, k: int, parts: Sequence[Var]) -> None:
        """Give an equation of the update the whole of what microbatches have parts of."""
        for atom in parts:
            self._given[atom] = self._given.get(atom) or Var(atom.aval)
            self.gathered[self._given[atom]] = atom
        self.read_whole[k] = {atom: self._given[atom] for atom in parts}

    def _put_together(self, number: int, atom: Var) -> Var:
        """Have the update make a result of the examples that no microbatch has a block of."""
        whole = Var(atom.aval)
        (copy,) = equations_of(jnp.copy, [atom], [whole])
        outvars = [whole if k == number else one for k, one in enumerate(self.jaxpr.outvars)]
        self.jaxpr = self.jaxpr.replace(eqns=[*self.jaxpr.eqns, copy], outvars=outvars)
        self.phases.append("update")
        self.runs.append(None)
        self._update(len(self.phases) - 1, copy)
        return whole

    def _leaves(self, atom: Var) -> None:
        placement = self.known.get(atom, REPLICATED)
        if placement.kind == "mixed":
            self._refuse(self._cause[atom])
        if placement.outer > 1:
            self._refuse(
                f"{place_of([self._maker[atom]])} is returned with the batch merged behind another "
                "dim, of which no microbatch has a block; return it with a dim of examples"
            )
        if atom in self._own:
            self._refuse(self._own_used([self._maker[atom]]))

    def _refuse(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)

    def _run(self, k: int, eqn: JaxprEqn) -> Run | None:
        """Return how a microbatch runs an equation; None if the statistics or the update do."""
        operands = [read(atom, self.known) for atom in eqn.invars]
        mixed = [a for a in variables(eqn) if self.known.get(a, REPLICATED).kind == "mixed"]
        if mixed:
            return self._mixed(eqn, self._cause[mixed[0]])
        if any(self._phase_of.get(atom) == "update" for atom in variables(eqn)):
            return self._in_update(k, eqn, eqn)
        try:
            run = run_of(eqn, operands, self.count)
        except MixedError as error:
            inner = error.eqn
        else:
            if run.reading.blocks_along is None or k not in self._aside:
                return run
            inner = eqn  # batches one behind the other, which no microbatch can give
        parts = [
            atom
            for atom, operand in zip(eqn.invars, operands, strict=True)
            if operand.kind in ("sum", "extreme") and not isinstance(atom, Literal)
        ]
        lacking = ""
        if parts:
            whole = [one if one.kind not in ("sum", "extreme") else REPLICATED for one in operands]
            lacking = next((why for atom in parts if (why := self._why_not_whole(atom))), "")
            try:
                run = run_of(eqn, whole, self.count)
            except MixedError as error:
                inner = error.eqn
            else:
                if not lacking:
                    self.read_whole[k] = {atom: self._given_whole(atom, k) for atom in parts}
                    self._first_total = self._first_total or place_of([eqn])
                    return run
        if not eqn.effects and not any(atom in self.trained for atom in variables(eqn)):
            self.from_statistics.add(k)
            self.whole.update((var, var) for var in eqn.outvars if not is_drop(var))
            return None
        if k in self._aside:
            return self._in_update(k, eqn, inner)
        return self._mixing(k, eqn, inner, lacking)

    def _mixing(self, k: int, eqn: JaxprEqn, inner: JaxprEqn, lacking: str = "") -> Run:
        place = place_of([inner, eqn, *self.jaxpr.eqns[k + 1 :]])
        return self._mixed(
            eqn,
            f"{place} mixes examples of the batch in a way that microbatches cannot reproduce"
            f"{lacking}",
        )

    def _in_update(self, k: int, eqn: JaxprEqn, inner: JaxprEqn) -> Run | None:
        """Note that the update runs an equation, on the whole of what it reads."""
        kinds = {atom: read(atom, self.known) for atom in variables(eqn)}
        parts = [atom for atom, placement in kinds.items() if placement.kind == "split"]
        if self._own & kinds.keys() or any(gathered(atom) is None for atom in parts):
            return self._mixing(k, eqn, inner)
        self._gather(k, parts)
        self.phases[k] = "update"
        for var in eqn.outvars:
            if not is_drop(var):
                self.known[var], self._phase_of[var] = REPLICATED, "update"
        return None

    def _of_statistic(self, var: Var) -> Placement:
        """Return the placement of what is computed on the whole batch: each microbatch gets its
        part of what has an entry for each example, such as a shuffled batch.
        """
        shape = shape_of(var)
        sizes = {shape_of(one)[0] for one in self.jaxpr.invars if self.known[one].kind == "split"}
        return split(0) if shape and shape[0] in sizes else REPLICATED

    def _mixed(self, eqn: JaxprEqn, cause: str) -> Run:
        self._cause.update((var, cause) for var in eqn.outvars if not is_drop(var))
        operands = tuple(read(atom, self.known) for atom in eqn.invars)
        return Run(Reading(operands, (MIXED,) * len(eqn.outvars)))

    def _why_not_whole(self, atom: Atom) -> str:
        """Return why a microbatch cannot be given the whole of a sum, empty if it can."""
        if isinstance(atom, Literal) or self._is_known_whole(atom):
            return ""
        operands = self._summands(atom)
        if operands is not None:
            return next((why for one in operands if (why := self._why_not_whole(one))), "")
        if atom in self._after_total:
            return (
                " (it works on a sum over all of them, which depends on parameters and, in turn, "
                f"on such a sum, which {self._first_total} works on)"
            )
        return " (it works on a sum over all of them, which is known after the backward pass)"

    def _is_known_whole(self, atom: Var) -> bool:
        """Return whether a value is replicated, or a sum that is known before any gradient."""
        if self.known.get(atom, REPLICATED).kind == "replicated" or atom not in self.trained:
            return True
        early = self._phase_of.get(atom) == "forward" and atom not in self._after_total
        return early and self.known[atom].kind != "split"

    def _summands(self, atom: Var) -> Sequence[Atom] | None:
        """Return the operands of the equation that a sum comes from if it is linear in sums, so
        that its whole is computed from theirs; None if it adds up examples.
        """
        maker = self._maker.get(atom)
        if maker is None or self.known[atom].kind != "sum" or is_region(maker):
            return None
        kinds = {read(one, self.known).kind for one in maker.invars}
        return maker.invars if kinds <= {"replicated", "sum"} else None

    def _given_whole(self, atom: Var, k: int) -> Var:
        """Return the variable that holds the whole of a sum or extreme, for equation `k`."""
        if atom in self._given or self.known.get(atom, REPLICATED).kind == "replicated":
            return self._given.get(atom, atom)
        found = self._given[atom] = Var(atom.aval)
        if atom not in self.trained:
            self.whole[found] = atom
            return found
        self.trained.add(found)
        self._after_total.add(found)
        if not self._is_known_whole(atom):
            maker = self._maker[atom]
            operands = [
                one if isinstance(one, Literal) else self._given_whole(one, k)
                for one in maker.invars
            ]
            self.before.setdefault(k, []).append(maker.replace(invars=operands, outvars=[found]))
            return found
        dtype = dtype_of(atom)
        narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
        total = Var(ShapedArray(shape_of(atom), np.float32)) if narrow else found
        self.totals[total] = atom
        if narrow:
            self._narrowed[total] = found
        return found

    def written(self) -> Cut:
        """Return the program of a microbatch."""
        self._add_in_update()
        number = Var(ShapedArray((1,), np.dtype(np.int32)))
        scalar = Var(ShapedArray((), np.dtype(np.int32)))
        writer = Writer(self.count, scalar)
        kept = list(self._kept())
        outputs = [(atom, read(atom, self.known)) for atom in self.jaxpr.outvars]
        chosen, demands = with_parts_made(
            [eqn for eqn, _, _ in kept], [run for _, run, _ in kept], outputs, self.count
        )
        invars = [writer.define(var, self.known[var]) for var in self.jaxpr.invars]
        for var in self.jaxpr.constvars:
            writer.define(var, REPLICATED)
        given = [Given(number, "number", "number of the microbatch")]
        for place, (var, value) in enumerate(self.whole.items()):
            in_parts = self.known.get(var, REPLICATED) == split(0) or demands.get(var) == {split(0)}
            held = writer.define(var, split(0) if in_parts else REPLICATED)
            name = f"statistic {place} of the batch, {self._named(value)}"
            given.append(Given(held, "part" if in_parts else "statistic", name))
        for place, (var, value) in enumerate(self.totals.items()):
            writer.define(var, REPLICATED)
            given.append(Given(var, "total", f"total {place} over the batch, {self._named(value)}"))
        of_eqn: list[str] = []
        for var, narrow in self._narrowed.items():
            writer.define(narrow, REPLICATED)
            convert = functools.partial(lax.convert_element_type, new_dtype=dtype_of(narrow))
            writer.eqns += equations_of(convert, [var], [narrow])
            of_eqn += ["forward"] * (len(writer.eqns) - len(of_eqn))
        for (eqn, _, phase), run in zip(kept, chosen, strict=True):
            for whole in variables(eqn):
                if whole in self.gathered and whole not in writer.local:
                    value = self.gathered[whole]
                    writer.gather(value, whole)
                    made = len(writer.eqns) - len(of_eqn)
                    of_eqn += [self._phase_of.get(value, "forward")] * made
            writer.phase = phase
            if run is None:
                writer.eqns.append(eqn)
                for var in eqn.outvars:
                    if not is_drop(var):
                        writer.define(var, REPLICATED)
            else:
                writer.write(eqn, run)
            of_eqn += [phase] * (len(writer.eqns) - len(of_eqn))
        outvars = [writer.read(atom, None) for atom in self.jaxpr.outvars]
        totals = {given: writer.local[value] for given, value in self.totals.items()}
        if writer.uses_number:
            writer.eqns[:0] = equations_of(lambda one: one[0], [number], [scalar])
            of_eqn[:0] = ["forward"] * (len(writer.eqns) - len(of_eqn))
        else:
            given = given[1:]
        pairs = list(zip(writer.eqns, of_eqn, strict=True))
        live = {*live_eqns(writer.eqns, [*outvars, *totals.values()])}
        pairs = [(eqn, phase) for eqn, phase in pairs if eqn in live]
        flat = jaxpr_of(
            self.jaxpr,
            list(self.jaxpr.constvars),
            [*invars, *(one.var for one in given)],
            outvars,
            [eqn for eqn, _ in pairs],
        )
        return Cut(
            ClosedJaxpr(flat, consts(self.closed)),
            tuple(phase for _, phase in pairs),
            writer.held(),
            tuple(given),
            statistics_of(self.closed, self.jaxpr, list(self.whole.values()), self.known),
            totals,  # type: ignore[arg-type]
            (),
            {
                held: var
                for var, held in writer.local.items()
                if isinstance(held, Var) and held is not var
            },
        )

    def _kept(self) -> Iterator[tuple[JaxprEqn, Run | None, str]]:
        """Yield the equations that microbatches run, how, and their phases."""
        for k, (eqn, run, phase) in enumerate(
            zip(self.jaxpr.eqns, self.runs, self.phases, strict=True)
        ):
            if k in self.from_statistics:
                continue
            for whole in self.before.get(k, ()):
                yield whole, Run(Reading((REPLICATED,) * len(whole.invars), (REPLICATED,))), phase
            given = self.read_whole.get(k, {})
            if given:
                eqn = eqn.replace(
                    invars=[a if isinstance(a, Literal) else given.get(a, a) for a in eqn.invars]
                )
            yield eqn, run, phase

    def _add_in_update(self) -> None:
        """Move additions to sums that only the update or the result reads into the update, which
        adds what is replicated once.
        """
        eqns = self.jaxpr.eqns
        inside: set[Var] = set()
        for k in range(len(eqns) - 1, -1, -1):
            eqn, run = eqns[k], self.runs[k]
            made = [var for var in eqn.outvars if not is_drop(var)]
            adds = (
                run is not None
                and not run.bodies
                and any(
                    wanted.kind == "sum" and read(atom, self.known).kind == "replicated"
                    for atom, wanted in zip(eqn.invars, run.reading.operands, strict=True)
                )
            )
            if adds and not any(var in inside for var in made):
                self.phases[k], self.runs[k] = "update", None
                self.known.update((var, REPLICATED) for var in made)
            if self.phases[k] != "update" and k not in self.from_statistics:
                inside.update(variables(eqn))

    def _named(self, value: Var) -> str:
        maker = next((eqn for eqn in self.jaxpr.eqns if value in eqn.outvars), None)
        return "an input" if maker is None else place_of([maker])

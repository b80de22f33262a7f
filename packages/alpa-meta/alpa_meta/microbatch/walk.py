"""The walk through a step: where microbatches hold every value, and what each operator is given."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from alpa_meta.compat import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    dtype_of,
    is_drop,
    open_jaxpr,
    shape_of,
)
from alpa_meta.microbatch.batched_while import ends_alone, shared_counters, steered
from alpa_meta.microbatch.cut_step import place_of, variables
from alpa_meta.microbatch.flow import Atom, Run, read, run_of
from alpa_meta.microbatch.gathering import aside, gathered
from alpa_meta.microbatch.joint_reads import meets_weights, mixed_values, reading_whole
from alpa_meta.microbatch.placement import MIXED, REPLICATED, MixedError, Placement, Reading, split
from alpa_meta.operators import operator_of
from alpa_meta.operators.regions import is_region
from alpa_meta.passes.added_equations import equations_of


class Walk:
    """The walk through a whole program, and what it found."""

    def __init__(
        self,
        closed: ClosedJaxpr,
        phases: Sequence[str],
        inputs: Sequence[Placement],
        trained: Sequence[bool],
        num_microbatches: int,
        read_whole: Sequence[Var],
    ) -> None:
        self.closed = closed
        self.whole_of = {var: Var(var.aval) for var in read_whole}
        self.jaxpr = reading_whole(open_jaxpr(closed), self.whole_of)
        self.phases = list(phases)
        self.count = num_microbatches
        self.known: dict[Var, Placement] = dict(zip(self.jaxpr.invars, inputs, strict=True))
        self.trained = {
            var for var, is_trained in zip(self.jaxpr.invars, trained, strict=True) if is_trained
        }
        self._weights = frozenset(self.trained)
        self.runs: list[Run | None] = []
        self.whole: dict[Var, Var] = {}  # given statistic -> the value of the whole program
        self.totals: dict[Var, Var] = {}  # given total -> the value that is added up
        self.read_whole: dict[int, dict[Var, Var]] = {}  # by equation: operands given whole
        self.before: dict[int, list[JaxprEqn]] = {}  # by equation: those of the wholes it reads
        self.from_statistics: set[int] = set()  # equations that only the statistics run
        self.gathered: dict[Var, Var] = {}  # the whole of a value -> the value, which is split
        self.reasons: list[str] = []
        self._aside = aside(open_jaxpr(closed).eqns, self.phases)
        self._given: dict[Var, Var] = {}  # value -> the variable that holds the whole of it
        self.narrowed: dict[Var, Var] = {}  # total, added up in float32 -> in its own type
        self._after_total: set[Var] = set()
        self.phase_of: dict[Var, str] = {}
        self._maker: dict[Var, JaxprEqn] = {}
        self._cause: dict[Var, str] = {}
        self._own: set[Var] = set()  # replicated in name: what steers a microbatch is its own
        self._first_total = ""
        self.joint: set[Var] = set()  # what would have to be read whole
        self.put_in: dict[Var, Var] = {}  # what is read whole -> a microbatch's part among zeros
        for var in self.whole_of:
            if var in self.known:
                self._read_whole(var)

    def _read_whole(self, var: Var) -> None:
        """Have what depends on no parameter computed on the whole batch, other values put together
        by a forward pass of its own."""
        whole = self.whole_of[var]
        self.known[whole] = REPLICATED
        if var not in self.trained:
            self.whole[whole] = var
            return
        self.put_in[var] = Var(var.aval)
        self.totals[whole] = self.put_in[var]
        self.trained.add(whole)
        self._after_total.add(whole)

    def walk(self) -> None:
        """Follow every value through the program, noting where microbatches hold it and why some
        cannot."""
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
                self.known[var], self.phase_of[var] = placement, phase
                self._maker[var] = eqn
                if any(atom in self.trained for atom in depends):
                    self.trained.add(var)
                if any(atom in self._after_total for atom in depends):
                    self._after_total.add(var)
                if var in self.whole_of:
                    self._read_whole(var)
            own = any(atom in self._own for atom in depends)
            if run is not None and (own or steered(eqn, run)):
                self._note_own(eqn, run, k)
        for number, atom in enumerate(self.jaxpr.outvars):
            if not isinstance(atom, Literal):
                if self.known.get(atom, REPLICATED).outer > 1 and gathered(atom) is not None:
                    atom = self._put_together(number, atom)
                self._leaves(atom)

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
                self.refuse(
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
            self.refuse(self._cause[atom])
        if placement.outer > 1:
            self.refuse(
                f"{place_of([self._maker[atom]])} is returned with the batch merged behind another "
                "dim, of which no microbatch has a block; return it with a dim of examples"
            )
        if atom in self._own:
            self.refuse(self._own_used([self._maker[atom]]))

    def repeats_weights(self) -> bool:
        """Return whether each microbatch would run more than a loss on all examples."""
        eqns, whole = self.jaxpr.eqns, self.whole_of.values()
        return meets_weights(eqns, self.phases, whole, self._weights)

    def refuse(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)

    def _run(self, k: int, eqn: JaxprEqn) -> Run | None:
        """Return how a microbatch runs an equation; None if the statistics or the update do."""
        operands = [read(atom, self.known) for atom in eqn.invars]
        mixed = [a for a in variables(eqn) if self.known.get(a, REPLICATED).kind == "mixed"]
        if mixed:
            return self._mixed(eqn, self._cause[mixed[0]])
        if any(self.phase_of.get(atom) == "update" for atom in variables(eqn)):
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
        self.joint |= mixed_values(eqn, self.known, self._maker, self.trained, self._may_be_whole)
        place = place_of([inner, eqn, *self.jaxpr.eqns[k + 1 :]])
        return self._mixed(
            eqn,
            f"{place} mixes examples of the batch in a way that microbatches cannot reproduce"
            f"{lacking}",
        )

    def _may_be_whole(self, atom: Var) -> bool:
        """Return whether a value can be put together before the microbatches read it."""
        if atom not in self.trained:
            return True
        early = self.phase_of.get(atom, "forward") == "forward"
        return early and atom not in self._after_total and atom not in self._own

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
                self.known[var], self.phase_of[var] = REPLICATED, "update"
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
        early = self.phase_of.get(atom) == "forward" and atom not in self._after_total
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
            made = [found if var is atom else Var(var.aval) for var in maker.outvars]
            self.before.setdefault(k, []).append(maker.replace(invars=operands, outvars=made))
            return found
        dtype = dtype_of(atom)
        narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
        total = Var(ShapedArray(shape_of(atom), np.float32)) if narrow else found
        self.totals[total] = atom
        if narrow:
            self.narrowed[total] = found
        return found

    def add_in_update(self) -> None:
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

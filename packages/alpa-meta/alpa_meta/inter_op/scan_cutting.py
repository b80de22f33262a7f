"""A program whose scans over layers are cut into pieces, with everything stacked like them.

    x, ys = scan(body, x, xs)   of 4 layers, cut at 2, becomes
    x, ys[0:2] = scan(body, x, xs[0:2])
    x, ys[2:4] = scan(body, x, xs[2:4])

The stacked values of a cut scan (`stacks`) exist in pieces only: state comes in and goes out in
pieces, operations that pass dim 0 through run once per piece, and those that reduce it combine the
pieces' results. Anything else reads the pieces joined, and a piece of a whole value is a slice of
it. Forward operations on a piece stand next to its scan, so that a cut between layers finds them on
its side. So do the forward scans of the token slices: the pieces of all slices that do the same
layers stand together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
from attrs import evolve, frozen
from jax import lax

from alpa_meta.compat import (
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    consts,
    is_drop,
    scan_counts,
    shape_of,
)
from alpa_meta.inter_op.stacks import (
    Passage,
    Stack,
    is_cuttable,
    passages,
    resized,
    stacked_inputs,
    stacked_outputs,
)
from alpa_meta.microbatch.placement import REPLICATED
from alpa_meta.passes.added_equations import equations_of
from alpa_meta.step.leaves import Leaf, Part
from alpa_meta.step.phases import Phases
from alpa_meta.step.program import Program
from alpa_meta.token_slices.staged import slice_number
from alpa_meta.types import Function

_COMBINE: dict[str, Function[jax.Array]] = {
    "add": jnp.add,
    "max": lax.max,
    "min": lax.min,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
}


@frozen
class Origin:
    """Where an equation comes from: the equation of the whole program, and the layers it does.

    `role` is "piece" (layers start to stop), "whole", "combine", "join" or "slice".
    """

    eqn: int
    role: str
    start: int = 0
    stop: int = 0


@frozen(eq=False)
class CutProgram:
    """A program in pieces, the origin of each of its equations, and what it was made from."""

    program: Program
    origins: tuple[Origin, ...]
    whole: Program
    stacks: tuple[Stack, ...]
    bounds: tuple[tuple[int, ...], ...]


@frozen(eq=False)
class _Entry:
    """An equation to be placed: where it comes from, its phase, and its key in program order."""

    eqn: JaxprEqn
    phase: str
    origin: Origin
    key: tuple[int, int, int, int]
    movable: bool = False


def cut_scans(
    program: Program, stacks: Sequence[Stack], bounds: Sequence[tuple[int, ...]]
) -> CutProgram:
    """Return `program` with each stack cut at its bounds (0, ..., length)."""
    return _Cutter(program, stacks, bounds).cut()


class _Cutter:
    def __init__(
        self, program: Program, stacks: Sequence[Stack], bounds: Sequence[tuple[int, ...]]
    ) -> None:
        self.program = program
        self.stacks, self.bounds = tuple(stacks), tuple(bounds)
        self.spans: dict[Atom, list[tuple[int, int]]] = {
            var: list(zip(ends[:-1], ends[1:], strict=True))
            for stack, ends in zip(stacks, bounds, strict=True)
            if len(ends) > 2
            for var in stack.members
        }
        self.placements = dict(program.placements)
        self.entries: list[_Entry] = []
        self.pieces: dict[Atom, list[Var]] = {}  # values that were made in pieces
        self.sliced: dict[Atom, list[Var]] = {}  # pieces cut from whole values
        self.joined: dict[tuple[Atom, str], Var] = {}  # pieces put together, by phase
        self.home: dict[Var, tuple[int, str]] = {}  # equation and phase that made a value
        self.beside = self._beside()

    def cut(self) -> CutProgram:
        jaxpr, program = self.program.jaxpr, self.program
        inputs: list[tuple[Var, Leaf, Part]] = []
        position: dict[Atom, list[int]] = {}
        for number, (var, leaf) in enumerate(zip(jaxpr.invars, program.inputs, strict=True)):
            position[var] = []
            for start, stop in self.spans.get(var, [(0, 0)]):
                position[var].append(len(inputs))
                if stop == 0:
                    inputs.append((var, leaf, Part(number)))
                    continue
                piece = self._piece_var(var, stop - start)
                self.pieces.setdefault(var, []).append(piece)
                aval = jax.ShapeDtypeStruct((stop - start, *leaf.aval.shape[1:]), leaf.aval.dtype)
                own = f"{leaf.path}[{start}:{stop}]"
                named = evolve(leaf, path=own, aval=aval, piece_of=leaf.path)
                inputs.append((piece, named, Part(number, start, stop)))
        for number, (eqn, phase) in enumerate(zip(jaxpr.eqns, program.phases.of_eqn, strict=True)):
            self._equation(number, eqn, phase)
            for var in eqn.outvars:
                self.home[var] = (number, phase)
        outputs: list[tuple[Atom, str, int | None, Part]] = []
        for number, (atom, path, alias) in enumerate(
            zip(jaxpr.outvars, program.outputs, program.aliases, strict=True)
        ):
            replaced = None if alias is None else jaxpr.invars[alias]
            if replaced is None or replaced not in self.pieces:
                whole = self._output(atom)
                outputs.append(
                    (whole, path, None if replaced is None else position[replaced][0], Part(number))
                )
                continue
            spans = self.spans[replaced]
            parts = self._pieces(atom, spans, len(jaxpr.eqns), "update")
            for place, (part, (start, stop)) in enumerate(zip(parts, spans, strict=True)):
                origin = Part(number, start, stop)
                outputs.append((part, f"{path}[{start}:{stop}]", position[replaced][place], origin))
        return self._finish(inputs, outputs)

    def _finish(
        self,
        inputs: Sequence[tuple[Var, Leaf, Part]],
        outputs: Sequence[tuple[Atom, str, int | None, Part]],
    ) -> CutProgram:
        program, jaxpr = self.program, self.program.jaxpr
        entries = sorted(_moved(self.entries), key=lambda entry: entry.key)
        flat = jaxpr.replace(
            invars=[var for var, _, _ in inputs],
            outvars=[atom for atom, _, _, _ in outputs],
            eqns=[entry.eqn for entry in entries],
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        made = evolve(
            program,
            closed=ClosedJaxpr(flat, consts(program.closed)),
            inputs=tuple(leaf for _, leaf, _ in inputs),
            outputs=tuple(path for _, path, _, _ in outputs),
            aliases=tuple(alias for _, _, alias, _ in outputs),
            phases=Phases(tuple(entry.phase for entry in entries), program.phases.recognised_by),
            placements=self.placements,
            input_parts=tuple(part for _, _, part in inputs),
            output_parts=tuple(part for _, _, _, part in outputs),
            whole=None,  # its layers are those of the pieces
            origin={},
            slice_of=self._slice_of(),
        )
        origins = tuple(entry.origin for entry in entries)
        return CutProgram(made, origins, program, self.stacks, self.bounds)

    # ------------------------------------------------------------------ token slices

    def _beside(self) -> dict[int, int]:
        """Return, for the forward scans of the slices of one scan, the number of the last."""
        program, runs = self.program, list[list[int]]()
        before: tuple[object, int] = (None, 0)
        for number, (eqn, phase) in enumerate(
            zip(program.jaxpr.eqns, program.phases.of_eqn, strict=True)
        ):
            if phase == "forward" and self._is_cut(eqn):
                spans, of = self.spans[stacked_inputs(eqn)[0]], slice_number(program, eqn)
                if of is None or before[0] is not spans or of <= before[1]:
                    runs.append([])
                runs[-1].append(number)
                before = spans, of or 0
        return {number: run[-1] for run in runs for number in run}

    def _slice_of(self) -> dict[Var, int]:
        """Return of which slice each value is; joins of pieces, and pieces of whole values, are of
        those that read them."""
        program = self.program
        numbers = [slice_number(program, eqn) for eqn in program.jaxpr.eqns]
        found: dict[Var, int] = {}
        for entry in self.entries:
            of = None if entry.origin.role in ("join", "slice") else numbers[entry.origin.eqn]
            if of is not None:
                found.update((var, of) for var in entry.eqn.outvars if not is_drop(var))
        return found

    # ------------------------------------------------------------------ equations

    def _is_cut(self, eqn: JaxprEqn) -> bool:
        return is_cuttable(eqn) and stacked_inputs(eqn)[0] in self.spans

    def _equation(self, number: int, eqn: JaxprEqn, phase: str) -> None:
        if self._is_cut(eqn):
            self._scan(number, eqn, phase)
            return
        passage = self._passage(eqn)
        if passage is not None:
            self._in_pieces(number, eqn, phase, passage)
            return
        operands = [self._whole(atom, number, phase) for atom in eqn.invars]
        self._add(eqn.replace(invars=operands), phase, Origin(number, "whole"))

    def _passage(self, eqn: JaxprEqn) -> Passage | None:
        """Return how an equation runs in pieces, None if none of its values is cut."""
        touched = any(not isinstance(atom, Literal) and atom in self.spans for atom in eqn.invars)
        if not touched and not any(var in self.spans for var in eqn.outvars):
            return None
        for passage in passages(eqn):
            carried = [eqn.invars[k] for k in passage.operands]
            carried += [eqn.outvars[k] for k in passage.results if not is_drop(eqn.outvars[k])]
            if carried and all(var in self.spans for var in carried):
                return passage
        return None

    def _scan(self, number: int, eqn: JaxprEqn, phase: str) -> None:
        num_consts, num_carry, _ = scan_counts(eqn)
        first = num_consts + num_carry
        fixed = [self._whole(atom, number, phase) for atom in eqn.invars[:num_consts]]
        carry = [self._whole(atom, number, phase) for atom in eqn.invars[num_consts:first]]
        spans = self.spans[stacked_inputs(eqn)[0]]
        xs = [self._pieces(atom, spans, number, phase) for atom in eqn.invars[first:]]
        for var in stacked_outputs(eqn):
            self.pieces[var] = [self._piece_var(var, stop - start) for start, stop in spans]
        order = list(range(len(spans)))
        if eqn.params["reverse"]:
            order.reverse()
        for place, k in enumerate(order):
            start, stop = spans[k]
            last = place == len(order) - 1
            after = [
                var if last or is_drop(var) else self._like(var) for var in eqn.outvars[:num_carry]
            ]
            if not last:  # a carry that is only passed on is dropped at the end, not before
                after = [self._like(var) if is_drop(var) else var for var in after]
            ys = [var if is_drop(var) else self.pieces[var][k] for var in eqn.outvars[num_carry:]]
            params = {**eqn.params, "length": stop - start}
            if isinstance(params.get("unroll"), int):
                params["unroll"] = max(1, min(params["unroll"], stop - start))
            piece = eqn.replace(
                invars=[*fixed, *carry, *(x[k] for x in xs)], outvars=[*after, *ys], params=params
            )
            self._add(piece, phase, Origin(number, "piece", start, stop), place)
            carry = [*after]

    def _in_pieces(self, number: int, eqn: JaxprEqn, phase: str, passage: Passage) -> None:
        carriers: list[Atom] = [eqn.invars[k] for k in passage.operands]
        carriers += [eqn.outvars[k] for k in passage.results]
        spans = next(self.spans[var] for var in carriers if not is_drop(var))
        operands = [
            self._pieces(atom, spans, number, phase)
            if k in passage.operands
            else [self._whole(atom, number, phase)] * len(spans)
            for k, atom in enumerate(eqn.invars)
        ]
        results = []
        for k, var in enumerate(eqn.outvars):
            if k not in passage.results:
                results.append([self._like(var) for _ in spans])
            elif is_drop(var):
                results.append([var] * len(spans))
            else:
                made = [self._piece_var(var, stop - start) for start, stop in spans]
                self.pieces[var] = made
                results.append(made)
        for k, (start, stop) in enumerate(spans):
            piece = eqn.replace(
                invars=[operand[k] for operand in operands],
                outvars=[result[k] for result in results],
                params=resized(eqn, stop - start),
            )
            self._add(piece, phase, Origin(number, "piece", start, stop), movable=True)
        if passage.reduction is not None:
            self._combine(number, eqn.outvars[0], results[0], phase, passage.reduction)

    def _combine(
        self, number: int, var: Var, partial: Sequence[Var], phase: str, reduction: str
    ) -> None:
        total = partial[0]
        for k, part in enumerate(partial[1:], 2):
            after = var if k == len(partial) else self._like(var)
            for added in equations_of(_COMBINE[reduction], [total, part], [after]):
                self._add(added, phase, Origin(number, "combine"))
            total = after

    def _add(
        self, eqn: JaxprEqn, phase: str, origin: Origin, place: int = 0, movable: bool = False
    ) -> None:
        beside = self.beside.get(origin.eqn, origin.eqn) if origin.role == "piece" else origin.eqn
        key = (beside, place, origin.eqn, len(self.entries))
        self.entries.append(_Entry(eqn, phase, origin, key, movable and phase == "forward"))

    # ------------------------------------------------------------------ values

    def _like(self, var: Var) -> Var:
        """Return a fresh variable of the type and placement of `var`."""
        fresh = Var(var.aval)
        self.placements[fresh] = self.program.placements.get(var, REPLICATED)
        return fresh

    def _piece_var(self, var: Atom, length: int) -> Var:
        fresh = Var(var.aval.update(shape=(length, *shape_of(var)[1:])))
        self.placements[fresh] = self.program.placements.get(cast(Var, var), REPLICATED)
        return fresh

    def _pieces(
        self, atom: Atom, spans: Sequence[tuple[int, int]], number: int, phase: str
    ) -> list[Var]:
        """Return the pieces of a value, cut from it where it is whole."""
        if atom in self.pieces and self.spans[atom] == spans:
            return self.pieces[atom]
        atom = self._whole(atom, number, phase)
        if atom not in self.sliced:
            self.sliced[atom] = []
            for start, stop in spans:
                piece = self._piece_var(atom, stop - start)

                def part(value: jax.Array, start: int = start, stop: int = stop) -> jax.Array:
                    return lax.slice_in_dim(value, start, stop)

                for added in equations_of(part, [atom], [piece]):
                    self._add(added, phase, Origin(number, "slice", start, stop), -1, True)
                self.sliced[atom].append(piece)
        return self.sliced[atom]

    def _whole(self, atom: Atom, number: int, phase: str) -> Atom:
        """Return a value whole, joined from its pieces where it was made in pieces."""
        if isinstance(atom, Literal) or atom not in self.pieces:
            return atom
        if (atom, phase) not in self.joined:
            whole = self._like(atom)
            self.joined[atom, phase] = whole

            def join(*parts: jax.Array) -> jax.Array:
                return lax.concatenate(parts, 0)

            for added in equations_of(join, self.pieces[atom], [whole]):
                self._add(added, phase, Origin(number, "join"), -1)
        return self.joined[atom, phase]

    def _output(self, atom: Atom) -> Atom:
        """Return a result of the program that leaves it whole."""
        if isinstance(atom, Literal) or atom not in self.pieces:
            return atom
        _, phase = self.home.get(atom, (0, "update"))
        return self._whole(atom, len(self.program.jaxpr.eqns), phase)


def _moved(entries: Sequence[_Entry]) -> list[_Entry]:
    """Return the entries with movable ones placed next to the scan they serve.

    One that follows a piece of a scan stands right after it; one that precedes a piece stands right
    before its first reader. None stands before what it reads.
    """
    early: dict[Var, tuple[int, int]] = {}
    follows: set[Var] = set()
    placed: dict[int, tuple[int, int]] = {}
    for number, entry in enumerate(entries):
        read = [atom for atom in entry.eqn.invars if not isinstance(atom, Literal)]
        prefix = entry.key[:2]
        if entry.movable:
            if any(atom in follows for atom in read):
                prefix = placed[number] = max(early[atom] for atom in read if atom in early)
                follows.update(entry.eqn.outvars)
            else:
                prefix = max((early[atom] for atom in read if atom in early), default=(-1, 0))
        elif entry.origin.role == "piece" and entry.phase == "forward":
            follows.update(entry.eqn.outvars)
        early.update((var, prefix) for var in entry.eqn.outvars)
    first_reader: dict[Var, tuple[int, int]] = {}
    for number in range(len(entries) - 1, -1, -1):
        entry = entries[number]
        prefix = entry.key[:2]
        if entry.movable and number not in placed:
            found = [first_reader[var] for var in entry.eqn.outvars if var in first_reader]
            prefix = placed[number] = min(found, default=prefix)
        prefix = placed.get(number, prefix)
        for atom in entry.eqn.invars:
            if not isinstance(atom, Literal):
                first_reader[atom] = min(prefix, first_reader.get(atom, prefix))
    made: dict[Var, tuple[int, int]] = {}
    moved = []
    for number, entry in enumerate(entries):
        prefix = placed.get(number, entry.key[:2])
        after = [made[a] for a in entry.eqn.invars if not isinstance(a, Literal) and a in made]
        prefix = max(prefix, *after) if after else prefix
        made.update((var, prefix) for var in entry.eqn.outvars)
        moved.append(evolve(entry, key=(*prefix, *entry.key[2:])))
    return moved

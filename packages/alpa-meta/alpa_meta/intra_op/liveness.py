"""When the values of a stage hold memory, in the order of its equations.

    stored   the result of a heavy operator: lives from its equation to its last reader
    fused    an elementwise result: the compiler computes it inside its readers, so that it lives
             only where a heavy operator reads it, or where computing it again would read more
             bytes than it has; else its own operands live until its readers have run
    alias    a reshape or the like: another name of its operand
    written  stored, in the place of the first operand, which it is written into
    reduced  stored, and its operands are computed inside it
    gathered stored, and as much of its operands as it reads is computed inside it
    words    stored, on hosts as two words of four bytes an element, which readers combine
    windows  stored, beside the positions of what it scatters; begins as zeros; the positions, and
             what they are found in, are computed in one kernel
    copied   an operand as a product or a loop reads it (`dim_orders`): stored, and what is fused
             into it is computed inside it
    view     the same on hosts, of one that lies as it should: a name of it where that is stored

An operator's record says which of the first eight its results are.

Time is counted in equations; the body of a loop is passed through once. A value that is last read
by equation t lives at t; an elementwise result may take the place of one operand of its size.
-> decided in `Timeline.spans`, after all equations are known.

XLA for CPUs (`on_host`) differs in what follows; read off its buffers, which `benchmarks/
memory_corpus.py` sums up:

    dear     an exponential and the like is never computed twice, but stored; so is a quotient,
             unless by what is repeated, which is a product with the reciprocal    -> stored_values
    apart    a padded or joined value is computed in one kernel at most, so that several that read
             a sum of such values read each of them; the sum is never stored       -> stored_values
    part     a slice is computed in all its readers; what many slices are taken of is stored
    mask     one byte for each element of one operand is found again in all its readers
    late     what only the update or the result waits for, as the gradient of a weight or the loss,
             is computed when that first reads it: its operands live until then; in a loop what
             only its stacked results wait for, at the end of a trip; the loss last -> spans()
    update   in a program of the whole step it runs for each array as soon as it can -> _ready(),
             the last array first where gradients are late            -> update_order
    copies   such a program copies the arrays that it replaces before it reads them for more than
             their update; other values take the place of the arrays         -> free_places
    windows  positions are made of the operand too, which is stored, before there are zeros to
             scatter into; these are nobody's but the reader's
    again    a cheap operand of a product is computed in each kernel that may do so, and stored for
             the others from when the first of them reads it    -> held_values.compute_in_readers()
    wider    products take and give four bytes for an element that has two; the conversion to two
             of what several read is stored, one back to four is dropped           -> _widening()
    turned   a convolution takes copies of operands whose dims do not lie as (batch, space,
             channels) and (window, in, out), as those of the gradient of its weights
    early    what is computed again for the backward pass runs as soon as it can where more paths
             lead to it than the program has values: XLA's order is depth first, by counts of users
             along those paths that are cut off there (`DFSMemoryScheduler`)    -> compute()

Buffers that begin as zeros (stacked results of scans, what a window's gradient is scattered into)
are an exception: XLA keeps one zero broadcast of each shape, and copies it for everyone who writes
into it in a single fused kernel. So all those of one shape are born with the first reader of its
zeros (seen in `loop_broadcast_fusion` of GPU programs: 49 buffers of 24 layers of mamba).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import define, field

from alpa_meta.intra_op.dim_orders import DimOrders, Matrix, Order
from alpa_meta.intra_op.free_places import Place, spans_outside
from alpa_meta.intra_op.held_values import (
    KINDS,
    Read,
    Span,
    Value,
    Zeros,
    done,
    is_of_parts,
    is_repeated,
    kind_of,
    positions,
    unrounded,
    waits,
    window_positions,
)
from alpa_meta.intra_op.stage_problem import Source
from alpa_meta.intra_op.stored_values import decide_stored
from alpa_meta.intra_op.update_order import copied_by, update_last_first

__all__ = ["KINDS", "PHASES", "Span", "Timeline"]

PHASES = ("forward", "backward", "update")


@define(eq=False)
class Timeline:
    """Collects the values of equations as they are walked over, and their readers.

    `apart`: the forward pass is a program of its own. `on_host`: it is compiled for CPUs.
    `whole_step`: one program holds both passes of one microbatch and the update. `count` is how
    often the equation walked over counts (`Window`): so many of its values are held between the
    phases, one at a time within.
    """

    apart: bool = False
    on_host: bool = False
    whole_step: bool = False
    count: int = 1
    now: int = 0
    phase: int = 0
    _computation: int = 0  # of the body that is walked over
    _num_computations: int = 1
    _again: bool = False  # parts of the forward pass are computed again
    _copied: list[tuple[Source, int]] = field(factory=list)  # state, and when it was copied
    _replacing: dict[Source, Value] = field(factory=dict)  # what replaces it
    _zeros: dict[tuple[object, ...], Zeros] = field(factory=dict)
    _values: list[Value] = field(factory=list)
    _of: dict[Source, Value] = field(factory=dict)
    _orders: DimOrders = field(factory=DimOrders)
    _copies: dict[tuple[Value, Order | None], Value] = field(factory=dict)

    def advance(self, phase: str) -> None:
        """Begin the next equation."""
        self.now += 1
        self.phase = PHASES.index(phase)

    def store(self, source: Source, born: int | None = None) -> None:
        """Note a value that is kept in memory from now, or from `born`, to its last reader."""
        self._add(source, "stored", (), self.now if born is None else born)

    def store_copy(self, source: Source) -> None:
        """Note that a value which is there at all times is also held as a copy, from now on."""
        self._add(source, "stored", (), self.now).kind = KINDS.index("temporaries")
        self._copied.append((source, self.now))

    def compute_again(self) -> None:
        """Note that operators from here on compute again what is not kept of the forward pass."""
        self._again = self.phase == 1

    def enter(self) -> int:
        """Begin the body of a loop; return what `leave` takes to go back."""
        outer, self._computation = self._computation, self._num_computations
        self._num_computations += 1
        return outer

    def leave(self, outer: int) -> None:
        """End the body of a loop."""
        self._computation = outer

    def store_zeros(self, source: Source, born: int | None = None) -> None:
        """Note a value that begins as zeros, which are written over from now or from `born`."""
        value = self._add(source, "stored", (), self.now if born is None else born)
        self._zeros_like(source).written.append(value)

    def _read_zeros(self, result: Source) -> None:
        """Note that an elementwise operator reads zeros of the shape of its `result`."""
        zeros = self._zeros_like(result)
        zeros.times.append(self.now)
        zeros.like = zeros.like or result

    def _zeros_like(self, source: Source) -> Zeros:
        phase = self.phase if self.apart else 0
        key = (self._computation, phase, source.shape, source.bytes)
        return self._zeros.setdefault(key, Zeros())

    def alias(self, source: Source, of: Source) -> None:
        """Note another name of the value `of`."""
        operand = self._of.get(of)
        if operand is not None and operand.source is not source:
            self._orders.same(source, of)
            value = self._add(source, "alias", (operand,), self.now)
            value.early, value.ready, value.paths = operand.early, operand.ready, operand.paths
            operand.reads.append(Read(self.now, self.phase, (value,), False))

    def hold(self, sources: Sequence[Source]) -> None:
        """Note that values are read, by something that needs them in memory."""
        for source in sources:
            if source in self._of:
                self._of[source].reads.append(Read(self.now + 1, self.phase))

    def hold_for_loop(self, sources: Sequence[Source], began: int) -> None:
        """Note that a loop has read values since then, copies of those that lie otherwise than
        their dims are numbered."""
        for source in sources:
            value, order = self._of.get(source), self._orders.numbered(source)
            if value is not None and order is not None:
                value = self._copy(value, order, "copied", source, born=began)
                value.reads.append(Read(began + 1, self.phase))
            if value is not None:
                value.reads.append(Read(self.now + 1, self.phase))

    def leave_program(self, sources: Sequence[Source], began: int) -> None:
        """Note that values are results of a program that began at an earlier time: memory was set
        aside for them then, for each its own, other names of one value or not."""
        taken = set[Value]()
        for source in sources:
            value = self._of.get(source)
            if value is None:
                continue
            root = value
            while root.form == "alias" and root.operands:
                root = root.operands[0]
            if value.form == "alias" and (root.form == "alias" or root in taken):
                value.form = "stored"
            taken.add(root)
            value.born, value.set_aside = min(value.born, began), True

    def compute(
        self,
        form: str,
        operands: Sequence[Source],
        results: Sequence[Source],
        reads_zero: bool = False,
        dear: bool = False,
        apart: bool = False,
        late: bool = False,
        ends_trip: bool = False,
        permutation: Order | None = None,
        matrices: Sequence[Matrix] = (),
    ) -> None:
        """Note an operator, run now, of the `liveness` its record gives.

        `reads_zero`: an operand is the number 0. `dear`: it takes long. `late`: only the update
        waits for its results. `permutation`: it transposes. `matrices`: how it takes its operands.
        """
        late, ends_trip = (one and self.on_host and self.phase < 2 for one in (late, ends_trip))
        read = [self._of[source] for source in operands if source in self._of]
        late = late or ends_trip and any(value.late for value in read)
        dear = dear and self.on_host and not (len(read) == 2 and is_repeated(read[1], results[0]))
        if form == "alias":
            read = read[:1]
        if permutation is not None:
            self._orders.transpose(results[0], next(iter(operands), None), permutation)
        elif form in ("fused", "alias"):
            self._orders.follow(results, operands)
        elif len(matrices) == len(read):
            late = late or ends_trip and self._turns(read, matrices)
            read = [self._as_read(*one, late) for one in zip(read, matrices, strict=True)]
        early = self._again and all(one.early for one in read)
        paths = max(1.0, sum(one.paths for one in read))
        ready = self._ready(read) if self.phase == 2 or early else self.now
        now = ready if self.phase == 2 or paths > len(self._values) else self.now
        made = tuple(self._add(source, form, tuple(read), now) for source in results)
        for value in made:
            value.dear, value.late, value.paths = dear, late, paths
            value.apart = apart and self.on_host
            value.early, value.ready = early or not self.phase, ready
            wider = self._widening(value.source) if matrices else 1.0
            if wider > 1.0:
                value.source, value.rounded = value.source.times(wider), value.source
        if form == "words" and self.on_host:
            for value in made:
                words = 8.0 * math.prod(value.source.shape)
                value.source = value.source.times(words / max(value.source.bytes, 1.0))
        if reads_zero and form == "fused":
            self._read_zeros(results[0])
        if form == "windows":
            self._zeros_like(results[0]).written += made
            self._add(window_positions(operands[0]), "stored", (), self.now)
            if self.on_host:
                # never together with the result, which is counted now
                self._add(positions(results[0], less=1.0), "stored", (), self.now)
        fuses = (
            form in ("fused", "alias", "reduced", "gathered")
            or form == "windows"
            and not self.on_host
        )
        into = self._of.get(operands[0]) if form == "written" else None
        replaced = form == "fused" or into is not None
        for value in read:
            inside = replaced and bool(made) and value.source.bytes == made[0].source.bytes
            inside = inside and into in (None, value)
            stop = now if inside else now + 1
            replaced = replaced and not inside
            inlined = made if form in ("fused", "alias") else ()
            put_off = made[0] if self.on_host and made else None
            value.reads.append(Read(stop, self.phase, inlined, not fuses, put_off))

    def _turns(self, read: Sequence[Value], matrices: Sequence[Matrix]) -> bool:
        """Return whether a product reads copies of values that lie otherwise."""
        return any(
            self._orders.copied(value.source, matrix, as_given=True) is not None
            for value, matrix in zip(read, matrices, strict=True)
        )

    def _as_read(self, value: Value, matrix: Matrix, late: bool) -> Value:
        """Return the value that a product reads: a copy where its dims lie in another order, or
        where it is too narrow; on hosts a view of what a kernel may compute as a matrix."""
        order = self._orders.copied(value.source, matrix, as_given=self.on_host)
        wider, form = self._widening(value.source), "copied"
        whole = unrounded(value) if wider > 1.0 and order is None else None
        if whole is not None:
            value, wider = whole, 1.0
        if order is None and wider == 1.0:
            fuses = value.form == "fused" or is_of_parts(value)
            if not (self.on_host and fuses) or max(map(len, matrix[1:])) < 2:
                return value
            form = "view"
        source = value.source if wider == 1.0 else value.source.times(wider)
        return self._copy(value, order, form, source, late)

    def _copy(
        self,
        value: Value,
        order: Order | None,
        form: str,
        source: Source,
        late: bool = False,
        born: int | None = None,
    ) -> Value:
        """Return the copy of a value in another order, or the view of it; one for all readers. It
        is made now or at `born`."""
        key = (value, order)
        if key not in self._copies:
            born = self.now if born is None else born
            copy = Value(source, born, self.phase, form, self.count, (value,))
            copy.late, copy.ready = late, value.ready
            copy.early, copy.paths = value.early, value.paths
            self._values.append(copy)
            value.reads.append(Read(born + 1, self.phase, (copy,), False, copy))
            self._copies[key] = copy
        return self._copies[key]

    def _widening(self, source: Source) -> float:
        """Return how many times as many bytes products take: CPUs multiply in four bytes each."""
        size = 4.0 * math.prod(source.shape)
        return size / source.bytes if self.on_host and 0 < source.bytes < size else 1.0

    def _ready(self, read: Sequence[Value]) -> int:
        """Return when an operator runs that hosts run as soon as they can, now at the latest. A
        late value is computed when the first operator asks for it."""
        if not (self.on_host and self.whole_step):
            return self.now
        for value in read:
            if value.late and not value.ready > value.born:
                value.ready = self.now
        return max((value.ready for value in read), default=1)

    def replace(self, source: Source, old: Source) -> None:
        """Note that a value is written over an input: it takes no memory of its own."""
        value = self._of.get(source)
        if value is not None:
            value.source = source.times(0.0)
            self._replacing[old] = value
            value.replaces = True

    def spans(self) -> list[Span]:
        """Return when each value that is held in memory lives, kept state apart; the timeline is
        then empty.

        Its values and their readers refer to one another, and planning runs without the collection
        of such cycles (`collection_pause`).
        """
        copied = {self._of[source]: now for source, now in self._copied}
        if self.on_host and self.whole_step and update_last_first(self._values):
            copied = copied_by(self._values, copied)
        decide_stored(self._values, on_host=self.on_host)
        found = [*self._shared_zeros(), *self._rounded()]
        for value in reversed(self._values):
            value.late = value.late or self.on_host and (waits(value) or self._is_result(value))
            began = value.born
            free = value.form == "fused" and not value.operands
            moves = value.late or value.put_off or free or value.form in ("copied", "view")
            if moves and not value.set_aside:
                firsts = [done(read) - 1 for read in value.reads]
                latest = self.now if value.late else value.born
                value.born = max(value.born, min(firsts, default=latest))
            value.stop, value.last_phase = value.born + 1, value.phase
            for read in value.reads:
                stop, phase = done(read), read.phase
                for result in read.results:
                    if not result.stored:
                        stop = max(stop, result.stop)
                        phase = max(phase, result.last_phase)
                value.stop = max(value.stop, stop)
                value.last_phase = max(value.last_phase, phase)
            if any(value.stop == one.born + 1 for one in value.replaced_by):
                value.stop -= 1
            if value.stored and value.source.bytes:
                kind = kind_of(value) if value.kind is None else value.kind
                count = 1 if kind == KINDS.index("temporaries") else value.count
                start, stop = value.born, value.stop
                if value.late and not value.reads:  # one after another, not all at the end
                    start, stop = began, began + 1
                found.append(Span(value.source, start, stop, kind, count))
        places = [
            Place(value.source.bytes, now + 1, self._replacing[value.source].born)
            for value, now in copied.items()
            if value.source in self._replacing
        ]
        for value in self._values:
            value.reads.clear()
            value.replaced_by.clear()
        self._replacing.clear()
        self._values.clear()
        self._copies.clear()
        self._of.clear()
        return spans_outside(found[::-1], places)

    def _is_result(self, value: Value) -> bool:
        """Return whether a program of the whole step only returns a value, as the loss."""
        return self.whole_step and value.phase == 2 and not (value.reads or value.replaces)

    def _rounded(self) -> list[Span]:
        """Return the products of four bytes an element that several read as two, while they are
        made, and let these be held."""
        found = []
        for value in self._values:
            if value.rounded is not None and len(value.reads) > 1:
                kind = KINDS.index("temporaries")
                found.append(Span(value.source, value.born, value.born + 1, kind))
                value.source = value.rounded
        return found

    def _shared_zeros(self) -> list[Span]:
        """Return the zeros that are read beside being written over, and let all be born at once."""
        found = []
        for zeros in self._zeros.values():
            if self.on_host or not zeros.written:
                continue
            times = [*zeros.times, *(value.born for value in zeros.written)]
            for value in zeros.written:
                value.reads.append(Read(value.born + 1, value.phase))
                value.born = min(times)
            if zeros.like is not None:
                kind = KINDS.index("temporaries")
                found.append(Span(zeros.like, min(times), max(times) + 1, kind))
        return found

    def _add(self, source: Source, form: str, operands: tuple[Value, ...], born: int) -> Value:
        value = Value(source, born, self.phase, form, self.count, operands, ready=born)
        value.early = not self.phase
        self._values.append(value)
        self._of[source] = value
        return value

"""When the values of a stage hold memory, in the order of its equations.

    stored   the result of a heavy operator: lives from its equation to its last reader
    fused    an elementwise result: the compiler computes it inside its readers, so that it lives
             only where a heavy operator reads it, or where computing it again would read more
             bytes than it has; else its own operands live until its readers have run
    alias    a reshape or the like: another name of its operand

Time is counted in equations; the body of a loop is passed through once. A value that is last read
by equation t lives at t; an elementwise result may take the place of one operand of its size.
-> decided in `Timeline.spans`, after all equations are known.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field, frozen

from alpa_meta.rules.elementwise import OPERATORS as ELEMENTWISE
from alpa_meta.stage_problem import Source

PHASES = ("forward", "backward", "update")
KINDS = ("state", "gradients", "activations", "temporaries")
REREAD = 1.0  # most bytes that are read again, in those of the value, where it is not stored
_MOST_OPERANDS = 8  # of one fused computation

_ALIASES = frozenset(
    """
    reshape squeeze expand_dims transpose bitcast_convert_type optimization_barrier name copy
    copy_p device_put sharding_constraint alpa_pin stop_gradient random_wrap random_unwrap pvary
    """.split()
)
_FUSED = frozenset(ELEMENTWISE) | frozenset(
    "broadcast_in_dim iota slice pad rev concatenate select_n dynamic_slice".split()
)


@frozen(eq=False)
class Span:
    """The half-open time [start, stop) for which a value is held, and as what."""

    source: Source
    start: int
    stop: int
    kind: int  # in KINDS


@define(eq=False)
class _Read:
    """One reader: when it is done with the value, and what it computes if it is fused."""

    stop: int
    phase: int
    results: tuple[_Value, ...] = ()
    heavy: bool = True


@define(eq=False)
class _Value:
    source: Source
    born: int
    phase: int
    form: str
    operands: tuple[_Value, ...] = ()
    reads: list[_Read] = field(factory=list)
    stored: bool = True
    stop: int = 0
    last_phase: int = 0


@define(eq=False)
class Timeline:
    """Collects the values of equations as they are walked over, and their readers."""

    now: int = 0
    phase: int = 0
    _values: list[_Value] = field(factory=list)
    _of: dict[int, _Value] = field(factory=dict)  # by id of the source, which the value keeps

    def advance(self, phase: str) -> None:
        """Begin the next equation."""
        self.now += 1
        self.phase = PHASES.index(phase)

    def store(self, source: Source, born: int | None = None) -> None:
        """Note a value that is kept in memory from now, or from `born`, to its last reader."""
        self._add(source, "stored", (), self.now if born is None else born)

    def alias(self, source: Source, of: Source) -> None:
        """Note another name of the value `of`."""
        operand = self._of.get(id(of))
        if operand is not None and operand.source is not source:
            value = self._add(source, "alias", (operand,), self.now)
            operand.reads.append(_Read(self.now, self.phase, (value,), False))

    def hold(self, sources: Sequence[Source]) -> None:
        """Note that values are read, by something that needs them in memory."""
        for source in sources:
            if id(source) in self._of:
                self._of[id(source)].reads.append(_Read(self.now + 1, self.phase))

    def compute(self, name: str, operands: Sequence[Source], results: Sequence[Source]) -> None:
        """Note the operator `name`, run now."""
        read = [self._of[id(source)] for source in operands if id(source) in self._of]
        form = "alias" if name in _ALIASES else "fused" if name in _FUSED else "stored"
        if form == "alias":
            read = read[:1]
        made = tuple(self._add(source, form, tuple(read), self.now) for source in results)
        fuses = form != "stored" or name.startswith("reduce_")
        replaced = form == "fused"
        for value in read:
            inside = replaced and bool(made) and value.source.bytes == made[0].source.bytes
            stop = self.now if inside else self.now + 1
            replaced = replaced and not inside
            value.reads.append(_Read(stop, self.phase, made if form != "stored" else (), not fuses))

    def replace(self, source: Source) -> None:
        """Note that a value is written over an input: it takes no memory of its own."""
        value = self._of.get(id(source))
        if value is not None:
            value.source = Source(source.node, source.specs, source.shape, 0.0)

    def spans(self) -> list[Span]:
        """Return when each value that is held in memory lives, kept state apart."""
        needed = self._needed_in_memory()
        self._decide(needed)
        found = []
        for value in reversed(self._values):
            value.stop, value.last_phase = value.born + 1, value.phase
            for read in value.reads:
                stop, phase = read.stop, read.phase
                for result in read.results:
                    if not result.stored:
                        stop = max(stop, result.stop)
                        phase = max(phase, result.last_phase)
                value.stop = max(value.stop, stop)
                value.last_phase = max(value.last_phase, phase)
            if value.stored and value.source.bytes:
                found.append(Span(value.source, value.born, value.stop, _kind(value)))
        return found[::-1]

    def _add(self, source: Source, form: str, operands: tuple[_Value, ...], born: int) -> _Value:
        value = _Value(source, born, self.phase, form, operands)
        self._values.append(value)
        self._of[id(source)] = value
        return value

    def _needed_in_memory(self) -> set[int]:
        """Return the ids of the values that a heavy operator reads, by any name."""
        needed: set[int] = set()
        for value in reversed(self._values):
            for read in value.reads:
                if read.heavy or any(r.form == "alias" and id(r) in needed for r in read.results):
                    needed.add(id(value))
        return needed

    def _decide(self, needed: set[int]) -> None:
        """Set which values are stored."""
        supports: dict[int, dict[int, float]] = {}
        for value in self._values:
            support: dict[int, float] = {}
            for operand in value.operands:
                support.update(supports[id(operand)])
            size = value.source.bytes
            if value.form == "stored":
                value.stored = True
            elif value.form == "alias":
                value.stored = False
            else:
                again = len(value.reads) > 1 and sum(support.values()) > REREAD * size
                value.stored = id(value) in needed or again or len(support) > _MOST_OPERANDS
            supports[id(value)] = {id(value): size} if value.stored else support


def _kind(value: _Value) -> int:
    if value.last_phase == 2 and value.phase < 2:
        return KINDS.index("gradients")
    if value.last_phase == 1 and value.phase == 0:
        return KINDS.index("activations")
    return KINDS.index("temporaries")

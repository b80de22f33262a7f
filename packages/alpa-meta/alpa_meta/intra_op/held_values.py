"""Values of a stage as a `Timeline` collects them: when they are made, who reads them."""

from __future__ import annotations

import math

from attrs import define, field, frozen

from alpa_meta.intra_op.stage_problem import Source

KINDS = ("state", "gradients", "activations", "temporaries")


@frozen(eq=False)
class Span:
    """The half-open time [start, stop) for which `count` values like it are held, and as what."""

    source: Source
    start: int
    stop: int
    kind: int  # in KINDS
    count: int = 1


@define(eq=False)
class Read:
    """One reader: when it is done with the value, and what it computes if it is fused.

    One that is `put_off` is done when the value that it computes was made.
    """

    stop: int
    phase: int
    results: tuple[Value, ...] = ()
    heavy: bool = True
    put_off: Value | None = None


@define(eq=False)
class Value:
    """A value: `born` at an equation, in a phase; its `form` is one of `liveness`.

    Whether it is `stored`, and until when, is known when all its readers are.
    """

    source: Source
    born: int
    phase: int
    form: str
    count: int
    operands: tuple[Value, ...] = ()
    reads: list[Read] = field(factory=list)
    stored: bool = True
    stop: int = 0
    last_phase: int = 0
    dear: bool = False
    apart: bool = False  # from the kernels that read it, if several do
    late: bool = False
    replaces: bool = False  # an input of the program
    set_aside: bool = False  # its memory, before the program that returns it runs
    rounded: Source | None = None  # what is kept of a product for several readers
    put_off: bool = False  # until a kernel reads it that cannot compute it
    ready: int = 0  # when what runs as soon as it can may read it
    early: bool = False  # of the forward pass, or computed again from it alone
    paths: float = 1.0  # from what is given
    replaced_by: list[Value] = field(factory=list)  # of its size, of kernels that read it
    kind: int | None = None  # in KINDS, where it does not follow from who reads it


@define(eq=False)
class Zeros:
    """The zeros of one shape in one computation: who writes into copies, who reads them."""

    written: list[Value] = field(factory=list)
    times: list[int] = field(factory=list)  # at which elementwise operators read them
    like: Source | None = None  # what such an operator makes


def compute_in_readers(value: Value) -> None:
    """Let the kernels that may compute a value read its operands; it is stored for the others."""
    kept = []
    for read in value.reads:
        fused = [result for result in read.results if result.form in ("copied", "view")]
        if not fused:
            kept.append(read)
            continue
        for result in fused:
            others = [one for one in result.operands if one is not value]
            result.operands = (*others, *value.operands)
        for operand in value.operands:
            operand.reads.append(read)
    value.reads, value.put_off = kept, True


def is_unary(value: Value) -> bool:
    """Return whether a value has at most one operand of its size that is not itself repeated."""
    size = value.source.bytes
    whole = [one for one in value.operands if one.source.bytes >= size]
    return sum(not is_repeated(one, value.source) for one in whole) <= 1


def unrounded(value: Value) -> Value | None:
    """Return the value of four bytes an element that a value of two is rounded from, if any: XLA
    for CPUs drops the conversion to two bytes where it is followed by one to four."""
    while value.form == "alias" and value.operands:
        value = value.operands[0]
    if value.form != "fused" or len(value.operands) != 1:
        return None
    (whole,) = value.operands
    return whole if whole.source.bytes == 4.0 * math.prod(value.source.shape) else None


def is_of_parts(value: Value) -> bool:
    """Return whether a value, or what it is a name of, is computed from padded or joined parts."""
    while value.form == "alias" and value.operands:
        value = value.operands[0]
    parts = (one.apart or is_of_parts(one) for one in value.operands)
    return value.form == "fused" and bool(value.operands) and all(parts)


def is_part(value: Value) -> bool:
    """Return whether a value has some of the elements of an operand, as a slice."""
    size = math.prod(value.source.shape)
    return any(math.prod(one.source.shape) > size for one in value.operands)


def cut_in(value: Value) -> int:
    """Return how many parts of a value are read as values of their own."""
    if is_part(value):
        return 0
    size = math.prod(value.source.shape)
    parts = [
        one for read in value.reads for one in read.results if math.prod(one.source.shape) < size
    ]
    return sum(one.form == "fused" for one in parts)


def is_mask(value: Value) -> bool:
    """Return whether a value has one byte an element, found from one operand of its shape."""
    return value.source.bytes <= math.prod(value.source.shape) and is_unary(value)


def is_repeated(value: Value, result: Source) -> bool:
    """Return whether a value, or what it repeats, is smaller than a result: XLA multiplies by the
    reciprocal of such a divisor."""
    repeated = value.form == "fused" and len(value.operands) == 1
    least = min(one.source.bytes for one in (value, *(value.operands if repeated else ())))
    return least < result.bytes


def window_positions(gradient: Source) -> Source:
    """Return what XLA computes on GPUs before it scatters the gradient of a window's extreme: the
    extremes and an int32 position per dim."""
    size = positions(gradient).bytes
    return gradient.times(1.0 + size / max(gradient.bytes, 1.0))


def positions(value: Source, less: float = 0.0) -> Source:
    """Return an int32 per dim for every element of a value, `less` so many times the value."""
    size = 4.0 * math.prod(value.shape) * len(value.shape)
    return value.times(max(size / max(value.bytes, 1.0) - less, 0.0))


def waits(value: Value) -> bool:
    """Return whether only late values, as the loss, read a value of the forward pass."""
    return bool(value.reads) and all(
        read.phase != 1 and read.put_off is not None and read.put_off.late for read in value.reads
    )


def done(read: Read) -> int:
    """Return when a reader is done with what it reads."""
    if read.put_off is None or not read.put_off.late:
        return read.stop
    return max(read.stop, read.put_off.born + 1)


def kind_of(value: Value) -> int:
    if value.last_phase == 2 and value.phase < 2:
        return KINDS.index("gradients")
    if value.last_phase == 1 and value.phase == 0:
        return KINDS.index("activations")
    return KINDS.index("temporaries")

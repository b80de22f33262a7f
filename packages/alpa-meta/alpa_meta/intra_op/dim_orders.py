"""In which order the dims of values lie in memory, and which operands are copied into another.

XLA computes a product of arrays as one of matrices, or of a batch of them: dims of the batch come
first, and those that are summed over lie together, in the order of the product, as do the others.
A transposition is free where all readers can take the order that its operand has; an elementwise
result lies as its operands do. An operand that lies otherwise is copied, and the copy computes what
is fused into it: a value that only such products read is itself never stored. Copies in one order
are one. (Llama's probabilities, whose heads share keys in groups, are copied for both passes; read
off the buffers of XLA for H100s and for CPUs by `benchmarks/memory_corpus.py`.)
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from alpa_meta.intra_op.stage_problem import Source

Order = tuple[int, ...]
"""The dims of a value from the major to the minor one."""

Matrix = tuple[Order, Order, Order]
"""How a product takes an operand: dims of the batch, those of rows, those of columns."""


@define(eq=False)
class DimOrders:
    """The orders of the values walked over that lie otherwise than their dims are numbered."""

    _of: dict[Source, Order] = field(factory=dict)

    def same(self, source: Source, of: Source) -> None:
        """Note another name of the value `of`."""
        order = self._of.get(of)
        if order is not None and source.shape == of.shape:
            self._of[source] = order

    def transpose(self, source: Source, of: Source | None, permutation: Order) -> None:
        """Note the value of which dim k is dim `permutation[k]` of the value `of`; None: of a sum
        over the microbatches, which lies as its dims are numbered."""
        place = {dim: k for k, dim in enumerate(permutation)}
        held = range(len(permutation)) if of is None else self._order(of)
        order = tuple([place[dim] for dim in held])
        if order != tuple(range(len(order))):
            self._of[source] = order

    def follow(self, sources: Sequence[Source], operands: Sequence[Source]) -> None:
        """Note that elementwise results lie as the first operand that lies otherwise."""
        if not self._of:
            return
        for operand in operands:
            if operand in self._of:
                for source in sources:
                    self.same(source, operand)
                return

    def numbered(self, source: Source) -> Order | None:
        """Return the dims of a value as they are numbered, if it lies otherwise."""
        return tuple(range(len(source.shape))) if source in self._of else None

    def copied(self, source: Source, matrix: Matrix, *, as_given: bool = False) -> Order | None:
        """Return the order in which a product reads a copy of a value; None: it reads the value.

        A value may lie with rows and columns in each other's place, and so may a copy where each
        are one dim. `as_given`: the value only there, a copy never.
        """
        batch, rows, columns = matrix
        order, wanted = self._order(source), (*batch, *rows, *columns)
        if order == wanted:
            return None
        one_each = max(len(rows), len(columns)) < 2
        allowed = [wanted]
        if one_each or not as_given:
            allowed.append((*batch, *columns, *rows))
        sizes = source.shape
        held = [dim for dim in order if sizes[dim] > 1]  # others are at any place
        if any(held == [dim for dim in one if sizes[dim] > 1] for one in allowed):
            return None
        return min(allowed) if one_each and not as_given else wanted

    def _order(self, source: Source) -> Order:
        return self._of.get(source) or tuple(range(len(source.shape)))

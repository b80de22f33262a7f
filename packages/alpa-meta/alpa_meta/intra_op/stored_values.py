"""Which values of a stage are stored, which are computed inside what reads them (`liveness`)."""

from __future__ import annotations

from collections.abc import Sequence

from alpa_meta.intra_op.held_values import (
    Value,
    compute_in_readers,
    cut_in,
    is_mask,
    is_part,
    is_unary,
)

__all__ = ["decide_stored"]

REREAD = 1.5
"""Most bytes that are read again, in those of the value, where it is not stored.

Between one tensor with what is broadcast onto it, as a mean, and two tensors: 1.2 plans the same.
At 1.0 a mean of a few bytes lets every centred tensor be stored that XLA computes again: the plan
of wide-resnet for an H100 was 77 % above the compiled program, of diffusion 68 %.
"""
_MOST_OPERANDS = 8  # of one fused computation
_MOST_PARTS = 3
"""Slices of a value that are computed without it. XLA for CPUs computes a value at 15 places in a
kernel at most (`FusionNodeIndexingEvaluation`), and each level of an associative scan doubles them:
what it scans is stored (mamba), three slices of queries, keys and values are computed (vit)."""


def decide_stored(values: Sequence[Value], *, on_host: bool) -> None:
    """Set which values are stored, all readers of which are known."""
    needed = _needed_in_memory(values)
    if on_host:
        needed |= _dear(values, needed)
    supports: dict[Value, dict[Value, None]] = {}  # sets in order
    for value in values:
        support: dict[Value, None] = {}
        for operand in value.operands:
            support.update(supports[operand])
        size = value.source.bytes
        if (
            value.form == "alias"
            or value.form == "view"
            and all(one.stored for one in value.operands)
        ):
            value.stored = False
        elif value.form == "fused":
            read = sum([one.source.bytes for one in support if not one.apart])
            costly = read > REREAD * size
            again = len(value.reads) > 1 and costly
            again = again and not (on_host and (is_mask(value) or is_part(value)))
            again = again or on_host and cut_in(value) > _MOST_PARTS
            value.stored = value in needed or again or len(support) > _MOST_OPERANDS
            free = on_host and not (value.dear or costly)
            if value.stored and free and is_unary(value):
                compute_in_readers(value)
            if value.stored and all(one.source.bytes != size for one in value.operands):
                for one in support:
                    if one.source.bytes == size:
                        one.replaced_by.append(value)
                        break
        supports[value] = {value: None} if value.stored else support


def _needed_in_memory(values: Sequence[Value]) -> set[Value]:
    """Return the values that a heavy operator reads, by any name."""
    needed: set[Value] = set()
    for value in reversed(values):
        for read in value.reads:
            if read.heavy or any(r.form == "alias" and r in needed for r in read.results):
                needed.add(value)
    return needed


def _dear(values: Sequence[Value], needed: set[Value]) -> set[Value]:
    """Return the dear values that several kernels would compute: those that read them, or what
    is computed from them and not stored."""
    found: set[Value] = set()
    kernels: dict[Value, int] = {}
    every: dict[Value, int] = {}  # also those that read what more than one value is needed for
    for value in reversed(values):
        count = whole = 0
        for read in value.reads:
            inlined = [r for r in read.results if r not in needed and r not in found]
            count += max((kernels[r] for r in inlined), default=1)
            whole += max((every[r] for r in inlined), default=1)
        kernels[value], every[value] = max(count, 1), max(whole, 1)
        if value.form == "fused" and value.apart and whole > 1:
            kernels[value] = every[value] = 1
            found.add(value)
        elif value.form == "fused" and (value.dear or len(value.operands) > 1) and count > 1:
            kernels[value] = 1
            if value.dear:
                every[value] = 1
                found.add(value)
    return found

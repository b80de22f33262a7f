"""The bytes that each operator of a program moves through memory, fused as XLA fuses.

Elementwise operators, broadcasts and layouts are computed inside the kernels that read them, and so
is what a reduction reads. A kernel is an operator whose result is in memory:

    stored   what other operators make; a fused result that must be in memory: other operators
             read it, or it is new state, or left for another program
    kernel   moves its result and its support: the stored values that its operands are computed
             from. Several kernels may read one value, and each computes a fused one for itself

So a fused operator moves nothing unless its result is stored. A result of W bytes with a support of
S bytes, read by n kernels, moves S + (1 + n) W where it is stored and n S where it is not: it is
stored where that is not more, so that sums of residuals are, one in every layer.    -> _stored()

On host devices each operator moves its own bytes: XLA computes no dear operator twice there, and
these are nearer to those of a compiled training step (test_fused_traffic).

Where attention is one kernel (`attends`), score matrices are computed inside it: they move nothing,
its products the other operands and results.                                            -> _scores()

Decisions follow from the program alone, not from its sharding, and are those of its own size at all
others: what an operator moves is then linear in the samples of a microbatch (`layer_floors`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from alpa_meta.compat import JaxprEqn, Literal, Var, open_jaxpr, shape_of
from alpa_meta.inter_op.layering import tensor_bytes
from alpa_meta.intra_op.other_sizes import OtherSizes
from alpa_meta.intra_op.stage_problem import StageEqns
from alpa_meta.operators import operator_of, reads_windows, traffic_bytes
from alpa_meta.operators.contraction import product_dims
from alpa_meta.operators.elementwise import is_barrier
from alpa_meta.operators.regions import bodies, is_region
from alpa_meta.program_caches import cached_by_program

Bytes = tuple[float, ...]
"""Of an operator, at the size of the program, then at the others."""

_Support = Mapping[Var, float]
"""Stored values, and the share of each that is read."""


@cached_by_program(16)  # stages are on many meshes
def fused_traffic(
    stage: StageEqns, others: OtherSizes, platform: str = "gpu", attends: bool = False
) -> Mapping[JaxprEqn, Bytes]:
    """Return the bytes of each operator of a stage and of its bodies, remembered."""
    return traffic_of(stage, others, platform, attends)


def traffic_of(
    stage: StageEqns, others: OtherSizes, platform: str, attends: bool
) -> Mapping[JaxprEqn, Bytes]:
    """Return the bytes of each operator of a stage and of its bodies."""
    leaving = {*stage.kept, *stage.delayed, *stage.sent, *(new for new, _ in stage.carried)}
    if stage.num_microbatches > 1:
        leaving |= stage.accumulated
    found: dict[JaxprEqn, Bytes] = {}
    _add(found, stage.eqns, leaving, others, platform != "cpu", attends)
    return found


def _add(
    found: dict[JaxprEqn, Bytes],
    eqns: Sequence[JaxprEqn],
    leaving: Collection[Var],
    others: OtherSizes,
    fuses: bool,
    attends: bool,
) -> None:
    forms = list(map(_form, eqns))
    reads = list(map(_read, eqns))
    size_of = _OwnBytes()
    stored = _stored(eqns, forms, reads, leaving, size_of) if fuses else set[Var]()
    scores = _scores(eqns) if attends else set()
    supports: dict[Var, _Support] = {}
    for eqn, form, read in zip(eqns, forms, reads, strict=True):
        if form is None and is_region(eqn):
            for body in map(open_jaxpr, bodies(eqn)):
                results = [atom for atom in body.outvars if not isinstance(atom, Literal)]
                _add(found, body.eqns, results, others, fuses, attends)
            continue
        twins = others.eqns.get(eqn, ())
        if form is None or not fuses:
            found[eqn] = tuple(map(traffic_bytes, (eqn, *twins)))
            if scores:
                inner = _inner_bytes(eqn, twins, scores)
                pairs = zip(found[eqn], inner, strict=True)
                found[eqn] = tuple(max(0.0, moved - kept) for moved, kept in pairs)
            continue
        support = _support(eqn, read, supports)
        made = eqn.outvars if form == "reduced" else stored.intersection(eqn.outvars)
        for var in eqn.outvars:
            if form == "reduced" or var in made:
                supports[var] = {var: 1.0}
            else:
                supports[var] = support
        if made and (not scores or scores.isdisjoint(read)):
            sizes = [
                (share, size_of[var], *_twin_bytes(var, size_of[var], others, len(twins)))
                for var, share in (*support.items(), *((var, 1.0) for var in made))
            ]
            found[eqn] = tuple(
                [sum(share * size[k] for share, *size in sizes) for k in range(1 + len(twins))]
            )
        else:
            found[eqn] = (0.0,) * (1 + len(twins))


class _OwnBytes(dict[Var, float]):
    """The bytes of each value of a program, found once."""

    def __missing__(self, var: Var) -> float:
        self[var] = found = tensor_bytes(var)
        return found


def _scores(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """Return the score matrices among the results: of products over several batch dims that have
    more elements than either operand, and what elementwise operators make of them."""
    found: set[Var] = set()
    for eqn in eqns:
        dims = product_dims(eqn)
        if dims is not None:
            batch = dims[1][0]
            result = math.prod(shape_of(eqn.outvars[0]))
            if len(batch) > 1 and all(result > math.prod(shape_of(a)) for a in eqn.invars):
                found.update(eqn.outvars)
        elif not is_region(eqn):
            sizes = {math.prod(shape_of(var)) for var in _read(eqn) if var in found}
            found.update(var for var in eqn.outvars if math.prod(shape_of(var)) in sizes)
    return found


def _read(eqn: JaxprEqn) -> list[Var]:
    return [atom for atom in eqn.invars if not isinstance(atom, Literal)]


def _inner_bytes(eqn: JaxprEqn, twins: Sequence[JaxprEqn], scores: Collection[Var]) -> Bytes:
    """Return the bytes of the score matrices that an operator and its twins read and make."""
    atoms = (*eqn.invars, *eqn.outvars)
    inner = [k for k, a in enumerate(atoms) if not isinstance(a, Literal) and a in scores]
    return tuple(
        sum(tensor_bytes((*one.invars, *one.outvars)[k]) for k in inner) for one in (eqn, *twins)
    )


def _stored(
    eqns: Sequence[JaxprEqn],
    forms: Sequence[str | None],
    reads: Sequence[Sequence[Var]],
    leaving: Collection[Var],
    size_of: Mapping[Var, float],
) -> set[Var]:
    """Return the results of fused operators that are in memory."""
    least = _read_at_least(eqns, forms, reads, size_of)
    needed = set(leaving)
    kernels: dict[Var, set[JaxprEqn]] = {}  # that read a value in their own way
    stored: set[Var] = set()
    for eqn, form, read in zip(reversed(eqns), reversed(forms), reversed(reads), strict=True):
        readers, held = {eqn}, False
        if form in ("fused", "alias"):
            readers = set().union(*(kernels.get(var, ()) for var in eqn.outvars))
            held = not needed.isdisjoint(eqn.outvars)
            if form == "fused":
                size = sum([size_of[var] for var in eqn.outvars])
                support = least[eqn.outvars[0]]
                held = held or support + (1 + len(readers)) * size <= len(readers) * support
                if held:
                    stored.update(eqn.outvars)
                    readers = {eqn}
        if form == "alias" and held or form is None and not reads_windows(eqn):
            needed.update(read)
        for var in read:
            known = kernels.get(var)
            if known is None:
                kernels[var] = set(readers)
            else:
                known.update(readers)
    return stored


def _read_at_least(
    eqns: Sequence[JaxprEqn],
    forms: Sequence[str | None],
    reads: Sequence[Sequence[Var]],
    size_of: Mapping[Var, float],
) -> dict[Var, float]:
    """Return the bytes that each fused result is computed from, at most its operands.

    They depend on few operators before it, so that a layer's do not on how many layers there are.
    """
    supports: dict[Var, _Support] = {}
    found = {}
    for eqn, form, read in zip(eqns, forms, reads, strict=True):
        if form in ("fused", "alias"):
            support = _support(eqn, read, supports)
            size = sum([share * size_of[var] for var, share in support.items()])
            for var in eqn.outvars:
                found[var] = size
                if size <= size_of[var]:
                    supports[var] = support
    return found


def _support(eqn: JaxprEqn, read: Sequence[Var], supports: Mapping[Var, _Support]) -> _Support:
    """Return the stored values that a fused operator or a reduction is computed from; it `read`s
    these."""
    found: dict[Var, float] = {}
    for var in read:
        own = supports.get(var)
        if own is None:
            found[var] = 1.0  # shares are at most that
            continue
        for one, share in own.items():
            if share > found.get(one, 0.0):
                found[one] = share
    if reads_windows(eqn):
        part = min(1.0, tensor_bytes(eqn.outvars[0]) / max(tensor_bytes(eqn.invars[0]), 1.0))
        return {var: part * share for var, share in found.items()}
    return found


def _form(eqn: JaxprEqn) -> str | None:
    """Return how an operator is fused, None if it is not."""
    if is_region(eqn) or is_barrier(eqn):
        return None
    form = operator_of(eqn).liveness
    return form if form in ("fused", "alias", "reduced") else None


def _twin_bytes(var: Var, own: float, others: OtherSizes, num_others: int) -> Bytes:
    """Return the bytes of a value at the other sizes; its `own` where it is the same at all."""
    twins = tuple(map(tensor_bytes, others.values.get(var, ())))
    return twins if len(twins) == num_others else (own,) * num_others

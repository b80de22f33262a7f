"""Layer clustering: cut the forward program, in program order, into layers of similar work.

With w(j, k) the work (seconds) of ops j..k over the average per layer and x(k) the bytes that cross
a cut before op k over a typical cut's bytes, the layers minimise

    sum over layers  10 max(0, w - 1 - eps)^2 + 10 max(0, 1 - eps - w)^2 + (w - 1)^2 / 10
    + sum over cuts  x(k) / 5  (+ 1/1000 for a cut that is not a border of repeated blocks)

by G(q, k) = min over j < k of G(q - 1, j) + layer(j, k) + cut(j)    -> _best_cuts()

Both bounds on the work are penalties, so there is always an answer. Cuts are taken at block borders
of repeated structure (-> repetition.py) and anywhere outside of it; where more layers are wanted
than there are blocks, or a layer would have less than 1 - eps of the average work, every block of a
run is cut at the same inner places. -> _places(), _starts()
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from stage_dp.repetition import Run, repeated_runs

Array = NDArray[np.float64]
MAX_LOOSE_CUTS = 256  # considered in each stretch without repetition
BALANCE = 0.5  # eps above
FINER_PIECES = 3  # more pieces of a block than needed, tried before a layer is left light


@frozen(kw_only=True)
class OpSequence:
    """The forward ops in program order. Values are numbers; those no op produces are inputs.

    `signatures` are equal for ops that do the same on the same shapes; by default they are made of
    seconds and bytes. `may_cut[k]` says whether a layer may begin at op k (default: anywhere).
    """

    seconds: Sequence[float]  # of each op, in any unit
    operands: Sequence[Sequence[int]]
    results: Sequence[Sequence[int]]
    value_bytes: Mapping[int, float]
    signatures: Sequence[Hashable] | None = None
    may_cut: Sequence[bool] | None = None

    def __attrs_post_init__(self) -> None:
        num = len(self.seconds)
        for name in ("operands", "results", "signatures", "may_cut"):
            given = getattr(self, name)
            if given is not None and len(given) != num:
                raise ValueError(
                    f"OpSequence.{name} needs one entry per op: {num}, got {len(given)}"
                )


@frozen(kw_only=True)
class Clustering:
    """Layer k is ops starts[k]..starts[k + 1] of the sequence."""

    starts: tuple[int, ...]  # [layers + 1]
    equivalence_classes: tuple[int, ...]  # [layers], numbered by first appearance
    seconds: tuple[float, ...] = field(repr=False)  # [layers]
    boundary_bytes: tuple[float, ...] = field(repr=False)  # [layers]: to later layers; last is 0

    @property
    def num_layers(self) -> int:
        return len(self.equivalence_classes)

    @property
    def layer_of_op(self) -> tuple[int, ...]:
        """Return the layer of each op: [ops]."""
        return tuple(
            layer
            for layer in range(self.num_layers)
            for _ in range(self.starts[layer], self.starts[layer + 1])
        )


def cluster_layers(
    ops: OpSequence,
    num_layers: int | None = None,
) -> Clustering:
    """Return `num_layers` layers (fewer only where there are not that many cuts), None: chosen
    here.

    Chosen numbers give each repeated block a layer of its own, and what is before, between and
    after them one where it has at least half a block's work.
    """
    if num_layers is not None and num_layers < 1:
        raise ValueError(f"num_layers must be at least 1, got {num_layers}")
    num_ops = len(ops.seconds)
    if not num_ops:
        raise ValueError("layer clustering needs at least one op, got an empty sequence")
    work = np.asarray(ops.seconds, dtype=np.float64)
    if not work.sum() > 0:
        work = np.ones(num_ops)
    live = live_bytes(ops)
    signatures = ops.signatures or [
        (seconds, tuple(ops.value_bytes[v] for v in results))
        for seconds, results in zip(ops.seconds, ops.results, strict=True)
    ]
    allowed = np.ones(num_ops + 1, dtype=bool)
    if ops.may_cut is not None:
        allowed[:-1] = ops.may_cut
    allowed[[0, num_ops]] = True
    runs = tuple(
        run
        for run in repeated_runs(signatures, work, live)
        if allowed[np.array(run.cuts)[1:-1]].all()
    )
    if num_layers is None:
        num_layers = _chosen_number(work, runs)
    starts = _starts(num_layers, work, live, runs, allowed)
    spans = list(itertools.pairwise(starts))
    return Clustering(
        starts=tuple(starts),
        equivalence_classes=_classes(ops, signatures, spans),
        seconds=tuple(float(np.sum(np.asarray(ops.seconds[a:b], dtype=float))) for a, b in spans),
        boundary_bytes=tuple(float(live[b]) for _, b in spans),
    )


def _starts(
    num_layers: int,
    work: Array,
    live: Array,
    runs: Sequence[Run],
    allowed: NDArray[np.bool_],
) -> list[int]:
    """Return the cuts [layers + 1]: of whole blocks, or of as few pieces of them as leave no layer
    without its share of the work."""
    borders = {cut for run in runs for cut in run.cuts}
    best: tuple[float, list[int]] | None = None
    for places in _places(num_layers, work, live, runs, allowed):
        loose = np.array([place not in borders for place in places]) * 1e-3
        count = min(num_layers, len(places) - 1)
        cost, cuts = _best_cuts(count, places, work, live, loose)
        if best is None or cost < best[0]:
            best = cost, cuts
        least = min(work[a:b].sum() for a, b in itertools.pairwise(cuts))
        if least >= (1 - BALANCE) * work.sum() / num_layers:
            break
    assert best is not None
    return best[1]


def live_bytes(ops: OpSequence) -> Array:
    """Return the bytes of values made before op k and read by op k or later: [ops + 1]."""
    made: dict[int, int] = {}
    last: dict[int, int] = {}
    for k in range(len(ops.seconds)):
        for value in ops.operands[k]:
            if value in made:
                last[value] = k
        for value in ops.results[k]:
            made[value] = k
    change = np.zeros(len(ops.seconds) + 2)
    for value, k in last.items():
        change[made[value] + 1] += ops.value_bytes[value]
        change[k + 1] -= ops.value_bytes[value]
    live: Array = np.cumsum(change)[:-1]
    return np.maximum(live, 0.0)


def _chosen_number(work: Array, runs: Sequence[Run]) -> int:
    if not runs:
        heavy = int((work >= 0.01 * work.sum()).sum())
        return max(1, min(16, heavy // 3 + 1))
    block = min(work[run.start : run.start + run.period].sum() for run in runs)
    edges = [0, *(edge for run in runs for edge in (run.start, run.stop)), len(work)]
    between = [work[a:b].sum() for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return sum(run.count for run in runs) + sum(int(w >= block / 2) for w in between)


def _places(
    num_layers: int, work: Array, live: Array, runs: Sequence[Run], allowed: NDArray[np.bool_]
) -> Iterator[list[int]]:
    """Yield the op positions where layers may begin or end, 0 and the number of ops included.

    First as few as give so many layers, then with the blocks of runs in more and more pieces.
    """
    edges = [0, *(edge for run in runs for edge in (run.start, run.stop)), len(work)]
    outside = {0, len(work)}
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        loose = [k for k in range(start + 1, stop) if allowed[k]]
        loose.sort(key=lambda k: float(live[k]))
        outside.update(loose[: max(MAX_LOOSE_CUTS, num_layers)])
    enough = 0
    for finer in range(max((run.period for run in runs), default=1)):
        places = set(outside)
        for run in runs:
            wanted = num_layers * work[run.start : run.stop].sum() / work.sum()
            pieces = max(1, math.floor(wanted / run.count + 0.25)) + finer
            inner = _inner_cuts(pieces, work, live, run, allowed)
            places |= {start + at for start in run.cuts[:-1] for at in (0, *inner)} | {run.stop}
        found = sorted(k for k in places if allowed[k])
        if len(found) > num_layers:
            yield found
            enough += 1
        if enough > FINER_PIECES:
            return
    if not enough:
        yield np.flatnonzero(allowed).tolist()


def _inner_cuts(
    pieces: int, work: Array, live: Array, run: Run, allowed: NDArray[np.bool_]
) -> list[int]:
    """Return offsets that cut each block of `run` into `pieces` alike."""
    offsets = [
        k for k in range(1, run.period) if all(allowed[start + k] for start in run.cuts[:-1])
    ]
    pieces = min(pieces, len(offsets) + 1)
    if pieces == 1:
        return []
    first = slice(run.start, run.start + run.period)
    crossing = np.append(live[first], live[run.start + run.period])
    _, cuts = _best_cuts(pieces, [0, *offsets, run.period], work[first], crossing, 0.0)
    return cuts[1:-1]


def _best_cuts(
    num_layers: int,
    places: Sequence[int],
    work: Array,
    live: Array,
    loose: Array | float,
) -> tuple[float, list[int]]:
    """Return the least sum of the module docstring, and the `num_layers` + 1 of `places` it is of.

    `loose`: [places] or one for all, what a cut there costs on top.
    """
    total = np.concatenate([[0.0], np.cumsum(work)])[np.asarray(places)]
    share = (total[None, :] - total[:, None]) * (num_layers / max(total[-1], 1e-300))
    eps = BALANCE
    layer = (
        10 * np.maximum(0.0, share - 1 - eps) ** 2
        + 10 * np.maximum(0.0, 1 - eps - share) ** 2
        + (share - 1) ** 2 / 10
    )
    layer[np.tril_indices(len(places))] = np.inf
    crossing = live[np.asarray(places)]
    middle = crossing[(total > 0.1 * total[-1]) & (total < 0.9 * total[-1])]
    positive = middle[middle > 0] if (middle > 0).any() else crossing[crossing > 0]
    typical = float(np.median(positive)) if len(positive) else 1.0
    cut = crossing / (5 * typical) + loose
    cut[[0, -1]] = 0.0
    cost = layer + cut[:, None]
    value = np.full(len(places), np.inf)
    value[0] = 0.0
    origins = []
    for _ in range(num_layers):
        through = value[:, None] + cost
        origin = through.argmin(axis=0)
        value = through[origin, np.arange(len(places))]
        origins.append(origin)
    at = len(places) - 1
    cuts = [places[at]]
    for origin in reversed(origins):
        at = int(origin[at])
        cuts.append(places[at])
    return float(value[-1]), cuts[::-1]


def _classes(
    ops: OpSequence, signatures: Sequence[Hashable], spans: Sequence[tuple[int, int]]
) -> tuple[int, ...]:
    """Return the class of each span: equal ones have equal ops, wired and leaving alike."""
    readers: dict[int, list[int]] = {}
    for k, operands in enumerate(ops.operands):
        for value in operands:
            readers.setdefault(value, []).append(k)
    number: dict[Hashable, int] = {}
    result = []
    for start, stop in spans:
        local: dict[int, tuple[str, int]] = {}
        outside = inside = 0
        parts: list[Hashable] = []
        leaving = []
        for k in range(start, stop):
            for value in ops.operands[k]:
                if value not in local:
                    local[value] = ("from outside", outside)
                    outside += 1
            for value in ops.results[k]:
                local[value] = ("inside", inside)
                inside += 1
                if any(reader >= stop for reader in readers.get(value, ())):
                    leaving.append(local[value])
            parts.append((signatures[k], tuple(local[v] for v in ops.operands[k])))
        key = (tuple(parts), tuple(leaving))
        result.append(number.setdefault(key, len(number)))
    return tuple(result)

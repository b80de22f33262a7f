"""Pipelines made better by small changes, while the exact step time falls.

A *chain* is the (first layer, stop, kind of submesh) of each stage. Its neighbours have one border
moved, one submesh exchanged for another, two neighbouring submeshes swapped, two stages merged or
one split. Each gets its rows with and without a limit on the slowest stage
(-> Rows.assignments()), all neighbours are scored together, and the best becomes the next chain.
Of the last chain the rows of each stage are exchanged one at a time. Neighbours whose bound is no
better are left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from stage_dp.cell_fronts import Fronts, TooManyLabelsError
from stage_dp.joint_chain import Scored, StageChoice, rows_by_limit, score
from stage_dp.joint_costs import CountCosts
from stage_dp.joint_links import Links
from stage_dp.joint_schedules import warmups
from stage_dp.menu_table import BACKWARD, FEW_LAYERS, FORWARD, STEP, unbeaten
from stage_dp.schedules import ScheduleRule

ALL_TRIED = 100  # up to which all choices of rows for one chain are scored
PROMISING = 6  # neighbours of a chain of more layers whose rows are chosen
MAX_OPTIONS = 48  # ways to run one stage that are looked at
LABELS = 20_000  # of the fronts, per microbatch count
QUICK = 64  # microbatches above which few ways to share out those in flight are tried

Chain = tuple[tuple[int, int, int], ...]


class Work:
    """A count of stages that may still be solved."""

    def __init__(self, stages: int) -> None:
        self.left = stages


class Rows:
    """Ways to run the stages of chains at one microbatch count."""

    def __init__(self, costs: CountCosts, links: Links, work: Work) -> None:
        self.costs, self.links, self.work = costs, links, work
        self.count = costs.table.num_microbatches
        self.fronts = Fronts(costs.table, costs.space.sequences, LABELS)
        self._known: dict[tuple[int, int, int, int], list[StageChoice]] = {}

    def options(
        self, start: int, stop: int, kind: int, held: int, num_delayed: int
    ) -> list[StageChoice]:
        """Return ways to run a stage within memory."""
        sequence = int(self.costs.space.sequences.number[start, stop])
        key = (sequence, kind, held, num_delayed)
        if key not in self._known:
            self.work.left -= 1
            self._known[key] = self._made(start, stop, kind, held, num_delayed)
        return [c.at(start, stop) for c in self._known[key]]

    def _made(
        self, start: int, stop: int, kind: int, held: int, num_delayed: int
    ) -> list[StageChoice]:
        if self.costs.space.num_layers > FEW_LAYERS:
            return self.costs.choices(start, stop, kind, held, num_delayed)
        found: list[StageChoice] = []
        sequence = int(self.costs.space.sequences.number[start, stop])
        for mesh in itertools.compress(self.costs.meshes, self.costs.kind == kind):
            try:
                front = self.fronts.front(sequence, mesh)
            except TooManyLabelsError:
                return self.costs.choices(start, stop, kind, held, num_delayed)
            for label, columns in enumerate(front.columns):
                choice = StageChoice(
                    start,
                    stop,
                    mesh,
                    columns,
                    int(front.layout_in[label]),
                    int(front.layout_out[label]),
                    self.fronts.rows(sequence, mesh, label),
                )
                if choice.need(held, num_delayed) <= self.costs.table.memory[mesh]:
                    found.append(choice)
        if not found:
            return []
        figures = np.array([c.columns[[FORWARD, BACKWARD, STEP]] for c in found])
        if not self.costs.table.splits:
            layouts = np.array([c.layout_in * 4096 + c.layout_out for c in found])
            found = [found[n] for n in unbeaten(figures, layouts)]
        found.sort(key=lambda c: c.seconds + float(c.columns[STEP]) / self.count)
        return found[:MAX_OPTIONS]

    def assignments(
        self, chain: Chain, held: Sequence[int], num_delayed: int
    ) -> list[list[StageChoice]]:
        """Return choices of rows for `chain`, with and without a limit on the slowest stage."""
        options = [
            self.options(*stage, k, num_delayed) for stage, k in zip(chain, held, strict=True)
        ]
        if not all(options):
            return []
        if math.prod(map(len, options)) <= ALL_TRIED:
            return [list(choices) for choices in itertools.product(*options)]
        return rows_by_limit(options, self.links, self.count, self.costs.table.samples)


class Improvement:
    """Small changes to pipelines under `rule`."""

    def __init__(self, rows: Rows, rule: ScheduleRule) -> None:
        self.rows, self.rule = rows, rule
        self.costs, self.links, self.count = rows.costs, rows.links, rows.count
        self.problem = self.costs.table.problem
        self.bounds = self.costs.bounds(False)

    def run(self, start: Scored) -> Scored | None:
        """Return the best pipeline met from the chain of `start` on, which may be under another
        rule or of another microbatch count; None if none fits."""
        best = start if start.rule is self.rule and start.num_microbatches == self.count else None
        chain = self._chain(start)
        while self.rows.work.left > 0:
            better = self._best([chain, *self._neighbours(chain)], best)
            if better is None:
                break
            best, chain = better, self._chain(better)
        while best is not None and self.rows.work.left > 0:
            options = [
                self.rows.options(*stage, k, self.rule.least_delayed)
                for stage, k in zip(chain, self._held(len(chain), best), strict=True)
            ]
            changed = [
                [*best.stages[:at], choice, *best.stages[at + 1 :]]
                for at, own in enumerate(options)
                for choice in own
            ]
            better = self._scored(changed, best)
            if better is None:
                break
            best = better
        return best

    def polish(self, best: Scored) -> Scored:
        """Return the pipeline, or one beside it, with the rows of its stages solved nearly
        exactly."""
        self.costs.sharpen()
        held = self._held(len(best.stages), best)
        rows = self.rows.assignments(self._chain(best), held, self.rule.least_delayed)
        return self.run(self._scored(rows, best) or best) or best

    def _chain(self, found: Scored) -> Chain:
        kinds = self.links.kind
        return tuple((s.layer_start, s.layer_stop, kinds[s.mesh]) for s in found.stages)

    def _held(self, num: int, best: Scored | None = None) -> tuple[int, ...]:
        if best is not None and self.rule.flexible:
            return best.in_flight
        return warmups(self.rule, self.count, (0,) * (num - 1), num)

    def _best(self, chains: Sequence[Chain], best: Scored | None) -> Scored | None:
        limit = best.step_seconds if best else math.inf
        promise = [(self._bound(chain), n) for n, chain in enumerate(chains)]
        promising = sorted(one for one in promise if one[0] < limit)
        if self.costs.space.num_layers > FEW_LAYERS:
            promising = promising[:PROMISING]
        rows = [
            choices
            for _, n in promising
            for choices in self.rows.assignments(
                chains[n], self._held(len(chains[n])), self.rule.least_delayed
            )
        ]
        return self._scored(rows, best)

    def _scored(self, rows: Sequence[Sequence[StageChoice]], best: Scored | None) -> Scored | None:
        """Return the best of `rows` if it is better than `best`."""
        limit = best.step_seconds * (1 - 1e-9) if best else math.inf
        table, quick = self.costs.table, self.count > QUICK
        found = score(rows, self.rule, table, self.links, quick=quick, limit=limit)
        if found is not None and quick:
            found = score([found.stages], self.rule, table, self.links)
        return found if found is not None and found.step_seconds < limit else None

    def _bound(self, chain: Chain) -> float:
        """Return a bound on the step time from those of the stages, without way back if the
        backward is split."""
        numbers = [self.costs.space.sequences.number[start, stop] for start, stop, _ in chain]
        kinds = [kind for _, _, kind in chain]
        busy = self.bounds.busy[numbers, kinds, 0]
        seconds = self.bounds.seconds[numbers, kinds, 0]
        if not np.isfinite(seconds).all():
            return math.inf
        parts = self.bounds.parts[numbers, kinds, 0] if self.rule.splits_backward else seconds
        way = np.concatenate([[0.0], np.cumsum(parts)[:-1]])
        return float(max(busy.max(), (way + self.count * seconds).max()))

    def _neighbours(self, chain: Chain) -> Iterator[Chain]:
        for neighbour in dict.fromkeys(_changed(chain, range(len(self.costs.space.pool.kinds)))):
            num = len(neighbour)
            if self.problem.num_stages not in (None, num):
                continue
            sizes = [self.costs.space.pool.kinds[kind].num_devices for _, _, kind in neighbour]
            total = sum(g.num_hosts * g.devices_per_host for g in self.problem.device_groups)
            if sum(sizes) > total or (self.problem.use_all_devices and sum(sizes) != total):
                continue
            yield neighbour


def _changed(chain: Chain, kinds: Sequence[int]) -> Iterator[Chain]:
    for at, (start, stop, kind) in enumerate(chain):
        before, after = chain[:at], chain[at + 1 :]
        for other in kinds:
            yield (*before, (start, stop, other), *after)
        for cut in _cuts(start, stop):
            for one, two in itertools.product(kinds, repeat=2):
                yield (*before, (start, cut, one), (cut, stop, two), *after)
        if not after:
            continue
        (_, end, following), rest = after[0], after[1:]
        for other in kinds:
            yield (*before, (start, end, other), *rest)
        for by in (-4, -2, -1, 0, 1, 2, 4):
            cut = stop + by
            if not start < cut < end:
                continue
            yield (*before, (start, cut, kind), (cut, end, following), *rest)
            yield (*before, (start, cut, following), (cut, end, kind), *rest)


def _cuts(start: int, stop: int) -> list[int]:
    """Return where a stage is cut in two: everywhere if it is short, else in the middle."""
    if stop - start <= 4:
        return list(range(start + 1, stop))
    return [(start + stop) // 2]

"""What equations take in layers that recompute: the first time, and once more.

What the backward pass makes again need not be in memory after the forward pass: the kernels that
read it compute it, the first time and, where only such kernels read it, the second time too
(`fused_traffic`). The forward pass of a transformer's layer that redoes its scores and norms takes
a tenth less than of one that keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from alpa_meta.inter_op.redone_program import redone_traffic
from alpa_meta.inter_op.scope_facts import ScopeFacts, redone_of
from alpa_meta.intra_op.equation_seconds import EquationSeconds, Priced, PricedPairs
from alpa_meta.intra_op.fused_traffic import Bytes, fused_traffic
from alpa_meta.intra_op.operator_seconds import compute_seconds
from alpa_meta.intra_op.other_sizes import others_of
from alpa_meta.intra_op.selection import Selection
from alpa_meta.operators import sharding_rule
from alpa_meta.operators.regions import is_region
from alpa_meta.types import Floats


class RedoneSeconds:
    """Seconds per step of a stage's equations where its layers recompute as one `kind` says.

    `seconds` are of twice as many equations: the first time, then once more; of "none" those of the
    selection. `first[k]` are those of entry k of the selection's `EquationSeconds.costs` the first
    time. `sizes` are the facts of the stage at the size of the selection, and at the others.
    """

    def __init__(self, selection: Selection, sizes: Sequence[ScopeFacts], kind: str) -> None:
        self.first: list[Priced] = [priced for _, _, priced in selection.seconds.costs]
        self.once_more: list[tuple[int, int, Priced]] = []  # position, node, [strategies] seconds
        self.seconds = selection.seconds
        if kind == "none":
            return
        facts, costs = sizes[0], selection.costs
        others = tuple(one.scope.eqns for one in sizes[1:])
        count = len(facts.scope.eqns.eqns)
        redone = set(redone_of(facts, kind).equations.tolist())
        traffic = redone_traffic(facts, kind, others, costs.platform, costs.attends)
        moving = _Moving(selection, sizes)
        for n, (position, node, priced) in enumerate(selection.seconds.costs):
            self.first[n] = moving.seconds(position, priced, traffic.first)
            if position in redone:
                more = moving.seconds(position, priced, traffic.again)
                self.once_more.append((position, node, more))
        firsts = zip(selection.seconds.costs, self.first, strict=True)
        entries = [(position, node, priced) for (position, node, _), priced in firsts]
        entries += [(count + position, node, priced) for position, node, priced in self.once_more]
        self.seconds = selection.seconds.with_again(entries, redone)


class SplitSeconds:
    """Seconds per step that a stage's layers take more where their backward pass is in two parts,
    and they recompute as one `kind` says: what one part makes for the other is in memory.

    `least` [sizes, layers] are the seconds under the best choice.
    """

    def __init__(
        self, selection: Selection, sizes: Sequence[ScopeFacts], kind: str, num_layers: int
    ) -> None:
        facts, costs = sizes[0], selection.costs
        others = tuple(one.scope.eqns for one in sizes[1:])
        whole, parts = (
            redone_traffic(facts, kind, others, costs.platform, costs.attends, split)
            for split in (False, True)
        )
        moving = _Moving(selection, sizes)
        entries: list[tuple[int, int, Priced]] = []
        layers: list[int] = []
        for position, node, priced in selection.seconds.costs:
            for before, after in ((whole.first, parts.first), (whole.again, parts.again)):
                if before.get(position) != after.get(position):
                    of_both = (moving.seconds(position, priced, one).at for one in (after, before))
                    more = Priced(tuple(a - b for a, b in zip(*of_both, strict=True)))
                    layers.append(int(facts.layers[position]))
                    entries.append((node, node, more))
        self._num_layers, self._layers = num_layers, layers
        self._pairs: PricedPairs | None = PricedPairs(len(sizes), entries)
        by_node: dict[tuple[int, int], Floats] = {}  # [sizes, strategies]
        for layer, (node, _, more) in zip(layers, entries, strict=True):
            at, own = (layer, node), np.array(more.at)
            by_node[at] = by_node[at] + own if at in by_node else own
        self.least = np.zeros((len(sizes), num_layers))
        for (layer, _), seconds in by_node.items():
            self.least[:, layer] += seconds.min(axis=1)
        self.least = np.maximum(self.least, 0.0)

    def under(self, choice: Sequence[int], size: int) -> Floats:
        """Return [layers] seconds under a choice."""
        assert self._pairs is not None
        more = np.bincount(self._layers, self._pairs.under(choice, size), self._num_layers)
        return np.asarray(np.maximum(more, 0.0))

    def forget_choices(self) -> None:
        """Free what only choices are priced by."""
        self._pairs, self._layers = None, []


class _Moving:
    """Prices the equations of a selection where they move other bytes, remembered."""

    def __init__(self, selection: Selection, sizes: Sequence[ScopeFacts]) -> None:
        self._selection, self._sizes = selection, sizes
        self._known: dict[tuple[Priced, Bytes, Bytes], Priced] = {}
        stage, costs = sizes[0].scope.eqns, selection.costs
        self._twins = others_of(stage, tuple(one.scope.eqns for one in sizes[1:]))
        self._moved = fused_traffic(stage, self._twins, costs.platform, costs.attends)

    def seconds(self, position: int, priced: Priced, traffic: Mapping[int, Bytes]) -> Priced:
        """Return the seconds of an equation that moves the bytes of `traffic`."""
        stage = self._sizes[0].scope.eqns
        eqn, record = stage.eqns[position], self._selection.records[position]
        strategies = record.strategies
        if is_region(eqn) or position not in traffic or len(strategies) != len(priced.at[0]):
            return priced
        before, after = self._moved[eqn], traffic[position]
        key = priced, before, after
        if before != after and key not in self._known:
            costs, rule = self._selection.costs, sharding_rule(eqn)
            found = []
            of = (eqn, *self._twins.eqns.get(eqn, ()))
            for seconds, one, facts, old, new in zip(
                priced.at, of, self._sizes, before, after, strict=False
            ):
                more = compute_seconds(costs, one, rule, strategies, new)
                more = more - compute_seconds(costs, one, rule, strategies, old)
                found.append(seconds + facts.scope.eqns.num_microbatches * more)
            self._known[key] = Priced(tuple(found))
        return priced if before == after else self._known[key]


def least_seconds(selection: Selection, kinds: Sequence[RedoneSeconds]) -> EquationSeconds:
    """Return the seconds of a stage's equations the first time, the least of all `kinds`."""
    seconds = selection.seconds
    known: dict[tuple[Priced, ...], Priced] = {}
    entries = []
    for n, (position, node, priced) in enumerate(seconds.costs):
        of = tuple(dict.fromkeys(kind.first[n] for kind in kinds))
        least = known.get(of)
        if least is None:
            sizes = zip(*(one.at for one in of), strict=True)
            least = known[of] = (
                priced if len(of) == 1 else Priced(tuple(np.minimum.reduce(one) for one in sizes))
            )
        entries.append((position, node, least))
    return seconds.with_costs(entries)

"""What a choice of strategies costs and holds, layer by layer.

What a layer takes that recomputes needs no program of its own: its backward pass runs some
equations of its forward pass once more, under the strategies of the first run, and holds their
results as temporaries instead of from one pass to the other.               -> LayerCosts.under()

Where another program runs the step, whose host launches kernel by kernel, the passes of a layer
take longer than its devices where launches do (`launch_costs`). Selection problems and floors are
of the devices' seconds alone: no layer takes less.                    -> StageCosts.launched()
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from attrs import evolve, frozen

from alpa_interchange import ShardingProblem
from alpa_meta.inter_op.held_bytes import HeldBytes
from alpa_meta.inter_op.kept_between import Between, between_of
from alpa_meta.inter_op.redone_program import delayed_at, waiting_at
from alpa_meta.inter_op.redone_seconds import RedoneSeconds, SplitSeconds, least_seconds
from alpa_meta.inter_op.scope_facts import HELD, Redone, facts_of_scope, redone_of
from alpa_meta.inter_op.stage_costs import StageCosts
from alpa_meta.inter_op.stage_selection import StageScope
from alpa_meta.inter_op.window import Window
from alpa_meta.intra_op.bucketed_traffic import BucketedTraffic, Group
from alpa_meta.intra_op.equation_seconds import EquationSeconds
from alpa_meta.intra_op.launch_costs import launch_costs
from alpa_meta.intra_op.liveness import KINDS, PHASES
from alpa_meta.intra_op.selection import Selection, build
from alpa_meta.intra_op.sent_seconds import SentSeconds
from alpa_meta.types import Floats, HostArray, Ints
from cost_model.program import Program as TrainingProgram

# Share of the update's seconds that floors count beside a price on bytes. With all of them, a bound
# took three layers of GPT-39B on 4 V100 for microbatches of 0.82 of the step beside an update of
# 0.12, which nothing runs; with none, splitting the optimizer's moments over all devices would be
# free. Other shares were not tried.
LIGHT_STEP = 0.1


@frozen(eq=False)
class Recomputed:
    """What layers of one kind of recomputation run once more, make again and keep, and what a
    split backward keeps besides for its part by weight, and in all while that waits."""

    redone: Redone
    made: HeldBytes
    kept: HeldBytes
    delayed: HeldBytes
    waiting: HeldBytes


class LayerCosts:
    """The costs of a stage's layers on one mesh, under any choice, at its size and at those of
    `others`; `kinds` are those of recomputation that layers may have. `splits`: the backward pass
    may be in two parts.

    `sharing`: how many layers share what buckets take beyond the shares of what they hold, those of
    a longer model; None: its own.

    Equations without a layer count for layer 0. Of a `window`, layers that it left out cost what
    those that stand for them do.
    """

    def __init__(
        self,
        scope: StageScope,
        selection: Selection,
        num_layers: int,
        window: Window | None = None,
        others: Sequence[StageScope] = (),
        kinds: Sequence[str] = ("none",),
        splits: bool = False,
        sharing: int | None = None,
    ) -> None:
        self.kinds, self.splits = kinds, splits
        self.selection, self.num_layers = selection, num_layers
        self.facts = facts_of_scope(scope)
        self._sizes = (self.facts, *map(facts_of_scope, others))
        self._forth = self._back = np.arange(num_layers)
        if window is not None:
            self._forth, self._back = np.array(window.layer_of).T
        self._last_priced: tuple[tuple[int, ...], dict[int, tuple[Floats, Floats]]] | None = None
        self._last_costs: tuple[tuple[int, ...], dict[tuple[str, int], StageCosts]] | None = None
        self._last_parts: tuple[tuple[int, ...], dict[int, Floats]] | None = None
        self._last_beyond: tuple[tuple[int, ...], list[tuple[Group, Floats]]] | None = None
        self._last: tuple[tuple[int, ...], Mapping[str, float]] | None = None
        self._floors: dict[int, Floats] = {}
        self._least: dict[int, Floats] = {}
        self._kinds: dict[str, Recomputed] = {}
        self._redone: dict[str, RedoneSeconds] = {}
        self._split: dict[str, SplitSeconds] = {}
        self._kept_between: dict[str, Between | None] = {}
        self._least_more: dict[tuple[str, str, int], Floats] = {}
        self._window, self._sharing = window, sharing or num_layers
        self.held = {
            name: HeldBytes.of(selection, [facts.held[name] for facts in self._sizes])
            for name in HELD
        }

    def under(self, choice: Sequence[int], kind: str = "none", size: int = 0) -> StageCosts:
        """Return the costs of a choice, with layers that recompute as `kind` says, remembered for
        the last choice.

        `size`: 0 is that of the problem, then come those of the others.
        """
        choice = tuple(choice)
        if self._last_costs is None or self._last_costs[0] != choice:
            self._last_costs = choice, {}
        known = self._last_costs[1]
        if (kind, size) not in known:
            found = self._under(choice, kind, size)
            if self._launches is not None:
                found = found.launched(self._launches.under(choice, kind, size), self._program)
            known[kind, size] = found
        return known[kind, size]

    @functools.cached_property
    def _launches(self) -> LayerCosts | None:
        """What the host takes to launch what the layers run, None where nothing waits for it."""
        selection, scopes = self.selection, [one.scope for one in self._sizes]
        costs = launch_costs(selection.costs)
        if costs is None:
            return None
        others = tuple(scope.eqns for scope in scopes[1:])
        launching = build(selection.stage, costs, f"launches of {selection.problem.name}", others)
        of = (self.num_layers, self._window, scopes[1:], self.kinds)
        return LayerCosts(scopes[0], launching, *of)

    @property
    def _program(self) -> TrainingProgram:
        """The program that runs the step, where it is not ours."""
        program = self.selection.costs.model.program
        assert program is not None
        return program

    def _under(self, choice: tuple[int, ...], kind: str, size: int) -> StageCosts:
        selection, facts, count = self.selection, self.facts, self.num_layers
        seconds, usage = self._priced(choice, size)
        again = np.zeros(len(seconds))
        if kind != "none":
            both = self._redone_seconds(kind).seconds.under(choice, size)
            seconds, again = both[: len(seconds)], both[len(seconds) :]
        table = np.bincount(
            facts.phases * count + facts.layers, seconds, len(PHASES) * count
        ).reshape(len(PHASES), count)
        table[1] += np.bincount(facts.layers, again, count)
        for phase, more in self._extra(choice).items():
            runs = 1.0 if phase == "update" else self._ratio(size)
            table[PHASES.index(phase)] += runs * more / self._sharing
        working = self.working(usage[KINDS.index("temporaries")])
        held = {name: of.by_layer(choice, size, count) for name, of in self.held.items()}
        if kind != "none":
            of_kind = self.recomputed(kind)
            held["activations"] = of_kind.kept.by_layer(choice, size, count)
            held["delayed"] = of_kind.delayed.by_layer(choice, size, count)
            held["waiting"] = of_kind.waiting.by_layer(choice, size, count)
            working = working + self.alive(of_kind.redone, of_kind.made.under(choice, size))
        between, kept = self._between(kind), np.zeros(count)
        if between is not None:
            kept = between.beyond(choice, size, count)
            working = np.maximum(working - between.alive(choice, size), 0.0)
        back = self._back
        activations = held["activations"][back]
        if kind == "none" and not facts.scope.eqns.kept:
            activations = activations * _share_held(usage, activations)
        late: HostArray = np.bincount(facts.layers[facts.delayed], seconds[facts.delayed], count)
        split = np.zeros(count)
        if self.splits:
            split = self._split_seconds(kind).under(choice, size)
        return StageCosts(
            table[0][self._forth],
            table[1][back],
            late[back],
            split[back],
            table[2][back],
            held["state"][back],
            held["gradients"][back],
            activations,
            held["delayed"][back],
            held["waiting"][back],
            kept[back],
            self._transient(working, held["activations"])[back],
            self.floors(),
            selection.memory.peak_of(usage),
        )

    def forget_choices(self) -> None:
        """Free what only choices are priced by; floors go by what stays."""
        for kind in self.kinds:
            self.seconds_of(kind)
            if kind != "none":
                self.recomputed(kind)
            if self.splits:
                self._split_seconds(kind).forget_choices()
        costs = self.selection.costs.forgotten()
        self.__dict__.pop("_launches", None)
        self.selection = evolve(
            self.selection,
            records=(),
            costs=costs,
            traffic=BucketedTraffic(costs),
            sent=SentSeconds(costs),
        )

    def sent(
        self, choice: Sequence[int], kind: str = "none", size: int = 0
    ) -> Mapping[str, Floats]:
        """Return [layers, axes, 2] the seconds of `under` that links take: of each phase, and of
        "by_weight" in the backward. The last dim grows with an axis' latency, with 1 / bandwidth.
        """
        facts, count = self.facts, self.num_layers
        parts = self._parts(tuple(choice), size)
        late = facts.delayed
        table = _by_place(facts.phases * count + facts.layers, parts, len(PHASES) * count)
        found = dict(zip(PHASES, table.reshape(len(PHASES), count, *parts.shape[1:]), strict=True))
        found["by_weight"] = _by_place(facts.layers[late], parts[late], count)
        if kind != "none":
            again = self.recomputed(kind).redone.equations
            found["backward"] = found["backward"] + _by_place(
                facts.layers[again], parts[again], count
            )
        for group, beyond in self._beyond(tuple(choice)):
            runs = 1.0 if group.phase == "update" else self._ratio(size)
            found[group.phase] = found[group.phase] + runs * group.times * beyond / self._sharing
        back = self._back
        found = {
            name: part[self._forth if name == "forward" else back] for name, part in found.items()
        }
        if self._launches is not None:
            slowed = self.under(choice, kind, size).slowed
            assert slowed is not None
            # parts are derivatives, and what waits for launches has small ones
            share = self._program.device_share(slowed)[:, None, None]
            found |= {name: share * part for name, part in found.items() if name != "update"}
        return found

    def floors(self, size: int = 0) -> Floats:
        """Return [layers, 2] seconds no choice can beat, of the microbatches and of the update.

        Each equation costs at least the least it costs under any of its strategies, without
        conversions.
        """
        if size not in self._floors:
            updates = self.facts.phases == PHASES.index("update")
            at = 2 * self.facts.layers + updates
            least: HostArray = np.bincount(
                at, self.selection.seconds.least(size), 2 * self.num_layers
            )
            self._floors[size] = least.reshape(-1, 2)[self._back]
        return self._floors[size]

    def layer_problem(
        self, layer: int, seconds: Floats, part: str = "all", kind: str = "least"
    ) -> ShardingProblem:
        """Return the selection problem of one layer alone, whose neighbours hand over and take
        whatever it likes, with seconds like one of the tables of `seconds_of(kind)`. Sums that run
        once a step where stages divide the layers are left out.

        `part`: "all" of it, "light_step" with a share of the update, "seconds" of its microbatches,
        without the update, whose nodes it has all the same, or of these "forward",
        "forward_and_input", with what other layers wait for of the backward, or "backward".
        """
        facts = self.facts
        forward, update = (facts.phases == PHASES.index(name) for name in ("forward", "update"))
        found = (facts.layers == layer) & ~facts.sunk
        again = found
        shares = np.where(update, {"light_step": LIGHT_STEP, "seconds": 0.0}.get(part, 1.0), 1.0)
        if part == "forward_and_input":
            found = found & ~update & ~facts.delayed
        elif part == "forward":  # what runs once more is of the backward
            found, again = found & forward, np.zeros_like(found)
        elif part == "backward":
            found = found & ~forward & ~update
        of = self.seconds_of(kind)
        if of.count > len(found):  # of those that run once more, all
            found = np.concatenate([found, again])
            shares = np.concatenate([shares, np.ones(len(shares))])
        return of.problem_of(found, seconds, shares)

    def between(
        self, layers: tuple[int, int], seconds: Floats, kind: str = "least"
    ) -> list[tuple[int, int, Floats]]:
        """Return what two layers read from one another (`EquationSeconds.between`)."""
        of = self.seconds_of(kind)
        at = np.resize(self.facts.layers, of.count)
        before, after = (at == layer for layer in layers)
        return of.between(before, after, seconds)

    def seconds_of(self, kind: str) -> EquationSeconds:
        """Return the seconds of equations, and of those that run once more after them, in layers
        that recompute as `kind` says; of "least" the first time, the least of all kinds."""
        if kind == "least":
            return self._least_of_kinds
        return self._redone_seconds(kind).seconds

    def least(self, layer: int, size: int = 0) -> dict[str, float]:
        """Return seconds per step of a layer that no choice can beat, without conversions, however
        it recomputes: of each phase, and of the parts of the backward that other layers wait for
        and that they do not."""
        facts, seconds = self.facts, self._least_seconds(size)
        own = (facts.layers == layer) & ~facts.sunk
        found = {
            name: float(seconds[own & (facts.phases == number)].sum())
            for number, name in enumerate(PHASES)
        }
        late = float(seconds[own & facts.delayed].sum())
        return found | {"backward_input": found["backward"] - late, "backward_weight": late}

    def by_part(self, choice: Sequence[int], parts: Sequence[int], count: int) -> Floats:
        """Return [phases, `count`] the seconds per step of the equations of each part; `parts` says
        of which part each is."""
        seconds, _ = self._priced(tuple(choice), 0)
        at = self.facts.phases * count + np.array(parts, dtype=np.int64)
        found: HostArray = np.bincount(at, seconds, len(PHASES) * count)
        return found.reshape(len(PHASES), count)

    def _least_seconds(self, size: int) -> Floats:
        if size not in self._least:
            self._least[size] = self.seconds_of("least").least(size)
        return self._least[size]

    def least_again(self, layer: int, kind: str, size: int = 0, beside: str = "least") -> float:
        """Return the seconds per step that a layer takes at least beside what it takes by
        `seconds_of(beside)`, under the same strategies."""
        key = kind, beside, size
        if key not in self._least_more:
            count = len(self.facts.layers)
            its, others = (self.seconds_of(one).costs for one in (kind, beside))
            more = [  # the first time, then once more
                (position, node, one.at[size] - other.at[size])
                for (position, node, one), (_, _, other) in zip(its, others, strict=False)
                if one is not other and position < count
            ]
            for sign, of in ((1.0, its), (-1.0, others)):
                again = of[len(self.selection.seconds.costs) :]
                more += [(p - count, node, sign * priced.at[size]) for p, node, priced in again]
            by_node: dict[tuple[int, int], Floats] = {}
            for position, node, seconds in more:
                at = int(self.facts.layers[position]), node
                by_node[at] = by_node[at] + seconds if at in by_node else seconds
            found = np.zeros(self.num_layers)
            for (home, _), seconds in by_node.items():
                found[home] += seconds.min()
            self._least_more[key] = found
        return float(self._least_more[key][layer])

    def least_split(self, layer: int, kind: str, size: int = 0) -> float:
        """Return the seconds per step that a layer takes more at least where its backward pass is
        in two parts."""
        if not self.splits:
            return 0.0
        return float(self._split_seconds(kind).least[size, layer])

    @functools.cached_property
    def _least_of_kinds(self) -> EquationSeconds:
        return least_seconds(self.selection, [self._redone_seconds(kind) for kind in self.kinds])

    def _redone_seconds(self, kind: str) -> RedoneSeconds:
        if kind not in self._redone:
            self._redone[kind] = RedoneSeconds(self.selection, self._sizes, kind)
        return self._redone[kind]

    def layer_bytes(self, layer: int, names: Sequence[str]) -> tuple[dict[int, Floats], float]:
        """Return {node: [strategies] bytes} that a layer holds as `names`, and what no node
        decides."""
        found: dict[int, Floats] = {}
        rest = 0.0
        for name in names:
            by_node, more = self.held[name].by_node(layer, 0)
            rest += more
            for node, own in by_node.items():
                found[node] = found[node] + own if node in found else own
        return found, rest

    def working(self, temporaries: Floats) -> Floats:
        """Return [equations] the most temporaries while each runs."""
        times = self.selection.times
        return np.maximum.reduceat(temporaries, np.array(times)) if times else np.zeros(0)

    def _transient(self, working: Floats, activations: Floats) -> Floats:
        """Return [layers] the most temporaries, those of the update beyond the layer's activations,
        which no longer live then."""
        facts, count = self.facts, self.num_layers
        update = facts.phases == PHASES.index("update")
        found, at_last = np.zeros(count), np.zeros(count)
        np.maximum.at(found, facts.layers[~update], working[~update])
        np.maximum.at(at_last, facts.layers[update], working[update])
        most: Floats = np.maximum(found, at_last - activations)
        return most

    def alive(self, redone: Redone, sizes: Floats) -> Floats:
        """Return [equations] the bytes of what was made again and is still read."""
        count = len(self.facts.layers) + 1
        begins, ends = redone.lifetimes.T
        changes = np.bincount(begins, sizes, count) - np.bincount(ends + 1, sizes, count)
        alive: Floats = np.cumsum(changes)[:-1]
        return alive

    def _priced(self, choice: tuple[int, ...], size: int) -> tuple[Floats, Floats]:
        """Return [equations] seconds and [kinds, times] bytes, remembered for the last choice."""
        if self._last_priced is None or self._last_priced[0] != choice:
            self._last_priced = choice, {}
        known = self._last_priced[1]
        if size not in known:
            selection = self.selection
            seconds = selection.seconds.under(choice, size)
            known[size] = seconds, selection.memory.usage(choice, size)
        return known[size]

    def _parts(self, choice: tuple[int, ...], size: int) -> Floats:
        """Return [equations, axes, 2] what links take, remembered for the last choice."""
        if self._last_parts is None or self._last_parts[0] != choice:
            self._last_parts = choice, {}
        known = self._last_parts[1]
        if size not in known:
            known[size] = self.selection.sent.under(len(self.facts.layers), choice, size)
        return known[size]

    def _beyond(self, choice: tuple[int, ...]) -> list[tuple[Group, Floats]]:
        """Return [axes, 2] what links take for buckets beyond the shares, once, remembered for the
        last choice."""
        if self._last_beyond is None or self._last_beyond[0] != choice:
            links = self.selection.costs.links
            groups = self.selection.traffic.groups(choice).items()
            self._last_beyond = (
                choice,
                [(one, links.buckets((one.kind, 0.0, one.axes), sizes)) for one, sizes in groups],
            )
        return self._last_beyond[1]

    def _ratio(self, size: int) -> float:
        """Return how many microbatches there are at a size for each one here."""
        counts = [facts.scope.eqns.num_microbatches for facts in self._sizes]
        return counts[size] / counts[0]

    def _extra(self, choice: tuple[int, ...]) -> Mapping[str, float]:
        """Return what buckets cost beyond their shares, remembered for the last choice."""
        if self._last is None or self._last[0] != choice:
            self._last = choice, self.selection.traffic.extra(choice)
        return self._last[1]

    def recomputed(self, kind: str) -> Recomputed:
        """Return what layers run again and hold where they recompute as `kind` says."""
        if kind not in self._kinds:
            redone = redone_of(self.facts, kind)
            later = delayed_at(self.facts, kind), waiting_at(self.facts, kind)
            held = (
                HeldBytes.of(self.selection, [facts.held_at(places) for facts in self._sizes])
                for places in (redone.made_again, redone.kept, *later)
            )
            self._kinds[kind] = Recomputed(redone, *held)
        return self._kinds[kind]

    def _between(self, kind: str) -> Between | None:
        if kind not in self._kept_between:
            self._kept_between[kind] = between_of(self.selection, self._sizes, kind)
        return self._kept_between[kind]

    def _split_seconds(self, kind: str) -> SplitSeconds:
        if kind not in self._split:
            self._split[kind] = SplitSeconds(self.selection, self._sizes, kind, self.num_layers)
        return self._split[kind]


def _share_held(usage: Floats, activations: Floats) -> float:
    """Return the share of a stage's activations that are held at once, where its passes are one
    program: XLA fuses some into their readers."""
    total = float(activations.sum())
    alive = float(usage[KINDS.index("activations")].max(initial=0.0))
    return min(alive / total, 1.0) if total > 0 else 1.0


def _by_place(places: Ints, parts: Floats, count: int) -> Floats:
    """Return [count, axes, 2] the sums of [n, axes, 2] parts by their place."""
    columns = parts.reshape(len(places), math.prod(parts.shape[1:])).T
    sums = [np.bincount(places, column, count) for column in columns]
    stacked: HostArray = np.stack(sums, axis=-1)
    return stacked.reshape(count, *parts.shape[1:])


def solved_costs(
    scope: StageScope,
    selection: Selection,
    choice: Sequence[int],
    num_layers: int,
    window: Window | None = None,
) -> StageCosts:
    """Return the costs of one choice by layer (`LayerCosts`)."""
    return LayerCosts(scope, selection, num_layers, window).under(choice)

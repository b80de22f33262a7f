"""The planner: a resharding task in, the fastest plan found and a time no plan beats out."""

from __future__ import annotations

import math
from functools import partial

from attrs import evolve, field, frozen

from alpa_interchange.check import non_negative
from alpa_interchange.reshard import ReshardingPlan, ReshardingTask, Transfer
from alpa_interchange.tensor import dtype_bytes
from resharding.bound import lower_bound
from resharding.course import Demand, course, demand_of, least_seconds, level_seconds
from resharding.dispatch import dispatched
from resharding.drafts import Draft, Setting, deliveries_of
from resharding.network import Links, Network
from resharding.relays import paced_of, paced_waves, waves
from resharding.slices import cut_slices, hosts_of
from resharding.strategies import (
    STRATEGIES,
    WAVES,
    candidates,
    divided_broadcast,
    fan,
    paced,
)
from resharding.sums import plan_sum
from resharding.tiles import TILES
from resharding.traffic import edge_bytes
from resharding.waves import MOST_TRANSFERS, Shape, shape_of, waves_of

# Slices whose order is searched further: with latency, 16 slices took 20 ms and gained under 1 %.
# Where devices block, 8 gained nothing with latency and took 8 % of the time of planning.
_MOST_SEARCHED = 8

# Transfers of all drafts together, after which no other strategy is tried: about 10 ms. With four
# times as many the mean ratio of 200 random pairs at 10 us is the same to 1 %.
_MOST_WORK = 200
# Latencies that a plan takes at least for transfers to wait for others, which costs one each time.
# Of 1,000 random pairs at 10 us none with less gained by it, nor any where nothing blocks.
_LEAST_FOR_WAITS = 50
# What fans and waves are expected to gain, as each of their many transfers is an operation for
# whoever carries it out: with 1.03 the mean ratio of 1,000 random pairs at 10 us is 0.04 % more.
_LEAST_GAIN = 1.01
# Ratios to the bound above which the other kind of waves, and waves of `_MORE` times as many
# transfers, are tried: with 1.03 for the other kind the mean of those pairs is 1.0074 in place of
# 1.0079, and the slowest is planned in half as much time again; with more transfers for none the
# worst is 1.28, not 1.13, and 3 are above 1.15, with twice as many 1.16.
_FAR_FOR_WAVES = 1.05
_FAR_FOR_MANY = 1.12
_MORE = 3
# Transfers up to which they are dispatched, which looks at all that are ready at every event; more
# are bundled and ordered (`order`). Without limit one of 1,000 random pairs whose devices block
# takes 314 in place of 415 us, and 186 ms to plan.
_MOST_DISPATCHED = 256
# Other orders of what was the fastest in the order of free lanes, and their transfers together: the
# means of those pairs are 1.0542 (hosts block) and 1.0792 (devices), with none 1.0556 and 1.0823,
# with twice as many 1.0540 and 1.0785.
_MOST_SHAKES = 4
_MOST_SHAKEN = 400
# What is tried beside fans: with "broadcast" and "tile_all_gather" as well the mean ratio of those
# pairs is the same to 0.01 %.
_BESIDE_FANS = ("send_recv",)
# What is tried however much was drafted where devices block and hosts have several cards: without,
# 60 random pairs with 8 cards take 1.54 x the bound in place of 1.09, the worst 8.1, not 2.5.
_BY_CARDS = ("tile_all_gather", "two_level_broadcast", "card_broadcast", "star", "parallel_chains")


@frozen(kw_only=True)
class PlanOptions:
    """How hard to search. All limits are counts, so the same task gives the same plan always."""

    seed: int = 0
    num_restarts: int = field(default=8, validator=non_negative)  # of the greedy order
    node_limit: int = field(default=250, validator=non_negative)  # of the exact search
    good_enough: float = 1.01  # stop at this ratio to the lower bound
    most_simulated: int = 2048  # transfers; the time of longer plans is estimated, not simulated


def plan(
    task: ReshardingTask,
    network: Network | None = None,
    strategy: str = "auto",
    options: PlanOptions | None = None,
) -> ReshardingPlan:
    """Return the transfers that carry out `task`, their time on `network` and its lower bound.

    "auto" drafts every strategy with a list schedule, passes over those that cannot beat the best
    so far, simulates the others, and searches for a better order of the winner. Source and target
    may share devices or hosts. A source may be unreduced: its summands are added on the way
    (`resharding.sums`); a target may not.
    """
    if strategy != "auto" and strategy not in STRATEGIES:
        raise ValueError(
            f"strategy must be 'auto' or one of {', '.join(STRATEGIES)}, got {strategy!r}"
        )
    network, options = network or Network(), options or PlanOptions()
    if task.source.spec.partial and 0 not in task.tensor.shape:
        return plan_sum(task, network, lambda move: plan(move, network, strategy, options))
    race = _Race(task, network, options)
    # a flood of parts where devices block and hosts have several cards: it is drafted last, and
    # simulated no further than it can win
    divided_last = strategy == "auto" and race.cards_pay()
    if strategy in ("auto", "broadcast") and not divided_last:
        race.enter_divided()
    names = candidates(race.slices, race.links) if strategy == "auto" else (strategy,)
    if strategy == "auto" and race.fans_pay():
        if race.best is None or race.best.seconds > race.bound * _LEAST_GAIN:
            race.enter_fans()
        names = tuple(name for name in names if name in _BESIDE_FANS)
    elif strategy == "auto" and race.cards_pay():
        names = (*(name for name in names if name not in _BY_CARDS), *_BY_CARDS)
    lanes = (False, True) if race.network.issue == "device" else (False,)
    for name in names:
        # Orders of hosts as well for the strategy that wins most; the others gained under 1 %.
        for device_lanes in lanes if name in ("broadcast", strategy) else lanes[-1:]:
            race.enter(name, device_lanes, search=False)
    if divided_last and not race.settled():
        race.enter_divided()
    assert race.best is not None
    if race.dispatched is not None:
        race.redispatch()
    if race.order_pays():
        # what has no order to be searched for may lose to one that has
        others = () if race.ordered else names[:1]
        for name in dict.fromkeys((race.best.strategy, *others)):
            race.enter(name, race.best_lanes, search=True)
        if race.network.issue == "device" and not race.network.latency:
            race.shake(race.best.strategy)
    return race.best


class _Race:
    """The best plan so far and what is needed to compare another one with it."""

    def __init__(self, task: ReshardingTask, network: Network, options: PlanOptions) -> None:
        self.task, self.network, self.options = task, network, options
        self.slices = cut_slices(task)
        self.host_of = hosts_of(task)
        self.links = Links(network, self.host_of)
        self.element = dtype_bytes(task.tensor.dtype)
        self.bound = lower_bound(self.slices, self.host_of, network)
        self.best: ReshardingPlan | None = None
        self.best_lanes = False
        self.work = 0  # transfers of all drafts so far
        self.copies: dict[tuple[int, int], Demand] = {}  # by sender and receiver
        self.dispatched: tuple[Draft, list[Demand]] | None = None  # the best one, if it was
        self.ordered = False  # the best one came from a list schedule, which a search can improve

    def enter_divided(self) -> None:
        """Try slices divided over their holders in the order of an open shop."""
        draft = divided_broadcast(self.slices, self._setting(device_lanes=False, search=False))
        self._try("broadcast", False, draft, draft.lane_seconds)
        if self._waits_pay() and not self.settled():
            self._try("broadcast", False, paced(draft, self.links), draft.lane_seconds)

    def _waits_pay(self) -> bool:
        network = self.network
        if network.issue == "host" or not network.latency:
            return network.issue != "host"
        return network.issue == "device" and self.bound >= _LEAST_FOR_WAITS * network.latency

    def enter(self, name: str, device_lanes: bool, *, search: bool) -> None:
        """Draft one strategy with lanes of hosts or devices; simulate it if it can still win."""
        # Whole slices are tried in any case that is quick: divided ones may be a flood of parts.
        quick = name == "broadcast" and len(self.slices) <= _MOST_DISPATCHED
        quick = quick or name in _BY_CARDS and self.cards_pay()
        if self.settled() or (self.best is not None and self.work > _MOST_WORK and not quick):
            return
        setting = self._setting(device_lanes, search)
        if self.network.issue != "none" and not search and self._dispatch(name, setting):
            return
        if self.best is not None and name not in (self.best.strategy, *TILES):
            # Without an order first: what the busiest takes hardly depends on it.
            rough = STRATEGIES[name](self.slices, evolve(setting, unordered=True))
            if self._least(rough) >= self.best.seconds:
                return
        draft = STRATEGIES[name](self.slices, setting)
        ordered = self.network.issue == ("device" if device_lanes else "host")
        if ordered and self.best is not None and draft.lane_seconds >= self.best.seconds:
            return
        if self._try(name, device_lanes, draft, draft.lane_seconds):
            self.ordered = True

    def _dispatch(self, name: str, setting: Setting) -> bool:
        """Try a strategy in the order in which lanes get free; False if it is too long for that."""
        draft = STRATEGIES[name](self.slices, evolve(setting, unordered=True))
        if len(draft.transfers) > _MOST_DISPATCHED:
            return False
        demands = self._demands(draft)
        self.work += len(draft.transfers)
        limit = self.best.seconds if self.best is not None else math.inf
        if least_seconds(draft.transfers, demands, self.links) >= limit:
            return True
        transfers, seconds = dispatched(draft.transfers, demands, self.links, limit)
        if seconds < limit:
            self._keep(name, setting.device_lanes, transfers, seconds)
            self.ordered, self.dispatched = True, (draft, demands)
        return True

    def redispatch(self) -> None:
        """Try other orders of the draft that was the fastest in the order of free lanes."""
        assert self.best is not None and self.dispatched is not None
        name, (draft, demands) = self.best.strategy, self.dispatched
        for shake in range(1, 1 + min(_MOST_SHAKES, _MOST_SHAKEN // len(draft.transfers))):
            if self.settled():
                return
            limit = self.best.seconds
            transfers, seconds = dispatched(draft.transfers, demands, self.links, limit, shake)
            if seconds < limit:
                self._keep(name, self.best_lanes, transfers, seconds)

    def fans_pay(self) -> bool:
        """Return whether few latencies and many parts at once may be worth their many transfers."""
        network, several = self.network, any(len(piece.receivers) > 1 for piece in self.slices)
        return bool(network.latency) and network.issue == "none" and several and not self.settled()

    def order_pays(self) -> bool:
        """Return whether slices are so few, and orders tell so much, that they are searched on."""
        issue, latency = self.network.issue, self.network.latency
        told = self.ordered if issue == "none" else issue == "host" or not latency
        return told and len(self.slices) <= _MOST_SEARCHED

    def cards_pay(self) -> bool:
        """Return whether devices that block have several cards to use at once."""
        several = any(len(piece.receivers) > 1 for piece in self.slices)
        many_cards = max(self.links.num_cards.values()) > 1
        return self.network.issue == "device" and several and many_cards and not self.settled()

    def enter_fans(self) -> None:
        """Try copies to all at once, then relays in waves, then what is cut finer, as long as the
        best plan is far above the bound."""
        setting = self._setting(device_lanes=False, search=False)
        shape = shape_of(deliveries_of(self.slices, setting), self.links)
        if shape is None or self._may_gain(shape.star):
            self._try("star", False, STRATEGIES["star"](self.slices, setting), 0.0)
        if shape is not None:
            self._enter_waves(shape, setting, MOST_TRANSFERS)
        # with one card a host the mean of 1,000 random pairs is the same without
        if self._above(_FAR_FOR_MANY) and max(self.links.num_cards.values()) > 1:
            self._try(
                "parallel_chains", False, STRATEGIES["parallel_chains"](self.slices, setting), 0.0
            )
        won = self.best is not None and self.best.strategy in WAVES  # else more gain nothing
        if shape is not None and won and self._above(_FAR_FOR_MANY):
            self._enter_waves(shape, setting, _MORE * MOST_TRANSFERS)

    def _above(self, ratio: float) -> bool:
        return self.best is None or self.best.seconds > ratio * self.bound

    def _enter_waves(self, shape: Shape, setting: Setting, most: int) -> None:
        """Try waves, and paced ones, those first that are expected to end first."""
        expected = {"waves": waves_of(shape, most), "paced_waves": paced_of(shape, most)}
        found = [(made.seconds, name) for name, made in expected.items() if made is not None]
        for seconds, name in sorted(found):
            if self._above(_FAR_FOR_WAVES) and self._may_gain(seconds):
                feed = partial(waves if name == "waves" else paced_waves, most=most)
                self._try(name, False, fan(feed)(self.slices, setting), 0.0)

    def _may_gain(self, seconds: float) -> bool:
        return self.best is None or seconds * _LEAST_GAIN < self.best.seconds

    def _least(self, draft: Draft) -> float:
        self.work += len(draft.transfers)
        return least_seconds(draft.transfers, self._demands(draft), self.links)

    def shake(self, name: str) -> None:
        """Simulate random orders of one strategy: lanes do not tell how streams share a card."""
        assert self.best is not None
        for number in range(min(8, 160 // max(1, len(self.best.transfers)))):
            if self.settled():
                return
            lanes = number % 2 == 1
            setting = evolve(self._setting(lanes, search=False), shake=number)
            self._try(name, lanes, STRATEGIES[name](self.slices, setting), 0.0)

    def _try(
        self,
        name: str,
        device_lanes: bool,
        draft: Draft,
        estimate: float,
    ) -> bool:
        """Keep a draft if it is the fastest; simulate it if it is not too long for that."""
        demands = self._demands(draft)
        self.work += len(draft.transfers)
        seconds = least_seconds(draft.transfers, demands, self.links)
        if self.best is not None and seconds >= self.best.seconds:
            return False
        seconds = max(estimate, seconds)
        if len(draft.transfers) <= self.options.most_simulated:
            limit = self.best.seconds if self.best is not None else math.inf
            intervals = course(draft.transfers, demands, self.links, limit=limit)
            seconds = max((end for _, end in intervals), default=0.0)
        else:
            levels = level_seconds(draft.transfers, demands, self.links)
            seconds = max(seconds, levels, self.bound)
        if self.best is not None and seconds >= self.best.seconds:
            return False
        self._keep(name, device_lanes, draft.transfers, seconds)
        return True

    def _keep(
        self, name: str, device_lanes: bool, transfers: tuple[Transfer, ...], seconds: float
    ) -> None:
        self.best_lanes, self.dispatched = device_lanes, None
        self.best = ReshardingPlan(
            task=self.task,
            transfers=transfers,
            strategy=name,
            seconds=seconds,
            lower_bound=self.bound,
        )

    def _demands(self, draft: Draft) -> list[Demand]:
        """Return what transfers ask for; copies between the same devices differ in bytes only."""
        made = []
        for transfer in draft.transfers:
            if transfer.method != "copy":
                made.append(demand_of(transfer, self.element, self.links, draft.transfers))
                continue
            pair = transfer.sender, transfer.receivers[0]
            known = self.copies.get(pair)
            if known is None:
                known = self.copies[pair] = demand_of(transfer, self.element, self.links, ())
            amount = edge_bytes(transfer, self.element)
            made.append(Demand(amount, known.ports, known.times, known.tail, known.alone))
        return made

    def settled(self) -> bool:
        return self.best is not None and (
            self.best.seconds <= self.bound * self.options.good_enough
        )

    def _setting(self, device_lanes: bool, search: bool) -> Setting:
        return Setting(
            host_of=self.host_of,
            links=self.links,
            element_bytes=self.element,
            device_lanes=device_lanes,
            seed=self.options.seed,
            num_restarts=self.options.num_restarts if search else 0,
            node_limit=self.options.node_limit if search else 0,
        )

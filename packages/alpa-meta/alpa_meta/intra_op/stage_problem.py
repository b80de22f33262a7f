"""What a stage's selection problem is made from, and what its nodes stand for."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence

from attrs import define, evolve, field, frozen

from alpa_interchange import ShardingSpec, Strategy
from alpa_meta.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var, is_drop
from alpa_meta.intra_op.hashed_tuple import HashedTuple
from alpa_meta.pinning import Pin
from alpa_meta.spmd import stacked


@frozen(eq=False)
class Source:
    """Where a value comes from: a node, and the value's spec under each of the node's
    strategies.

    `other_bytes` are its bytes at the other sizes that the problem is priced at.
    """

    node: int | None  # None: replicated constants
    specs: tuple[ShardingSpec, ...]
    shape: tuple[int, ...]
    bytes: float
    other_bytes: tuple[float, ...] = ()

    def stacked(self, length: int) -> Source:
        """Return the source of `length` of these values stacked along a new leading dim."""
        specs = HashedTuple(map(stacked, self.specs))
        return evolve(self.times(length), specs=specs, shape=(length, *self.shape))

    def times(self, factor: float) -> Source:
        """Return the source of a value of `factor` times as many bytes."""
        other = tuple([factor * size for size in self.other_bytes])
        return Source(self.node, self.specs, self.shape, factor * self.bytes, other)


@define(eq=False)
class Record:
    """What the problem knows of one equation: its node and strategies, or its region's bodies.

    What `passes_on` its operands has neither: each result comes from where its operand does.
    """

    node: int | None
    strategies: tuple[Strategy, ...] = ()
    operands: tuple[Source, ...] = ()
    results: tuple[Source, ...] = ()
    bodies: tuple[Body, ...] = ()
    completed: Source | None = None  # the result after its partial sums were completed
    passes_on: bool = False


@define(eq=False)
class Body:
    """One body of a region: where its inputs and outputs come from, and its equations."""

    jaxpr: Jaxpr | ClosedJaxpr
    inputs: tuple[Source, ...]
    outputs: tuple[Source, ...]
    records: tuple[Record, ...]


@frozen(kw_only=True, eq=False)
class StageEqns:
    """The equations of a layer range, and what surrounds them.

    `keys[k]` folds equation k with those of equal layers (None: alone). `state` are the inputs that
    live on the devices, but for `offloaded` ones, which come for the update; `carried` pairs each
    new state value with the input it replaces. `kept` are the values that the forward pass leaves
    for the backward pass as results of a program of its own, once per microbatch of the
    `in_flight`; `received` are inputs from other stages, `sent` results for them. Of what is
    received, `returned` (cotangents) is there for `num_waiting` microbatches beside the one that
    runs, the rest for all in flight and `num_ahead` to come. `times` and `reads` are those of a
    `Window`; without them everything counts once.
    Of what leaves the microbatches (`accumulated`), `joined` has an entry for each example: nothing
    adds up its parts, so that it leaves complete.
    `delayed` are the values that a split backward keeps for its part by weight, which `num_delayed`
    microbatches wait for: these hold of what is kept and received only what that part, too, reads
    (`read_late`). What only the forward pass reads (`read_once`) is held until it has run.
    `tasks[k]` names the program that equation k is of, where a stage is several, one after another:
    each holds what it reads until it ends.
    """

    eqns: Sequence[JaxprEqn]
    phases: Sequence[str]
    keys: Sequence[Hashable | None]
    state: frozenset[Var]
    carried: Sequence[tuple[Var, Var]]
    kept: frozenset[Var]
    accumulated: frozenset[Var]
    num_microbatches: int
    in_flight: int = 1
    received: frozenset[Var] = frozenset()
    returned: frozenset[Var] = frozenset()
    num_ahead: int = 0
    num_waiting: int = 0
    sent: frozenset[Var] = frozenset()
    pins: Mapping[Var, Pin] = field(factory=dict)
    times: Sequence[int] = ()
    reads: Mapping[int, Mapping[Var, int]] = field(factory=dict)
    delayed: frozenset[Var] = frozenset()
    read_late: frozenset[Var] = frozenset()
    read_once: frozenset[Var] = frozenset()
    offloaded: frozenset[Var] = frozenset()
    num_delayed: int = 0
    tasks: Sequence[Hashable] = ()
    joined: frozenset[Var] = frozenset()

    @property
    def is_whole_step(self) -> bool:
        """Whether one program holds both passes of one microbatch and the update."""
        return self.num_microbatches == 1 and not self.kept

    @functools.cached_property
    def defined(self) -> Mapping[Var, int]:
        """Return the position of the equation that each value is a result of."""
        return {
            var: position
            for position, eqn in enumerate(self.eqns)
            for var in eqn.outvars
            if not is_drop(var)
        }

    @functools.cached_property
    def marked(self) -> frozenset[Var]:
        """Return the values of which more is asked than that equations read them."""
        return self.kept | self.delayed | self.accumulated | self.pins.keys()

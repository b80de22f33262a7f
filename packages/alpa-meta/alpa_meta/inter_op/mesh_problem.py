"""The selection problem of one logical mesh that the rows of a layer menu are chosen from.

It is built at one microbatch size, and priced at others (`other_sizes`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve

from alpa_interchange import ShardingProblem, ShardingSpec, SubmeshSpec
from alpa_meta.compat import Literal, Var, is_drop, shape_of
from alpa_meta.inter_op.candidates import input_pins
from alpa_meta.inter_op.layer_costs import LayerCosts
from alpa_meta.inter_op.row_lines import Sized
from alpa_meta.inter_op.scope_facts import state_by_layer, state_layers
from alpa_meta.inter_op.stage_costs import StageCosts
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.selection import Selection, build
from alpa_meta.types import Floats

if TYPE_CHECKING:
    from alpa_meta.inter_op.layer_menu import MenuBuilder


class MeshProblem:
    """The selection problem of one mesh and kind of program, priced at `sizes`: the first is the
    one that it is built at."""

    def __init__(
        self,
        builder: MenuBuilder,
        submesh: SubmeshSpec,
        costs: MeshCosts,
        kind: str,
        sizes: Sequence[Sized],
    ) -> None:
        self.kind, self.sizes = kind, tuple(sizes)
        scopes = []
        apart = submesh.num_devices < builder.model.cluster.num_devices
        for sized in sizes:
            pins = input_pins(sized.outlook.program, costs.mesh, builder.options)
            scopes.append(sized.outlook.scope(pins, apart))
        name = f"{submesh.num_devices} devices {costs.mesh.shape}"
        others = tuple(scope.eqns for scope in scopes[1:])
        self.selection = build(scopes[0].eqns, costs, name, others)
        outlook = self.main.outlook
        self.costs = LayerCosts(
            scopes[0],
            self.selection,
            outlook.num_layers,
            outlook.window,
            scopes[1:],
            builder.kept or ("none",),
            apart and builder.splits_backward,
        )

    @property
    def main(self) -> Sized:
        """The size that the problem is built at."""
        return self.sizes[0]

    def under(self, choice: Sequence[int], kind: str, sized: Sized) -> StageCosts:
        """Return what a choice costs at one of the sizes."""
        return self.costs.under(choice, kind, self.sizes.index(sized))

    def sent(self, choice: Sequence[int], kind: str, sized: Sized) -> Mapping[str, Floats]:
        """Return what links take of what a choice costs at one of the sizes."""
        return self.costs.sent(choice, kind, self.sizes.index(sized))

    def forget_choices(self) -> None:
        """Free what only choices are priced by; floors go by what stays."""
        self.splits  # noqa: B018 - are made of what is freed
        self.costs.forget_choices()
        self.selection = self.costs.selection

    def state_specs(self, layer: int, choice: Sequence[int]) -> tuple[ShardingSpec, ...]:
        """Return the specs of the state that a layer of the window updates."""
        return tuple(self.selection.spec(var, choice) for var in self._state_of.get(layer, ()))

    @functools.cached_property
    def _state_of(self) -> Mapping[int, Sequence[Var]]:
        scope = self.costs.facts.scope
        home = state_layers(scope.eqns.eqns, scope.layers, scope.eqns.carried)
        return state_by_layer(self.main.outlook.program, home)

    def for_samples(self, samples: int, size: int = 0) -> Selection | None:
        """Return the problem, at the seconds of a size, without what splits the batch into parts
        that do not divide `samples`; None where nothing is left."""
        problem = self._at(size)
        wrong = [samples % parts != 0 for parts in self.splits]
        if any(one.all() for one in wrong):
            return None
        forbidden = np.concatenate(wrong)
        node_cost = np.where(forbidden, math.inf, problem.node_cost)
        return evolve(self.selection, problem=evolve(problem, node_cost=node_cost))

    def _at(self, size: int) -> ShardingProblem:
        """Return the problem with the seconds of one of the sizes, by its number."""
        problem = self.selection.problem
        if size == 0:
            return problem
        eqns = self.selection.stage
        times = eqns.times or [1] * len(eqns.eqns)
        return self.selection.seconds.at_size(problem, size, times)

    def split(self, choice: Sequence[int]) -> int:
        """Return what the samples of a microbatch must be a multiple of under a choice."""
        return math.lcm(*{int(of[one]) for of, one in zip(self.splits, choice, strict=True)})

    @functools.cached_property
    def splits(self) -> list[Floats]:
        """By node, [strategies] what the samples must be a multiple of."""
        counts = self.selection.problem.num_strategies
        found = [np.ones(count, dtype=np.int64) for count in counts]
        if len(self.sizes) == 1:
            return [np.full(count, self.main.samples) for count in counts]
        mesh, sources = self.selection.costs.mesh, self.selection.sources
        seen: set[tuple[int, tuple[ShardingSpec, ...], tuple[int, ...]]] = set()
        mine, theirs = (one.outlook.window.staging.eqns for one in self.sizes[:2])
        for eqn, like in zip(mine, theirs, strict=True):
            pairs = zip((*eqn.invars, *eqn.outvars), (*like.invars, *like.outvars), strict=True)
            for atom, twin in pairs:
                source = None if isinstance(atom, Literal) else sources.get(atom)
                if source is None or source.node is None or is_drop(atom):
                    continue
                shape = shape_of(atom)
                mark = (source.node, source.specs, shape)
                if mark in seen or shape == shape_of(twin):
                    continue
                seen.add(mark)
                for dim, (size, its) in enumerate(zip(shape, shape_of(twin), strict=True)):
                    if size != its:
                        per_sample = max(size // self.main.samples, 1)
                        parts = [mesh.size(spec.dims[dim]) for spec in source.specs]
                        whole = [p // math.gcd(p, per_sample) for p in parts]
                        found[source.node] = np.lcm(found[source.node], whole)
        return found

"""The rows of one logical mesh: ways to run a layer of each class, and what they cost.

One selection problem of the program's window is built on the mesh, at a microbatch size that all
its devices can share, and priced at the other sizes of the menu (`other_sizes`).

    fewer samples     the problem without the strategies that split more examples than there are
    prices of memory  leaner choices, where memory is short                   -> LEAN_WEIGHTS
    recomputation     the same choices, some equations of which run again     -> LayerCosts.under()
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve

from alpa_interchange import (
    BoundaryLayout,
    LogicalMesh,
    ShardingSolution,
    ShardingSpec,
    SubmeshSpec,
)
from alpa_interchange.menu import Affine, AxisPart, LayerRow, MeshMenu
from alpa_meta.compat import shape_of
from alpa_meta.inter_op.candidates import solve_lean, totals_share
from alpa_meta.inter_op.layer_boundaries import Boundary
from alpa_meta.inter_op.layer_floors import FloorSource
from alpa_meta.inter_op.layer_runs import read_from_afar
from alpa_meta.inter_op.layering import tensor_bytes
from alpa_meta.inter_op.mesh_problem import MeshProblem
from alpa_meta.inter_op.row_dominance import is_quicker, undominated
from alpa_meta.inter_op.row_lines import (
    LinkLine,
    RowLine,
    Sized,
    axis_parts,
    line_ends,
    minus,
    without,
)
from alpa_meta.intra_op.bucketed_solution import solve_in_buckets
from alpa_meta.intra_op.bucketed_traffic import conversion_steps
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.stage_problem import Source

if TYPE_CHECKING:
    from alpa_meta.inter_op.layer_menu import MenuBuilder

# Of memory against time in the leaner choices of a mesh. With up to four more between them, plans
# of 16 layers of 2560 on 8 V100, 24 of 2048 on 16 H100, GPT-1.3B on 4 V100 and LLaMA-8B on 8 H100
# are the same.
LEAN_WEIGHTS = (10.0, 1.0, 0.1)
# Of a choice's seconds: the last proofs take half the time, and what is chosen is solved exactly.
ROW_TOLERANCE = 0.003
# Of the memory, from which leaner choices and recomputation are worth their search: what a stage
# holds is estimated for an even share of the layers, the chosen one may have more. With half, 16
# layers of 2560 on 8 V100 have 103 instead of 69 rows and the same plan; with twice as much, which
# is never tight, 21 rows and a plan 4 % slower.
TIGHT = 0.8


StateSpecs = tuple[tuple[ShardingSpec, ...], ...]


class MeshRows:
    """The rows of one logical mesh."""

    def __init__(self, builder: MenuBuilder, submesh: SubmeshSpec, mesh: LogicalMesh) -> None:
        self.builder, self.submesh, self.mesh = builder, submesh, mesh
        self.costs = MeshCosts(mesh, builder.model, submesh.host_group)
        self.classes = builder.sizes["none"][0].outlook.window.classes
        self.rows: list[list[LayerRow]] = [[] for _ in range(max(self.classes) + 1)]
        self.layouts: list[tuple[str, ...]] = []
        self._values: list[tuple[Boundary, MeshProblem, Sequence[int]]] = []
        self._added: set[tuple[str, tuple[int, ...]]] = set()
        # By key of the row, what it was made from.
        self._made: dict[str, tuple[MeshProblem, Sequence[int], str, tuple[Sized, Sized]]] = {}
        self._whole: MeshProblem | None = None
        self._tight = False  # whether some choice without a price would fill the memory

    def solve(self, memory: float, share: float) -> None:
        """Add the rows of all sizes, where a device has `memory` and stages on this mesh run a
        `share` of the program."""
        tight: set[int] | None = None
        for kind in self.builder.sizes:
            problem = self._problem(kind)
            if kind == "none":
                self._whole = problem
            parts = [one for one in self._parts(problem) if tight is None or one in tight]
            solved = {
                (one, size): self._solve(problem, one, size, memory, share)
                for one in parts
                for size in self._chosen_at(problem, one)
            }
            tight = {one for (one, _), is_tight in solved.items() if is_tight}
            self._tight |= bool(tight)
            if not tight:
                return

    def bare_floors(self) -> FloorSource:
        """Return what layers take at least on this mesh, without rows to tell prices of memory."""
        self._whole = self._problem("none")
        return self.floor_source()

    def _parts(self, problem: MeshProblem) -> list[int]:
        """Return the numbers of parts that a microbatch may be split into at most: by some of the
        mesh's axes, and by all, or as many as the problem's own samples."""
        sizes = [axis.size for axis in self.mesh.axes]
        products = {
            math.prod(some)
            for count in range(len(sizes))
            for some in itertools.combinations(sizes, count)
        }
        most = problem.main.samples
        return [*sorted(one for one in products if one < most), most]

    def _chosen_at(self, problem: MeshProblem, parts: int) -> list[int]:
        """Return the numbers of the sizes whose seconds choose rows of so many parts: the least
        that can be split so, and where all parts are free also the largest.

        What gathers weights pays with many samples only. With the problem's own size for all, GPTs
        of 1.3 to 6.7 billion on 4 to 16 V100 took 2.4 to 3.5 % longer a step; with that size beside
        these, plans of Alpa's suites were the same, of 14 random ones none faster and one slower.
        """
        sizes = range(len(problem.sizes))
        samples = [one.samples for one in problem.sizes]
        able = (k for k in sizes if samples[k] % parts == 0)
        found = {min(able, key=lambda k: samples[k], default=0)}
        if parts == problem.main.samples:
            found.add(max(sizes, key=lambda k: samples[k]))
        return sorted(found)

    def _solved(self, kind: str) -> Sequence[Sized]:
        """Return the sizes to solve for: up to what all devices can share.

        One of several devices has those of two, whose program is looked at anyway: at a size of its
        own that takes 0.4 of the 9 CPU s of GPT-1.3B on 16 H100, with the same plan, also where
        stages run on one device each (GPT of 30 layers of 1024 on 24 H100).
        """
        sizes, devices = self.builder.sizes[kind], self.mesh.num_devices
        if devices < self.builder.model.cluster.num_devices:
            devices = max(devices, 2)
        enough = (k for k, one in enumerate(sizes) if one.samples >= devices)
        return sizes[: next(enough, len(sizes) - 1) + 1]

    def _problem(self, kind: str) -> MeshProblem:
        """Return the problem at the largest size that is solved for, priced at those below it, at
        the largest of all and at the largest that can be split as it can."""
        sizes, solved = self.builder.sizes[kind], self._solved(kind)
        main = solved[-1]
        multiple = [one for one in sizes if one.samples % main.samples == 0]
        found = {one.samples: one for one in (main, *solved[:-1], *multiple[-1:], sizes[-1])}
        return MeshProblem(self.builder, self.submesh, self.costs, kind, list(found.values()))

    def _solve(
        self, problem: MeshProblem, parts: int, size: int, memory: float, share: float
    ) -> bool:
        """Add the rows of microbatches of as many samples as parts, chosen by the seconds of a
        size; return whether memory is tight there."""
        selection = problem.for_samples(parts, size)
        if selection is None:
            return False
        found = solve_in_buckets(selection, self.builder.options, tolerance=ROW_TOLERANCE)
        if found.choice is None:
            return False
        name = f"{problem.sizes[size].samples} {parts}"
        held = self._add(problem, parts, found, f"{name} free", memory, share)
        if held <= TIGHT * memory:
            return False
        for weight in LEAN_WEIGHTS:
            lean = solve_lean(selection, found, weight, self.builder.options, ROW_TOLERANCE)
            if lean.choice is None:
                break
            self._add(problem, parts, lean, f"{name} lean{weight:.2g}", memory, share)
        return True

    def _add(
        self,
        problem: MeshProblem,
        parts: int,
        solution: ShardingSolution,
        name: str,
        memory: float,
        share: float,
    ) -> float:
        """Add the rows of a choice to every class, with recomputation where memory is tight for the
        largest microbatches, or where it is quicker to compute again what is cheap than to write
        and read it; return the bytes held without, by ones of as many samples as parts."""
        choice = solution.choice
        assert choice is not None
        most = max(one.samples for one in problem.sizes)
        kinds = self.builder.derived or (problem.kind,)
        fits = False
        for kind in kinds:
            counts = [len(rows) for rows in self.rows]
            if (kind, choice) not in self._added:
                self._added.add((kind, choice))
                self._add_rows(problem, choice, kind, f"{kind} {name}")
            if fits:
                self._drop_slower(counts, most)
                break
            fits = self._held(problem, choice, kind, most, share) <= TIGHT * memory
        return self._held(problem, choice, kinds[0], parts, share)

    def _drop_slower(self, counts: Sequence[int], samples: int) -> None:
        """Drop the rows behind the first `counts` of each class, if none is quicker than the last
        of those."""
        added = [rows[count:] for rows, count in zip(self.rows, counts, strict=True)]
        last = [rows[count - 1] for rows, count in zip(self.rows, counts, strict=True)]
        if not any(is_quicker(new, old, samples) for old, some in zip(last, added) for new in some):
            self.rows = [rows[:count] for rows, count in zip(self.rows, counts, strict=True)]

    def _held(
        self, problem: MeshProblem, choice: Sequence[int], kind: str, samples: int, share: float
    ) -> float:
        """Return the bytes that a stage of this share of the layers holds, one microbatch each."""

        def at(sized: Sized) -> float:
            costs = problem.under(choice, kind, sized)
            held = float(costs.state.sum() + costs.gradients.sum()) * share
            kept = float(costs.activations.sum() + costs.kept.sum())
            return held + kept + float(costs.transient.max())

        here, there = line_ends(problem.sizes, problem.split(choice))
        if here is there:
            return at(here)
        each = (at(there) - at(here)) / (there.samples - here.samples)
        return at(here) + each * (samples - here.samples)

    def _add_rows(self, problem: MeshProblem, choice: Sequence[int], kind: str, key: str) -> None:
        split = problem.split(choice)
        here, there = line_ends(problem.sizes, split)
        costs = problem.under(choice, kind, here), problem.under(choice, kind, there)
        self._made[key] = (problem, choice, kind, (here, there))
        specs: list[tuple[ShardingSpec, ...]] = [()] * len(self.rows)
        window = problem.main.outlook.window
        crossing = self.builder.boundaries(problem.main)
        at = {layer: self._layout(one, problem, choice) for layer, one in crossing.items()}
        kept = sorted(crossing)
        before = {layer: kept[k - 1] for k, layer in enumerate(kept) if k}
        totals = totals_share(problem.main.outlook.program)
        seen: set[int] = set()
        for layer in _examples(self.classes, window.layer_of):
            number = self.classes[layer]
            if number in seen:
                continue
            seen.add(number)
            forth, back = window.layer_of[layer]
            specs[number] = problem.state_specs(back, choice)
            line = RowLine(layer, (here, there), costs)
            weight = line.affine("by_weight")
            row = LayerRow(
                forward=line.affine("forward"),
                backward_input=minus(line.affine("backward"), weight),
                backward_weight=weight,
                step_seconds=float(costs[0].update[layer] + totals * costs[0].forward[layer]),
                state_bytes=float(costs[0].state[layer] + costs[0].gradients[layer]),
                activation_bytes=line.affine("activations"),
                split_seconds=line.affine("split"),
                delayed_bytes=line.affine("delayed"),
                waiting_bytes=line.affine("waiting"),
                kept_bytes=line.affine("kept"),
                transient_bytes=line.affine("transient"),
                batch_split=split,
                layout_in=at[before[forth]] if forth in before else self._nothing(),
                layout_out=at[back] if back in at else self._nothing(),
                recomputation=kind,
                key=key,
            )
            self.rows[number].append(row)
        self.builder.state[self.submesh, self.mesh, key] = tuple(specs)

    def _with_links(self, rows: Sequence[Sequence[LayerRow]]) -> list[list[LayerRow]]:
        """Return rows with what links take of their seconds, which most rows are dropped before
        being asked for."""
        found = [list(of_class) for of_class in rows]
        window = self.builder.sizes["none"][0].outlook.window
        layers: dict[int, int] = {}
        for layer in _examples(self.classes, window.layer_of):
            layers.setdefault(self.classes[layer], layer)
        places: dict[str, list[tuple[int, int]]] = {}
        for number, of_class in enumerate(found):
            for place, row in enumerate(of_class):
                places.setdefault(row.key, []).append((number, place))
        for key, of_choice in places.items():
            problem, choice, kind, sizes = self._made[key]
            totals = totals_share(problem.main.outlook.program)
            here, there = (problem.sent(choice, kind, sized) for sized in sizes)
            for number, place in of_choice:
                layer = layers[number]
                line = LinkLine(layer, sizes, (here, there))
                weight = line.sent("by_weight")
                once = here["update"][layer] + totals * here["forward"][layer]
                found[number][place] = evolve(
                    found[number][place],
                    forward_sent=line.sent("forward"),
                    backward_input_sent=without(line.sent("backward"), weight),
                    backward_weight_sent=weight,
                    step_sent=axis_parts([(Affine(float(a)), Affine(float(b))) for a, b in once]),
                )
        return found

    def _nothing(self) -> int:
        if () not in self.layouts:
            self.layouts.append(())
            self.builder.crossing[self.submesh, self.mesh, len(self.layouts) - 1] = BoundaryLayout(
                bytes=0.0
            )
            self._values.append((Boundary((), ()), self._values[0][1], ()))
        return self.layouts.index(())

    def _layout(self, boundary: Boundary, problem: MeshProblem, choice: Sequence[int]) -> int:
        layout = boundary.layout(problem.selection, choice)
        label = (*map(str, boundary.kinds), *layout)
        if label not in self.layouts:
            self.layouts.append(label)
            self._values.append((boundary, problem, choice))
            self.builder.crossing[self.submesh, self.mesh, len(self.layouts) - 1] = boundary.lies(
                problem.selection, choice, self.submesh, problem.main.samples
            )
        return self.layouts.index(label)

    def menu(self) -> MeshMenu | None:
        """Return the menu of the rows added, None if there are none."""
        if not all(self.rows):
            return None
        largest = self.builder.sizes["none"][-1].samples
        self.rows = self._with_links([undominated(rows, largest) for rows in self.rows])
        changes = self._conversions()
        source = self.floor_source()
        self.builder.floors.append(source)
        menu = MeshMenu(
            submesh=self.submesh,
            logical=self.mesh,
            rows=tuple(map(tuple, self.rows)),
            layouts=tuple(" ".join(label) for label in self.layouts),
            conversion={pair: seconds for pair, (seconds, _) in changes.items()},
            conversion_sent={pair: sent for pair, (_, sent) in changes.items()},
            floors=tuple((source.all_ways(k),) for k in range(len(self.rows))),
        )
        assert self._whole is not None
        self._whole.forget_choices()
        return menu

    def floor_source(self) -> FloorSource:
        """Return what layers of each class take at least on this mesh."""
        assert self._whole is not None
        window = self._whole.main.outlook.window
        examples = _examples(self.classes, window.layer_of)
        layers = [
            window.layer_of[next(k for k in examples if self.classes[k] == one)][1]
            for one in range(len(self.rows))
        ]
        kinds, options = self.builder.kept, self.builder.options
        often = [self.classes.count(one) > 1 for one in range(len(self.rows))]
        afar = read_from_afar(self._whole.main.outlook.staging)
        neighbours = {  # inside a run, a copy reads from its first and last one
            self.classes[layer]: (first, last)
            for layer, (last, first) in enumerate(window.layer_of)
            if first < last and self.classes[layer] == self.classes[first]
        }
        near = {c: both for c, both in neighbours.items() if afar.isdisjoint(self._layers(c))}
        return FloorSource(self._whole, layers, kinds, options, self._tight, often, self.rows, near)

    def _layers(self, number: int) -> list[int]:
        return [layer for layer, one in enumerate(self.classes) if one == number]

    def _conversions(self) -> dict[tuple[int, int], tuple[Affine, tuple[AxisPart, ...]]]:
        """Return the seconds between layouts that layers next to each other leave and want."""
        pairs = {
            (one.layout_out, other.layout_in)
            for before, after in set(zip(self.classes, self.classes[1:], strict=False))
            for one in self.rows[before]
            for other in self.rows[after]
        }
        return {pair: self._conversion(*pair) for pair in sorted(pairs) if pair[0] != pair[1]}

    def _conversion(self, before: int, after: int) -> tuple[Affine, tuple[AxisPart, ...]]:
        (one, problem, choice), (other, its, its_choice) = self._values[before], self._values[after]
        if one.kinds != other.kinds:
            return Affine(), ()
        seconds, sent = 0.0, np.zeros((len(self.mesh.axes), 2))
        for number, (var, twin) in enumerate(zip(one.values, other.values, strict=True)):
            here, there = problem.selection.spec(var, choice), its.selection.spec(twin, its_choice)
            if here == there:
                continue
            if not one.kinds[number][0]:
                here, there = there, here  # cotangents go the other way
            source = Source(None, (here,), shape_of(var), tensor_bytes(var))
            for step in conversion_steps(self.costs, source, here, there, in_buckets=False):
                whole, parts = self.costs.links.collective(step, in_buckets=False)
                seconds, sent = seconds + whole, sent + parts
        samples = problem.main.samples
        each = [(Affine(0.0, float(a)), Affine(0.0, float(b))) for a, b in sent / samples]
        return Affine(0.0, seconds / samples), axis_parts(each)


def _examples(classes: Sequence[int], layer_of: Sequence[tuple[int, int]]) -> list[int]:
    """Return the layers, those in the middle of a run first: they stand for its every layer."""
    inside = [k for k, stands in enumerate(layer_of) if stands != (k, k)]
    return inside + [k for k in range(len(classes)) if k not in set(inside)]

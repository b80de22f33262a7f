"""The layer menu of a step: what each kind of layer costs on each mesh, for any microbatch.

For every logical mesh the window of the program is solved as one selection problem, at several
microbatch sizes, prices of memory and kinds of recomputation. The rows of a class of layers are
what one of its layers costs under those choices. -> MenuBuilder

    row      value(samples) = fixed + each * samples, through the size that the row was solved at
             and the largest, where the same strategies are priced again    -> _affine()
    layout   the specs of the values that cross between two layers        -> layer_boundaries

A row holds where its microbatch divides as that of its strategies does: a choice solved for 8
examples that splits them over 4 devices runs with 4, 8, 12, ... of them.   -> _batch_split()
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from attrs import define, field, frozen

from alpa_interchange import LogicalMesh, ShardingSolution, SubmeshSpec
from alpa_interchange.menu import Affine, LayerFloor, LayerMenu, LayerRow, MeshMenu
from alpa_meta.compat import Var, is_drop, shape_of
from alpa_meta.inter_op.candidates import Outlook, input_pins, solve_lean, totals_share
from alpa_meta.inter_op.layer_boundaries import Boundary, boundaries
from alpa_meta.inter_op.layering import tensor_bytes
from alpa_meta.inter_op.stage_selection import (
    StageCosts,
    StageScope,
    least_costs,
    solved_costs,
    stage_scope,
)
from alpa_meta.intra_op.bucketed_solution import solve_in_buckets
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.selection import Selection, build, same_choice
from alpa_meta.options import Options
from alpa_meta.pinning import Pin, UnfitPinError
from cost_model import CostModel

SIZE_RATIO = 8  # between the microbatch sizes that problems are built at: a host's devices, mostly
LEAN_WEIGHTS = (0.1, 1.0, 10.0)  # of memory against time in the leaner choices of a mesh, first
# Weights between them that are tried too, where what is held differs most. With the first alone,
# 16 layers of 2560 on 8 V100 had no row with only the moments sharded, and a step of 6.03 s.
LEAN_STEPS = 4
FEW_MESHES = 12  # up to which they are tried: GPT-39B on 64 V100 has 21, and took 216 CPU s so
WORTH_A_PRICE = 0.05  # of the bytes held: neighbours that differ by less may do without another
# Of the memory, from which leaner choices and recomputation are worth their search: what a stage
# holds is estimated for an even share of the layers, the chosen one may have more. Not fitted.
TIGHT = 0.8


@frozen(eq=False)
class Sized:
    """The program with microbatches of `samples` examples, and one kind of recomputation."""

    samples: int
    recomputation: str
    outlook: Outlook

    @property
    def count(self) -> int:
        return self.outlook.program.num_microbatches


def menu_sizes(batch: int, num_devices: int) -> tuple[int, ...]:
    """Return the microbatch sizes to build problems at: 1, up to what all devices share, and half
    the batch, the largest there is; none for a batch of one.
    """
    divisors = [size for size in range(1, batch // 2 + 1) if batch % size == 0]
    sizes = {max(divisors)} if divisors else set()
    wanted = 1
    while divisors and wanted < SIZE_RATIO * num_devices:
        sizes.add(max(d for d in divisors if d <= wanted))
        wanted *= SIZE_RATIO
    return tuple(sorted(sizes))


@define(eq=False)
class _Priced:
    """The selection problem of one mesh at one size."""

    sized: Sized
    scope: StageScope
    selection: Selection

    def costs(self, choice: Sequence[int]) -> StageCosts:
        outlook = self.sized.outlook
        return solved_costs(self.scope, self.selection, choice, outlook.num_layers, outlook.window)


@frozen(eq=False)
class SolvedMesh:
    """A choice for the window on one mesh at one size: what rows of the menu are made from."""

    submesh: SubmeshSpec
    mesh: LogicalMesh
    sized: Sized
    solution: ShardingSolution
    selection: Selection
    key: str


@define(eq=False)
class MenuBuilder:
    """Fills the menu of a step: `sizes[recomputation]` are the program at growing sizes."""

    sizes: Mapping[str, Sequence[Sized]]
    model: CostModel
    options: Options
    batch: int
    solved: dict[str, SolvedMesh] = field(factory=dict)  # by key of the row
    steps: int = LEAN_STEPS  # prices of memory to try beside the first, where memory is tight
    # Bytes per sample that cross forward, by mesh and layout.
    crossing: dict[tuple[SubmeshSpec, LogicalMesh, int], float] = field(factory=dict)
    _boundaries: dict[int, dict[int, Boundary]] = field(factory=dict)
    _scopes: dict[int, list[StageScope]] = field(factory=dict)  # by id of the outlook

    def mesh_menu(
        self, submesh: SubmeshSpec, mesh: LogicalMesh, memory: float, share: float
    ) -> MeshMenu | None:
        """Return the menu of one logical mesh, None where no pin allows it.

        `share`: of the program that stages on this mesh run, when all devices work.
        """
        found = _MeshRows(self, submesh, mesh)
        sizes = self.sizes["none"]
        last = len(sizes) - 1
        enough = next((k for k, one in enumerate(sizes) if one.samples >= mesh.num_devices), last)
        solving = range(enough + 1)
        tight = list(solving)
        for kind in self.sizes:  # from the one that keeps most to the one that keeps least
            steps = self.steps if kind == "none" else 0
            tight = [number for number in tight if found.solve(kind, number, memory, share, steps)]
        return found.menu()

    def scope(self, outlook: Outlook, pins: Mapping[Var, Pin]) -> StageScope:
        """Return the window of a program as one stage, the same for all meshes of equal `pins`."""
        for known in self._scopes.setdefault(id(outlook), []):
            if known.eqns.pins == pins:
                return known
        window = outlook.window
        found = stage_scope(outlook.program, window.staging, 0, 1, pins, apart=True, window=window)
        self._scopes[id(outlook)].append(found)
        return found

    def boundaries(self, sized: Sized) -> dict[int, Boundary]:
        """Return what crosses between the layers of the window."""
        window = sized.outlook.window
        if id(window) not in self._boundaries:
            self._boundaries[id(window)] = boundaries(window)
        return self._boundaries[id(window)]


class _MeshRows:
    """The rows of one logical mesh."""

    def __init__(self, builder: MenuBuilder, submesh: SubmeshSpec, mesh: LogicalMesh) -> None:
        self.builder, self.submesh, self.mesh = builder, submesh, mesh
        self.costs = MeshCosts(mesh, builder.model, submesh.host_group)
        self._priced: dict[tuple[str, int], _Priced] = {}
        window = builder.sizes["none"][0].outlook.window
        self.classes = window.classes
        self.rows: list[list[LayerRow]] = [[] for _ in range(max(self.classes) + 1)]
        self.layouts: list[tuple[str, ...]] = []
        self._values: list[tuple[Boundary, _Priced, Sequence[int]]] = []

    def priced(self, kind: str, number: int) -> _Priced:
        """Return the problem at one size, built when first asked for."""
        if (kind, number) not in self._priced:
            sized = self.builder.sizes[kind][number]
            outlook = sized.outlook
            pins = input_pins(outlook.program, self.mesh, self.builder.options)
            scope = self.builder.scope(outlook, pins)
            name = f"{self.submesh.num_devices} devices {self.mesh.shape}"
            selection = build(scope.eqns, self.costs, name)
            self._priced[kind, number] = _Priced(sized, scope, selection)
        return self._priced[kind, number]

    def solve(self, kind: str, number: int, memory: float, share: float, steps: int) -> bool:
        """Add the rows of one size; return whether memory is tight there.

        `steps`: prices of memory to try beside the first.
        """
        priced = self.priced(kind, number)
        options = self.builder.options
        found = solve_in_buckets(priced.selection, options)
        if found.choice is None:
            return False
        costs = self._add(priced, kind, number, found, "free")
        held = self._held(costs, share)
        if held <= TIGHT * memory:
            return False
        self._add_leaner(priced, kind, number, found, share, {0.0: held}, steps)
        return True

    def _add_leaner(
        self,
        priced: _Priced,
        kind: str,
        number: int,
        free: ShardingSolution,
        share: float,
        held: dict[float, float],
        steps: int,
    ) -> None:
        """Add the rows of choices where memory has a price; `held` are the bytes by price."""
        waiting = list(LEAN_WEIGHTS if kind == "none" else LEAN_WEIGHTS[1:2])
        for _ in range(len(waiting) + steps):
            if waiting:
                weight = waiting.pop(0)
            else:
                below, above = max(
                    itertools.pairwise(sorted(held)), key=lambda pair: held[pair[0]] - held[pair[1]]
                )
                if held[below] - held[above] <= WORTH_A_PRICE * held[0.0]:
                    return
                weight = math.sqrt(below * above) if below else above / 4
            lean = solve_lean(priced.selection, free, weight, self.builder.options)
            if lean.choice is None:
                return
            costs = self._add(priced, kind, number, lean, f"lean{weight:.2g}")
            held[weight] = self._held(costs, share)

    def _held(self, costs: StageCosts, share: float) -> float:
        """Return the bytes that a stage of this share of the layers holds, one microbatch each."""
        held = float(costs.state.sum() + costs.gradients.sum()) * share
        return held + float(costs.activations.sum()) + float(costs.transient.max())

    def _add(
        self, priced: _Priced, kind: str, number: int, solution: ShardingSolution, name: str
    ) -> StageCosts:
        """Add the rows of a choice to every class; return what the choice costs."""
        choice = solution.choice
        assert choice is not None
        sized = priced.sized
        costs = priced.costs(choice)
        other = self._at_another_size(kind, number, choice)
        key = f"{kind} {sized.samples} {name}"
        self.builder.solved[f"{self.mesh.shape} {key}"] = SolvedMesh(
            self.submesh, self.mesh, sized, solution, priced.selection, key
        )
        split = self._batch_split(priced, kind, choice)
        crossing = self.builder.boundaries(sized)
        layer_of = sized.outlook.window.layer_of
        at = {layer: self._layout(one, priced, choice) for layer, one in crossing.items()}
        kept = sorted(crossing)
        before = {layer: kept[k - 1] for k, layer in enumerate(kept) if k}
        totals = totals_share(sized.outlook.program)
        seen: set[int] = set()
        for layer in _examples(self.classes, layer_of):
            if self.classes[layer] in seen:
                continue
            seen.add(self.classes[layer])
            forth, back = layer_of[layer]
            line = _Line(layer, sized, costs, other)
            weight = line.affine("by_weight")
            backward = line.affine("backward")
            row = LayerRow(
                forward=line.affine("forward"),
                backward_input=_minus(backward, weight),
                backward_weight=weight,
                step_seconds=float(costs.update[layer] + totals * costs.forward[layer]),
                state_bytes=float(costs.state[layer] + costs.gradients[layer]),
                activation_bytes=line.affine("activations"),
                transient_bytes=line.affine("transient"),
                batch_split=split,
                layout_in=at[before[forth]] if forth in before else self._nothing(),
                layout_out=at[back],
                recomputation=kind,
                key=key,
            )
            if row not in self.rows[self.classes[layer]]:
                self.rows[self.classes[layer]].append(row)
        return costs

    def _nothing(self) -> int:
        if () not in self.layouts:
            self.layouts.append(())
            self.builder.crossing[self.submesh, self.mesh, len(self.layouts) - 1] = 0.0
            self._values.append((Boundary((), ()), self._values[0][1], ()))
        return self.layouts.index(())

    def _layout(self, boundary: Boundary, priced: _Priced, choice: Sequence[int]) -> int:
        layout = boundary.layout(priced.selection, choice)
        label = (*map(str, boundary.kinds), *layout)
        if label not in self.layouts:
            self.layouts.append(label)
            self._values.append((boundary, priced, choice))
            self.builder.crossing[self.submesh, self.mesh, len(self.layouts) - 1] = (
                boundary.forward_bytes / priced.sized.samples
            )
        return self.layouts.index(label)

    def _at_another_size(
        self, kind: str, number: int, choice: Sequence[int]
    ) -> tuple[Sized, StageCosts] | None:
        """Return what the same strategies cost at the largest size, else at the one before."""
        here = self.priced(kind, number).selection
        last = len(self.builder.sizes[kind]) - 1
        other = last if number < last else number - 1
        if other < 0:
            return None
        there = self.priced(kind, other)
        same = same_choice(here, choice, there.selection)
        return None if same is None else (there.sized, there.costs(same))

    def _batch_split(self, priced: _Priced, kind: str, choice: Sequence[int]) -> int:
        """Return what the samples of a microbatch must be a multiple of."""
        sizes = self.builder.sizes[kind]
        other = next((one for one in sizes if one.samples != priced.sized.samples), None)
        if other is None:
            return priced.sized.samples
        mine = priced.sized.outlook.window.staging.eqns
        theirs = other.outlook.window.staging.eqns
        split, seen = 1, set()
        for eqn, like in zip(mine, theirs, strict=True):
            for var, twin in zip(eqn.outvars, like.outvars, strict=True):
                source = priced.selection.sources.get(var)
                if is_drop(var) or source is None or source.node is None:
                    continue
                spec = source.specs[choice[source.node]]
                mark = (id(spec), shape_of(var))
                if mark in seen:
                    continue
                seen.add(mark)
                for axes, size, its in zip(spec.dims, shape_of(var), shape_of(twin), strict=True):
                    if axes and size != its:
                        per_sample = max(size // priced.sized.samples, 1)
                        parts = self.mesh.size(axes)
                        split = math.lcm(split, parts // math.gcd(parts, per_sample))
        return split

    def menu(self) -> MeshMenu | None:
        """Return the menu of the rows added, None if there are none."""
        if not all(self.rows):
            return None
        return MeshMenu(
            submesh=self.submesh,
            logical=self.mesh,
            rows=tuple(map(tuple, self.rows)),
            layouts=tuple(" ".join(label) for label in self.layouts),
            conversion=self._conversions(),
            floors=self._floors(),
        )

    def _floors(self) -> tuple[tuple[LayerFloor, ...], ...]:
        """Return what a layer of each class takes at least: every equation at its cheapest.

        Per sample, as in the largest microbatch: what runs for fewer runs for their multiples.
        """
        priced = max(
            (one for (kind, _), one in self._priced.items() if kind == "none"),
            key=lambda one: one.sized.samples,
        )
        outlook = priced.sized.outlook
        floors = least_costs(priced.scope, priced.selection, outlook.num_layers, outlook.window)
        examples = _examples(self.classes, outlook.window.layer_of)
        per_sample = priced.sized.count * priced.sized.samples
        return tuple(
            (
                LayerFloor(
                    seconds=Affine(0.0, float(floors[layer, 0]) / per_sample),
                    step_seconds=float(floors[layer, 1]),
                ),
            )
            for layer in (
                next(k for k in examples if self.classes[k] == number)
                for number in range(len(self.rows))
            )
        )

    def _conversions(self) -> dict[tuple[int, int], Affine]:
        """Return the seconds between layouts that layers next to each other leave and want."""
        pairs = {
            (one.layout_out, other.layout_in)
            for before, after in set(zip(self.classes, self.classes[1:], strict=False))
            for one in self.rows[before]
            for other in self.rows[after]
        }
        return {pair: self._conversion(*pair) for pair in sorted(pairs) if pair[0] != pair[1]}

    def _conversion(self, before: int, after: int) -> Affine:
        (one, priced, choice), (other, its, its_choice) = self._values[before], self._values[after]
        if one.kinds != other.kinds:
            return Affine()
        larger, values = max(
            (priced.sized.samples, one.values),
            (its.sized.samples, other.values),
            key=lambda p: p[0],
        )
        seconds = 0.0
        for number, (var, twin) in enumerate(zip(one.values, other.values, strict=True)):
            here, there = priced.selection.spec(var, choice), its.selection.spec(twin, its_choice)
            if here == there:
                continue
            if not one.kinds[number][0]:
                here, there = there, here  # cotangents go the other way
            value = values[number]
            found = self.costs.conversion_seconds(
                shape_of(value), tensor_bytes(value), (here,), (there,), in_buckets=False
            )
            seconds += float(found[0, 0]) if math.isfinite(found[0, 0]) else 0.0
        return Affine(0.0, seconds / larger)


@frozen(eq=False)
class _Line:
    """What one layer costs at the size a choice was solved at, and at another."""

    layer: int
    sized: Sized
    costs: StageCosts
    other: tuple[Sized, StageCosts] | None

    def affine(self, what: str) -> Affine:
        """Return a quantity of one microbatch."""

        def of(sized: Sized, costs: StageCosts) -> float:
            value = float(getattr(costs, what)[self.layer])
            per_step = what in ("forward", "backward", "by_weight")
            return value / sized.count if per_step else value

        here = of(self.sized, self.costs)
        if self.other is None:
            return Affine(0.0, here / self.sized.samples)
        return _affine(self.sized.samples, here, self.other[0].samples, of(*self.other))


def _affine(size: int, value: float, other: int, there: float) -> Affine:
    """Return the line through two points, without negative parts."""
    each = max((there - value) / (other - size), 0.0)
    fixed = value - each * size
    return Affine(fixed, each) if fixed >= 0 else Affine(0.0, value / size)


def _minus(whole: Affine, part: Affine) -> Affine:
    return Affine(max(whole.fixed - part.fixed, 0.0), max(whole.each - part.each, 0.0))


def _examples(classes: Sequence[int], layer_of: Sequence[tuple[int, int]]) -> list[int]:
    """Return the layers, those in the middle of a run first: they stand for its every layer."""
    inside = [k for k, stands in enumerate(layer_of) if stands != (k, k)]
    return inside + [k for k in range(len(classes)) if k not in set(inside)]


def menu_of(
    builder: MenuBuilder,
    meshes: Sequence[tuple[SubmeshSpec, LogicalMesh]],
    memory: Sequence[float],
) -> LayerMenu | None:
    """Return the menu of all `meshes`, None where none can be used; `memory` by host group."""
    found = []
    if len(meshes) > FEW_MESHES:
        builder.steps = 0
    total = builder.model.cluster.num_devices
    for number, (submesh, mesh) in enumerate(meshes):
        builder.options.progress("menu", number, len(meshes))
        share = submesh.num_devices / total
        try:
            menu = builder.mesh_menu(submesh, mesh, memory[submesh.host_group], share)
        except UnfitPinError:
            continue
        if menu is not None:
            found.append(menu)
    builder.options.progress("menu", len(meshes), len(meshes))
    if not found:
        return None
    classes = builder.sizes["none"][0].outlook.window.classes
    return LayerMenu(class_of_layer=classes, meshes=tuple(found))

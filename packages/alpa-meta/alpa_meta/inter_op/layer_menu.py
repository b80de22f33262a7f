"""The layer menu of a step: what each kind of layer costs on each mesh, for any microbatch.

    row      value(samples) = fixed + each * samples, through the least and the greatest of the
             menu's sizes that it can run at                                -> mesh_rows
    layout   the specs of the values that cross between two layers          -> layer_boundaries

A row holds where its microbatch divides as that of its strategies does: a choice that splits 8
examples over 4 devices runs with 4, 8, 12, ... of them.            -> MeshProblem.split()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import define, field

from alpa_interchange import BoundaryLayout, LogicalMesh, SubmeshSpec
from alpa_interchange.menu import RECOMPUTATIONS, LayerFloor, LayerMenu, MeshMenu
from alpa_meta.inter_op.layer_boundaries import Boundary, boundaries
from alpa_meta.inter_op.layer_floors import FloorSource
from alpa_meta.inter_op.mesh_rows import MeshRows, StateSpecs
from alpa_meta.inter_op.row_lines import Sized
from alpa_meta.inter_op.window import Window
from alpa_meta.options import Options
from alpa_meta.pinning import UnfitPinError
from cost_model import CostModel
from stage_dp import SCHEDULE_RULES

# Between the microbatch sizes that problems are built at: a host's devices, mostly. With half and
# double, LLaMA-8B on 8 H100, 16 layers of 2560 on 8 V100 and 24 of 2048 on 16 H100 get plans within
# 0.02 % of the same step time, in as many CPU seconds.
SIZE_RATIO = 8


def menu_sizes(possible: Sequence[int], num_devices: int) -> tuple[int, ...]:
    """Return the microbatch sizes to build problems at, of the `possible` ones, the last of which
    is the whole batch: the least, up to what all devices share, and the largest but the whole.

    What splits a microbatch into as many parts as some of the devices are is priced at two of them
    where there are two: one size alone cannot tell what every microbatch takes, such as a reduction
    of gradients, from what every sample takes. GPT-1.5B, 144 examples on 16 A100, was predicted to
    take 1.08 s a step by rows of 16 parts, which took 1.35.
    """
    divisors = possible[:-1]
    sizes = {max(divisors)} if divisors else set()
    wanted = 1
    while divisors and wanted < SIZE_RATIO * num_devices:
        sizes.add(max((d for d in divisors if d <= wanted), default=divisors[0]))
        wanted *= SIZE_RATIO
    if len(divisors) > 1 and max(sizes - {divisors[-1]}, default=0) < num_devices:
        sizes.add(divisors[-2])
    for parts in (one for one in range(num_devices, 1, -1) if num_devices % one == 0):
        able = [size for size in divisors if size % parts == 0]
        if len(able) > 1 and len(sizes.intersection(able)) < 2:
            sizes.update((able[0], able[-1]))
    return tuple(sorted(sizes))


@define(eq=False)
class MenuBuilder:
    """Fills the menu of a step: `sizes[recomputation]` are the program at growing sizes.

    With the program without recomputation alone, rows of layers that recompute are derived from it.
    """

    sizes: Mapping[str, Sequence[Sized]]
    model: CostModel
    options: Options
    batch: int
    # What crosses forward, by mesh and layout.
    crossing: dict[tuple[SubmeshSpec, LogicalMesh, int], BoundaryLayout] = field(factory=dict)
    # By mesh and key of the row, the specs of each class' state, in the order of the inputs.
    state: dict[tuple[SubmeshSpec, LogicalMesh, str], StateSpecs] = field(factory=dict)
    floors: list[FloorSource] = field(factory=list)  # of the menu's meshes
    _boundaries: dict[Window, dict[int, Boundary]] = field(factory=dict)

    @property
    def derived(self) -> tuple[str, ...]:
        """The kinds of recomputation whose rows are derived; none where programs have them."""
        chosen = self.options.recompute is None and len(self.sizes) == 1
        return RECOMPUTATIONS if chosen else ()

    @property
    def kept(self) -> tuple[str, ...]:
        """The kinds of recomputation that floors tell apart; none: another program may keep
        nothing."""
        return self.derived or (("none",) if len(self.sizes) == 1 else ())

    @property
    def splits_backward(self) -> bool:
        """Whether a schedule may have the backward pass in two parts."""
        return any(SCHEDULE_RULES[name].splits_backward for name in self.options.schedules)

    def mesh_menu(
        self, submesh: SubmeshSpec, mesh: LogicalMesh, memory: float, share: float
    ) -> MeshMenu | None:
        """Return the menu of one logical mesh, None where no pin allows it.

        `share`: of the program that stages on this mesh run, when all devices work.
        """
        rows = MeshRows(self, submesh, mesh)
        rows.solve(memory, share)
        return rows.menu()

    def floors_at(self, mesh: int, number: int, samples: int) -> tuple[LayerFloor, ...]:
        """Return the floors of a class on a mesh of the menu for microbatches of so many samples,
        solved for when they are asked for."""
        return self.floors[mesh].exact(number, samples)

    def forget_seconds(self) -> None:
        """Free what floors were solved with; a further search asks for few."""
        for source in self.floors:
            source.forget_seconds()

    def boundaries(self, sized: Sized) -> dict[int, Boundary]:
        """Return what crosses between the layers of the window."""
        window = sized.outlook.window
        if window not in self._boundaries:
            self._boundaries[window] = boundaries(window)
        return self._boundaries[window]


def menu_of(
    builder: MenuBuilder,
    meshes: Sequence[tuple[SubmeshSpec, LogicalMesh]],
    memory: Sequence[float],
) -> LayerMenu | None:
    """Return the menu of all `meshes`, None where none can be used; `memory` by host group."""
    found = []
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

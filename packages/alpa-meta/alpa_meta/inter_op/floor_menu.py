"""A menu of floors alone, whose one row of every class is nothing to choose.

Bounds go by floors and by what crosses between layers, so that they need no selection problem of a
whole mesh to be solved: of models without many equal layers these take most of the planning.
"""

from __future__ import annotations

from collections.abc import Sequence

from alpa_interchange import BoundaryLayout, LogicalMesh, SubmeshSpec
from alpa_interchange.menu import Affine, LayerMenu, LayerRow, MeshMenu
from alpa_meta.inter_op.layer_boundaries import Boundary
from alpa_meta.inter_op.layer_menu import MenuBuilder
from alpa_meta.inter_op.layering import tensor_bytes
from alpa_meta.inter_op.mesh_rows import MeshRows
from alpa_meta.pinning import UnfitPinError

Crossing = list[tuple[BoundaryLayout, ...]]
_SECONDS = 1e6  # of a layer: more than any takes


def floor_menu(
    builder: MenuBuilder, meshes: Sequence[tuple[SubmeshSpec, LogicalMesh]]
) -> tuple[LayerMenu, Crossing] | None:
    """Return the menu of floors on all `meshes`, and what crosses after each class of layers;
    None where no mesh can be used."""
    main = builder.sizes["none"][-1]
    window = main.outlook.window
    crossing = builder.boundaries(main)
    sent = [0.0] * (max(window.classes) + 1)
    for layer, number in enumerate(window.classes):
        _, back = window.layer_of[layer]
        if back in crossing:
            sent[number] = _bytes(crossing[back]) / main.samples
    rows = tuple(
        (LayerRow(forward=Affine(_SECONDS), backward_input=Affine(_SECONDS), layout_out=number),)
        for number in range(len(sent))
    )
    layouts = tuple(map(str, range(len(sent))))
    found = []
    for submesh, mesh in meshes:
        try:
            source = MeshRows(builder, submesh, mesh).bare_floors()
        except UnfitPinError:
            continue
        builder.floors.append(source)
        floors = tuple((source.all_ways(number),) for number in range(len(sent)))
        source.problem.forget_choices()
        found.append(
            MeshMenu(
                submesh=submesh,
                logical=mesh,
                rows=rows,
                layouts=layouts,
                conversion={(a, 0): Affine() for a in range(1, len(sent))},
                floors=floors,
            )
        )
    if not found:
        return None
    menu = LayerMenu(class_of_layer=window.classes, meshes=tuple(found))
    lies = tuple(BoundaryLayout(bytes=bytes) for bytes in sent)
    return menu, [lies] * len(found)


def _bytes(boundary: Boundary) -> float:
    """Return the bytes that are sent forward."""
    pairs = zip(boundary.values, boundary.kinds, strict=True)
    return float(sum(tensor_bytes(var) for var, (forward, *_) in pairs if forward))

"""The menu that a plan was chosen from, kept beside it to explain and change it without a trace.

The file of `plan.json` is `plan.menu.json`.
"""

from __future__ import annotations

import os
from pathlib import Path

from attrs import field, frozen

from alpa_interchange.check import non_empty, non_negative, positive
from alpa_interchange.cluster import ClusterSpec
from alpa_interchange.document import DocumentError, load, save
from alpa_interchange.menu import LayerMenu
from alpa_interchange.plan import ParallelPlan
from alpa_interchange.tensor import ShardingSpec, TensorType


@frozen(kw_only=True)
class MenuLeaf:
    """One array of the step's state, or the layers `start..stop` of a stacked one, and the layer
    of the menu that updates it."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    layer: int = field(validator=non_negative)
    start: int | None = None
    stop: int | None = None


@frozen(kw_only=True)
class RowSpecs:
    """How the state lies under the rows named `key` of one mesh.

    `specs[class][k]` is the position in `KeptMenu.specs` of the spec of the k-th leaf of a layer of
    the class, leaves in the order of `KeptMenu.leaves`.
    """

    mesh: int = field(validator=non_negative)  # position in LayerMenu.meshes
    key: str
    specs: tuple[tuple[int, ...], ...]


@frozen(kw_only=True)
class BoundaryValue:
    """A value of a microbatch that a stage sends forward, and how it lies on the stage's mesh."""

    tensor: TensorType
    spec: ShardingSpec


@frozen(kw_only=True)
class BoundaryLayout:
    """How the values that a stage sends forward lie on a mesh: bytes per sample in all, and which
    share of them a host and a device hold at most. `values` are all of them, or none if unknown."""

    bytes: float = field(validator=non_negative)
    host_share: float = field(default=1.0, validator=non_negative)
    device_share: float = field(default=1.0, validator=non_negative)
    values: tuple[BoundaryValue, ...] = ()


@frozen(kw_only=True)
class KeptMenu:
    """A layer menu with all that a joint search over it needs, and what it was made for.

    `crossing[mesh][layout]`: what a stage sends forward from that layout.
    `memory`: bytes per device that plans may use, where the user gave them.
    """

    fingerprint: str  # ProgramSummary.fingerprint of the plan
    cluster: ClusterSpec
    batch_size: int = field(validator=positive)
    counts: tuple[int, ...] = field(validator=non_empty)  # of microbatches
    schedules: tuple[str, ...] = field(validator=non_empty)
    num_stages: int | None = None  # as the user fixed it
    memory: float | None = None
    menu: LayerMenu
    crossing: tuple[tuple[BoundaryLayout, ...], ...]
    leaves: tuple[MenuLeaf, ...] = ()
    specs: tuple[ShardingSpec, ...] = ()
    state: tuple[RowSpecs, ...] = ()


def menu_path(plan: str | os.PathLike[str]) -> Path:
    """Return where the menu of the plan in the file `plan` is kept: x.menu.json for x.json."""
    path = Path(plan)
    return path.with_name(f"{path.name.removesuffix('.json')}.menu.json")


def save_plan(
    plan: ParallelPlan, path: str | os.PathLike[str], menu: KeptMenu | None = None
) -> None:
    """Write a plan to `path` and its menu beside it; without one, that of another plan goes."""
    save(plan, path)
    beside = menu_path(path)
    if menu is not None:
        save(menu, beside)
    elif beside.exists():
        try:
            load_menu(plan, beside)
        except DocumentError:
            beside.unlink()


def load_menu(plan: ParallelPlan, path: str | os.PathLike[str]) -> KeptMenu:
    """Return the menu in the file at `path`; DocumentError if it is not the plan's."""
    menu = load(path, KeptMenu)
    if menu.fingerprint != plan.program.fingerprint or menu.cluster != plan.cluster:
        raise DocumentError(
            f"{path}: is the menu of another plan: of program {menu.fingerprint[:12]} on "
            f"{menu.cluster.name!r}, not of {plan.program.fingerprint[:12]} on "
            f"{plan.cluster.name!r}; plan anew, or name the right file"
        )
    return menu

"""Layer menus: what each kind of layer costs on each mesh, and pipelines chosen from them.

A *class* is a set of layers that cost the same. A menu lists for each class and each logical mesh
the ways to run one layer (`LayerRow`), affine in the samples of a microbatch, so that one menu
serves every microbatch count. Seconds are of one microbatch unless said otherwise; bytes are per
device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from attrs import field, frozen

from alpa_interchange.check import OneOf, non_empty, non_negative, positive
from alpa_interchange.mesh import LogicalMesh, SubmeshSpec
from alpa_interchange.stage import DeviceGroup

RECOMPUTATIONS = ("none", "selective", "full")
LINKS = ("host", "hosts", "groups")  # between two stages: on one host, across hosts, across groups


@frozen
class Affine:
    """A quantity of one microbatch: `fixed` + `each` * samples."""

    fixed: float = field(default=0.0, validator=non_negative)
    each: float = field(default=0.0, validator=non_negative)

    def value(self, samples: float) -> float:
        """Return the quantity for a microbatch of `samples`."""
        return self.fixed + self.each * samples


NOTHING = Affine()


@frozen(kw_only=True)
class AxisPart:
    """The part of some seconds that the link of one mesh axis takes.

    On another link `latency` grows with its latency, and `bytes` with 1 / bandwidth; both are
    seconds. What is in no part is compute.
    """

    axis: int = field(validator=non_negative)  # position in LogicalMesh.axes
    latency: Affine = NOTHING
    bytes: Affine = NOTHING


@frozen(kw_only=True)
class LayerRow:
    """One way to run one layer of a class on one logical mesh.

    `layout_in` and `layout_out` say how the values at the layer's two boundaries lie on the mesh,
    as positions in `MeshMenu.layouts`. Values of other shapes (another width after a downsampling)
    are other layouts.
    """

    forward: Affine
    backward_input: Affine
    backward_weight: Affine = NOTHING  # nothing: all of the backward is in `backward_input`
    split_seconds: Affine = (
        NOTHING  # more backward, where these two parts are programs of their own
    )
    step_seconds: float = field(default=0.0, validator=non_negative)  # once per step: sync, update
    state_bytes: float = field(default=0.0, validator=non_negative)
    activation_bytes: Affine = NOTHING  # per microbatch in flight
    # Besides, what a backward by input keeps for the one by weight.
    delayed_bytes: Affine = NOTHING
    # All that one more microbatch keeps whose backward by weight waits: of its activations what
    # only the backward by input reads is gone. None: all activations are kept.
    waiting_bytes: Affine | None = None
    # Of the microbatch that runs: what its token slices keep for one another beside activations.
    kept_bytes: Affine = NOTHING
    transient_bytes: Affine = NOTHING  # largest temporary; the largest of a stage counts
    batch_split: int = field(default=1, validator=positive)  # divides a microbatch's samples
    layout_in: int = field(default=0, validator=non_negative)
    layout_out: int = field(default=0, validator=non_negative)
    recomputation: str = field(default="none", validator=OneOf(*RECOMPUTATIONS))
    key: str = ""  # names the sharding solution behind the figures
    # Parts of the seconds above that are collectives; none where nobody split them.
    forward_sent: tuple[AxisPart, ...] = ()
    backward_input_sent: tuple[AxisPart, ...] = ()
    backward_weight_sent: tuple[AxisPart, ...] = ()
    step_sent: tuple[AxisPart, ...] = ()

    def waiting(self, samples: float) -> float:
        """Return the bytes that one more microbatch keeps whose backward by weight waits."""
        return _waiting(self, samples)


@frozen(kw_only=True)
class PricedFloor:
    """The least of `price` * bytes + the seconds of a step, in seconds.

    With B microbatches every way needs price * bytes + B * (forward + backward) +
    step_share * step_seconds >= B * `seconds` + `step_seconds` of this floor, with what it needs
    more than one of `LayerFloor.kept` does: its bytes are those of state, and what it keeps of one
    microbatch beyond those of `kept`.
    """

    price: float = field(default=0.0, validator=non_negative)  # seconds per byte
    step_share: float = field(default=1.0, validator=non_negative)
    seconds: Affine = NOTHING
    step_seconds: float = field(default=0.0, validator=non_negative)


@frozen(kw_only=True)
class KeptFloor:
    """What a kind of recomputation needs at least: more backward seconds, bytes that it keeps, and
    bytes while it runs; and what a split backward needs more, as in `LayerRow`."""

    seconds: Affine = NOTHING
    activation_bytes: Affine = NOTHING
    transient_bytes: Affine = NOTHING
    split_seconds: Affine = NOTHING
    delayed_bytes: Affine = NOTHING
    waiting_bytes: Affine | None = None

    def waiting(self, samples: float) -> float:
        """Return the bytes that one more microbatch keeps whose backward by weight waits."""
        return _waiting(self, samples)


def _waiting(one: LayerRow | KeptFloor, samples: float) -> float:
    if one.waiting_bytes is not None:
        return one.waiting_bytes.value(samples)
    return one.activation_bytes.value(samples) + one.delayed_bytes.value(samples)


@frozen(kw_only=True)
class LayerFloor:
    """What a layer needs at least, column by column, and for the sums of `priced`.

    Every way needs besides what one of `kept` does; with none, nothing. See `MeshMenu.floors`.
    A layer that follows one of its class in a stage needs `follow_seconds` more per step, with and
    without the step seconds, and every run of such layers `run_seconds` less, as far as the two
    together are not negative.
    """

    seconds: Affine = NOTHING  # forward plus backward
    forward: Affine = NOTHING
    forward_and_input: Affine = NOTHING  # forward plus backward by input
    backward: Affine = NOTHING
    step_seconds: float = field(default=0.0, validator=non_negative)
    state_bytes: float = field(default=0.0, validator=non_negative)
    priced: tuple[PricedFloor, ...] = ()
    kept: tuple[KeptFloor, ...] = ()
    follow_seconds: float = field(default=0.0, validator=non_negative)
    run_seconds: float = field(default=0.0, validator=non_negative)


@frozen(kw_only=True)
class MeshMenu:
    """All rows of one logical mesh: `rows[class]`.

    `conversion[a, b]`: seconds, forward plus backward, to bring a value from layout a to layout b
    between consecutive layers of a stage. A pair that is absent costs nothing if a = b and cannot
    follow one another otherwise. `conversion_sent` are the parts of these seconds by axis.

    `floors[class]` extend the proof of a bound to ways that no row describes: every way to run a
    layer of the class needs at least what one of its floors needs, or a mixture of them. Left
    empty, bounds hold for the rows.
    """

    submesh: SubmeshSpec
    logical: LogicalMesh
    rows: tuple[tuple[LayerRow, ...], ...] = field(validator=non_empty)
    layouts: tuple[str, ...] = ("",)
    conversion: Mapping[tuple[int, int], Affine] = field(factory=dict)
    conversion_sent: Mapping[tuple[int, int], tuple[AxisPart, ...]] = field(factory=dict)
    floors: tuple[tuple[LayerFloor, ...], ...] = ()

    def __attrs_post_init__(self) -> None:
        if self.floors and len(self.floors) != len(self.rows):
            raise ValueError(
                f"MeshMenu.floors must be empty or have one entry per class: {len(self.rows)}, "
                f"got {len(self.floors)}"
            )
        known = len(self.layouts)
        used = {x for rows in self.rows for r in rows for x in (r.layout_in, r.layout_out)}
        wrong = sorted(x for x in used | {x for p in self.conversion for x in p} if x >= known)
        if wrong:
            raise ValueError(
                f"MeshMenu.layouts has {known} names, but rows or conversions speak of layouts "
                f"{wrong[:4]}"
            )

    def convert(self, before: int, after: int, samples: float) -> float:
        """Return the seconds from layout `before` to layout `after`, inf if it cannot be."""
        cost = self.conversion.get((before, after))
        if cost is None:
            return 0.0 if before == after else math.inf
        return cost.value(samples)


@frozen(kw_only=True)
class LayerMenu:
    """The layers of a model by class, and what each class costs on each mesh."""

    class_of_layer: tuple[int, ...] = field(validator=non_empty)
    meshes: tuple[MeshMenu, ...] = field(validator=non_empty)

    def __attrs_post_init__(self) -> None:
        for number, mesh in enumerate(self.meshes):
            if not 0 <= min(self.class_of_layer) <= max(self.class_of_layer) < len(mesh.rows):
                raise ValueError(
                    f"LayerMenu.class_of_layer has classes {min(self.class_of_layer)}.."
                    f"{max(self.class_of_layer)}, but meshes[{number}].rows has {len(mesh.rows)}"
                )

    @property
    def num_layers(self) -> int:
        return len(self.class_of_layer)


# Seconds one way for one microbatch's activations, from layout `layout_out` of mesh `mesh_a` to
# layout `layout_in` of `mesh_b` over a link of LINKS; gradients take as long back. Arguments:
# (mesh_a, layout_out, mesh_b, layout_in, link), meshes by their position in LayerMenu.meshes.
Boundary = Callable[[int, int, int, int, str], Affine]


def no_boundary(mesh_a: int, layout_out: int, mesh_b: int, layout_in: int, link: str) -> Affine:
    """Return the boundary that costs nothing."""
    return NOTHING


# The least that a boundary after a layer of a class costs, whatever its layouts are, as `Boundary`
# counts: (class, mesh_a, mesh_b, link).
BoundaryFloor = Callable[[int, int, int, str], Affine]


def no_boundary_floor(number: int, mesh_a: int, mesh_b: int, link: str) -> Affine:
    """Return the floor of boundaries that may cost nothing."""
    return NOTHING


# Sharper floors of (mesh, class, samples of a microbatch), solved for when a bound asks for them.
# They are of all ways whose batch_split divides the samples, each as affine as a row: what they
# say of state bytes and of B t + u holds for microbatches of any divisor of the samples too.
FloorsAt = Callable[[int, int, int], tuple[LayerFloor, ...]]


@frozen(kw_only=True)
class JointProblem:
    """Choose stages, their meshes and rows, the microbatch count and the schedule together."""

    menu: LayerMenu
    batch_size: int = field(validator=positive)  # samples of a step
    device_groups: tuple[DeviceGroup, ...] = field(validator=non_empty)
    boundary: Boundary = no_boundary
    boundary_floor: BoundaryFloor = no_boundary_floor  # of boundaries, beside floors of the menu
    floors_at: FloorsAt | None = None  # beside the floors of the menu, where it has any
    # Microbatch counts to try, divisors of batch_size. None: all of them.
    counts: tuple[int, ...] | None = None
    schedules: tuple[str, ...] = (
        "1f1b",
        "gpipe",
        "eager-1f1b",
        "adaptive",
        "interleaved-1f1b",
        "zero-bubble-h1",
    )
    num_stages: int | None = None  # None: free
    # Token slices of what schedules order as a microbatch: `batch_size` samples, counts and rows
    # are of slices, which pass through the stages one by one.
    num_slices: int = field(default=1, validator=positive)
    use_all_devices: bool = False  # True: a plan that leaves devices idle is not allowed
    proof: bool = True  # False: a quick search; its bound is valid, but far from the best one
    deadline_seconds: float | None = None  # None: limits are counts of work, and plans repeatable

    def __attrs_post_init__(self) -> None:
        if self.batch_size % self.num_slices:
            raise ValueError(
                f"JointProblem.num_slices must divide batch_size={self.batch_size}, got "
                f"{self.num_slices}"
            )
        wrong = [n for n in self.counts or () if n < 1 or self.batch_size % n]
        if wrong:
            raise ValueError(
                f"JointProblem.counts must divide batch_size={self.batch_size}, got {wrong[:4]}"
            )
        for menu in self.menu.meshes:
            if menu.submesh.host_group >= len(self.device_groups):
                raise ValueError(
                    f"JointProblem.device_groups has {len(self.device_groups)} groups, but a mesh "
                    f"of the menu is on group {menu.submesh.host_group}"
                )


@frozen(kw_only=True)
class JointStage:
    """Layers `layer_start..layer_stop` on one mesh of the menu, with one row number per layer."""

    layer_start: int
    layer_stop: int
    mesh: int  # position in LayerMenu.meshes
    rows: tuple[int, ...]  # positions in MeshMenu.rows[class of the layer]
    device_ids: tuple[int, ...]  # in the order of the logical mesh
    forward_seconds: float
    backward_seconds: float  # input and weight parts together
    weight_seconds: float  # of the backward: the part that makes weight gradients
    step_seconds: float
    boundary_seconds: float  # one way to the next stage, on the link it crosses; 0 for the last
    transient_bytes: float = 0.0  # of the stage's `peak_bytes`
    activation_bytes: float = 0.0  # of these, for each microbatch in flight


@frozen(kw_only=True)
class TriedCount:
    """What the search knows of one microbatch count and schedule."""

    num_microbatches: int
    schedule: str
    step_seconds: float | None  # of the best plan met; None: none was needed, or none fits
    lower_bound: float  # of every plan with this count and schedule; inf: there is none
    stages: tuple[tuple[int, int, int], ...] = ()  # of that plan: (first layer, stop, mesh)
    num_meshes: int | None = None  # of its submeshes where they run several stages each


@frozen(kw_only=True)
class JointPlan:
    """The chosen pipeline. `lower_bound` holds for every plan of the problem, `work_bound` also for
    pipelines with a mesh for each stage that run the same work in any other order."""

    stages: tuple[JointStage, ...]
    num_microbatches: int
    schedule: str
    step_seconds: float
    lower_bound: float
    peak_bytes: tuple[float, ...]  # per stage, per device
    in_flight: tuple[int, ...]  # per stage: microbatches alive when its devices hold most
    tried: tuple[TriedCount, ...] = ()
    complete: bool = True  # False: the deadline stopped the search
    work_bound: float = 0.0

    @property
    def num_meshes(self) -> int:
        """Return the number of submeshes; fewer than stages where a submesh runs several."""
        return len({stage.device_ids for stage in self.stages})

    @property
    def gap(self) -> float:
        """Return the share of the step time that is not proven necessary (0.0: proven optimal)."""
        return 1.0 - self.lower_bound / self.step_seconds if self.step_seconds > 0 else 0.0

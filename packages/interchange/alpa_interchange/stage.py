"""Pipelines: what each layer range costs where, and the chosen stages."""

from __future__ import annotations

from attrs import field, frozen

from alpa_interchange.check import non_empty, non_negative, positive
from alpa_interchange.mesh import LogicalMesh, SubmeshSpec


@frozen(kw_only=True)
class TokenSlice:
    """What a stage takes for one slice of a microbatch's tokens: seconds, of `StageCandidate`'s."""

    tokens: int = field(validator=positive)
    forward_seconds: float = field(validator=non_negative)
    backward_seconds: float = field(validator=non_negative)
    backward_weight_seconds: float = field(default=0.0, validator=non_negative)


@frozen(kw_only=True)
class StageCandidate:
    """Layers `layer_start..layer_stop` on one submesh with one sharding, for one microbatch count.

    Seconds are predictions for one microbatch unless said otherwise; bytes are per device.
    """

    layer_start: int = field(validator=non_negative)
    layer_stop: int = field(validator=positive)
    submesh: SubmeshSpec
    logical: LogicalMesh
    num_microbatches: int = field(validator=positive)
    forward_seconds: float = field(validator=non_negative)
    backward_seconds: float = field(validator=non_negative)
    # The part of backward_seconds that schedules with a split backward run later: what makes
    # gradients of weights, and no cotangent that the previous stage waits for.
    backward_weight_seconds: float = field(default=0.0, validator=non_negative)
    step_seconds: float = field(default=0.0, validator=non_negative)  # once per step: sync, update
    state_bytes: float = field(
        default=0.0, validator=non_negative
    )  # parameters, optimiser, gradients
    activation_bytes: float = field(default=0.0, validator=non_negative)  # per microbatch in flight
    # Cotangents that a delayed backward by weight keeps besides, per microbatch that waits for it.
    delayed_bytes: float = field(default=0.0, validator=non_negative)
    # All that such a microbatch keeps; None: its activations and these cotangents.
    waiting_bytes: float | None = None
    transient_bytes: float = field(default=0.0, validator=non_negative)  # largest temporary
    # Seconds to send one microbatch's activations to the next stage; gradients take as long back.
    boundary_seconds: float = field(default=0.0, validator=non_negative)
    lower_bound_seconds: float = field(default=0.0, validator=non_negative)  # forward + backward
    key: str = ""  # names the sharding solution behind the figures
    # What each token slice takes of the seconds, where sequences are cut; empty where they are not.
    token_slices: tuple[TokenSlice, ...] = ()

    def __attrs_post_init__(self) -> None:
        if self.layer_stop <= self.layer_start:
            raise ValueError(
                "StageCandidate.layer_stop must be above layer_start, got layers "
                f"{self.layer_start}..{self.layer_stop}"
            )

    @property
    def seconds(self) -> float:
        """Return forward plus backward time of one microbatch."""
        return self.forward_seconds + self.backward_seconds


@frozen(kw_only=True)
class DeviceGroup:
    """Identical hosts that stages can be cut from."""

    num_hosts: int = field(validator=positive)
    devices_per_host: int = field(validator=positive)
    memory: float = field(validator=positive)  # bytes per device that a program may use


@frozen(kw_only=True)
class StageProblem:
    """Choose stages that cover all layers on disjoint submeshes, the microbatches and schedule."""

    num_layers: int = field(validator=positive)
    device_groups: tuple[DeviceGroup, ...]
    candidates: tuple[StageCandidate, ...]
    schedules: tuple[str, ...] = ("1f1b",)
    num_stages: int | None = None  # None: free
    use_all_devices: bool = False  # True: a plan that leaves devices idle is not allowed


@frozen(kw_only=True)
class PlacedStage:
    """A chosen candidate and the devices it runs on, in the order of its logical mesh."""

    candidate: StageCandidate
    device_ids: tuple[int, ...]


@frozen(kw_only=True)
class StagePlan:
    """The chosen pipeline. `lower_bound` is proven for the problem's candidates and schedules."""

    stages: tuple[PlacedStage, ...] = field(validator=non_empty)
    num_microbatches: int = field(validator=positive)
    schedule: str = field(validator=non_empty)
    step_seconds: float
    lower_bound: float
    peak_bytes: tuple[float, ...]  # per stage, per device; none where they are not known
    # per stage: microbatches alive when its devices hold most
    in_flight: tuple[int, ...] = ()
    # per stage: of each of its devices with all stages that it runs; none where it runs one
    device_bytes: tuple[float, ...] = ()

    def __attrs_post_init__(self) -> None:
        for name in ("peak_bytes", "in_flight", "device_bytes"):
            values = getattr(self, name)
            if values and len(values) != len(self.stages):
                raise ValueError(
                    f"StagePlan.{name} needs one entry per stage or none: {len(self.stages)}, got "
                    f"{len(values)}"
                )

    @property
    def num_meshes(self) -> int:
        """Return the number of submeshes; fewer than stages where a submesh runs several."""
        return len({stage.device_ids for stage in self.stages})

    @property
    def gap(self) -> float:
        """Return the share of the step time that is not proven necessary (0.0: proven optimal)."""
        return 1.0 - self.lower_bound / self.step_seconds if self.step_seconds > 0 else 0.0

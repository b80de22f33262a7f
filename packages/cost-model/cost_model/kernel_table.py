"""Fitted kernel efficiencies by device kind."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import resources

from attrs import evolve, field, frozen

from alpa_interchange.cluster import DeviceSpec
from alpa_interchange.document import from_json
from cost_model.host import host_profile
from cost_model.kernel import KernelEfficiency

# devices of the same architecture as one with measured operators; memory, clocks and power differ
_SAME_CHIP: Mapping[str, str] = {
    "a100-80gb": "a100-40gb",
    "h100": "gh200", "h200": "gh200", "h800": "gh200",
    "gb200": "b200", "b300": "b200", "gb300": "b200",
}  # fmt: skip
# what the same chip on another board adds to the log error: the shares of large matmuls fitted to
# two boards with V100, 0.66 (32 GB, SuperScaler) and 0.73 (16 GB, Sailor), differ by 0.1
_OTHER_BOARD = 0.1


@frozen(kw_only=True)
class KernelFit:
    """Efficiencies of one device kind and how well they predict models not fitted on."""

    device: str
    efficiency: KernelEfficiency
    launch_latency: float  # seconds per kernel launched one at a time
    num_rows: int = 0
    median_error: Mapping[str, float] = field(factory=dict)  # by kind, out of fold
    default_error: Mapping[str, float] = field(factory=dict)  # deviation of the default shares


@frozen(kw_only=True)
class KernelTable:
    """All fitted device kinds."""

    fits: tuple[KernelFit, ...]


@functools.cache
def kernel_table() -> KernelTable:
    """Return the table shipped with the package (`python -m cost_model.kernel_fit` made it)."""
    text = resources.files("cost_model").joinpath("data/kernels.json").read_text("utf-8")
    return from_json(text, KernelTable, source="cost_model/data/kernels.json")


def device_efficiency(device: DeviceSpec) -> KernelEfficiency:
    """Return the kernel efficiencies of a device without a profile given.

    A CPU takes this machine's profile (or the default of one); a device with measured operators, or
    of the same chip as one, the fit of its kind; all others the default shares of the data sheet's
    peaks, with the error that these have on the devices that were measured.
    """
    if device.platform == "cpu":
        return host_profile(measure=False).efficiency
    fits = {fit.device: fit.efficiency for fit in kernel_table().fits}
    if device.name in fits:
        return fits[device.name]
    like = _SAME_CHIP.get(device.name)
    if like is None:
        return KernelEfficiency()
    fit = fits[like]
    return evolve(
        fit,
        deviation={kind: error + _OTHER_BOARD for kind, error in fit.deviation.items()},
        source=f"{fit.source} of {like}, the same chip",
    )

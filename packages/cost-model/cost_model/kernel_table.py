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
from cost_model.prediction import step_model


@frozen(kw_only=True)
class KernelFit:
    """Efficiencies of one device kind and how well they predict a model that was not fitted on."""

    device: str
    efficiency: KernelEfficiency
    launch_latency: float  # seconds per kernel launched one at a time
    num_rows: int = 0
    test_rows: int = 0
    test_mape: float = 0.0
    by_kind: Mapping[str, float] = field(factory=dict)  # MAPE by kernel kind


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

    A CPU takes this machine's profile (or the default of one); a GPU with fitted operators takes
    the fit of its kind; other GPUs take the matmul and attention shares that the training runs on
    A100 were fitted with; TPUs the defaults.
    """
    if device.platform == "cpu":
        return host_profile(measure=False).efficiency
    for fit in kernel_table().fits:
        if fit.device.split("-")[0] == device.name.split("-")[0]:
            return fit.efficiency
    default = KernelEfficiency()
    if device.platform != "gpu":
        return default
    constants = step_model().whole.constants
    compute = {
        "matmul": constants.matmul_share,
        "convolution": default.compute["convolution"],
        "attention": constants.fused_attention_share,
    }
    return evolve(
        default,
        compute=compute,
        half_depth=constants.half_depth,
        source="matmul shares of training runs on A100 (data/step_megatron_deepspeed.json)",
    )

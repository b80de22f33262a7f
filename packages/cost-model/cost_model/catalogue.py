"""Hardware presets: devices, links and hosts by name, every constant with its source.

Bandwidths are the maker's figures for one direction; `LinkSpec.efficiency` says which share of them
large transfers reach. Where collectives were measured on a link, `link_table` replaces both. What
is called assumed was neither measured here nor taken from a publication.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from attrs import evolve

from alpa_interchange.cluster import DeviceSpec, HostGroup, LinkSpec

_GIB = float(1 << 30)
_NCCL = "latency: NCCL's tuning table (ring step, Simple protocol)"
_BUS = "bandwidth in use: fitted by number of devices (data/links.json)"
_LIKE = "efficiency: assumed, near that fitted for NVLink 3"
_SOME = "efficiency: assumed"
_NET = "latency and efficiency: assumed"


def _gpu(
    name: str,
    memory: float,
    memory_bandwidth: float,
    half: float,
    single: float,
    num_units: int,
    source: str,
    *,
    bfloat16: float | None = None,
    tensor_float: float | None = None,
    eight_bit: float | None = None,
    double: float | None = None,
    four_bit: float | None = None,
    sustained: float = 1.0,
) -> DeviceSpec:
    peaks = {
        "float64": double or single / 32,
        "float32": single,
        "float16": half,
        "bfloat16": bfloat16 or half,
        "tensorfloat32": tensor_float or single,
    }
    if eight_bit:
        peaks |= {"int8": eight_bit}
        if name.startswith(("h", "b", "g", "l4")):
            peaks |= {"float8_e4m3fn": eight_bit, "float8_e5m2": eight_bit}
    if four_bit:
        peaks |= {"float4_e2m1fn": four_bit}
    return DeviceSpec(
        name=name,
        memory=memory,
        memory_bandwidth=memory_bandwidth,
        peak_flops=peaks,
        launch_latency=4.5e-6,
        num_units=num_units,
        source=source,
        sustained=sustained,
    )


def _tpu(
    name: str, memory: float, memory_bandwidth: float, half: float, eight_bit: float, source: str
) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        memory=memory,
        memory_bandwidth=memory_bandwidth,
        # float32 products run as bfloat16 passes: 3 at high precision, 6 at highest (`arithmetic`)
        peak_flops={
            "bfloat16": half,
            "float16": half,
            "float32": half / 6,
            "tensorfloat32": half / 3,
            "int8": eight_bit,
            "float64": half / 100,
        },
        launch_latency=1e-6,
        num_units=2,
        platform="tpu",
        source=source,
    )


_V100 = "NVIDIA V100 data sheet (SXM2), January 2020; no bfloat16 units: computed in float32"
_A100 = "NVIDIA A100 data sheet, June 2021, dense figures"
_HOPPER = (
    "NVIDIA {} data sheet (SXM), dense figures: half of those given with sparsity; sustained "
    "share: assumed, as power limits hold large matmuls further below the peak than on A100"
)

DEVICES: Mapping[str, DeviceSpec] = {
    device.name: device
    for device in (
        _gpu("v100-16gb", 16 * _GIB, 900e9, 125e12, 15.7e12, 80, _V100, bfloat16=15.7e12,
             double=7.8e12),
        _gpu("v100-32gb", 32 * _GIB, 900e9, 125e12, 15.7e12, 80, _V100, bfloat16=15.7e12,
             double=7.8e12),
        _gpu("a100-40gb", 40 * _GIB, 1555e9, 312e12, 19.5e12, 108, _A100, tensor_float=156e12,
             eight_bit=624e12, double=19.5e12),
        _gpu("a100-80gb", 80 * _GIB, 2039e9, 312e12, 19.5e12, 108, _A100, tensor_float=156e12,
             eight_bit=624e12, double=19.5e12),
        _gpu("h100", 80 * _GIB, 3350e9, 989.4e12, 66.9e12, 132, _HOPPER.format("H100"),
             tensor_float=494.7e12, eight_bit=1978.9e12, double=66.9e12, sustained=0.82),
        _gpu("h200", 141e9, 4800e9, 989.4e12, 66.9e12, 132, _HOPPER.format("H200"),
             tensor_float=494.7e12, eight_bit=1978.9e12, double=66.9e12, sustained=0.82),
        _gpu("h800", 80 * _GIB, 3350e9, 989.4e12, 66.9e12, 132,
             _HOPPER.format("H800") + "; H100 with cut NVLink and float64",
             tensor_float=494.7e12, eight_bit=1978.9e12, double=1e12, sustained=0.82),
        _gpu("b200", 180e9, 7700e9, 2250e12, 75e12, 148, _HOPPER.format("HGX B200"),
             tensor_float=1125e12, eight_bit=4500e12, four_bit=9000e12, double=37e12,
             sustained=0.82),
        _gpu("b300", 270e9, 7700e9, 2250e12, 72e12, 148, _HOPPER.format("HGX B300"),
             tensor_float=1125e12, eight_bit=4500e12, four_bit=13500e12, sustained=0.82),
        _gpu("gb200", 186e9, 8000e9, 2500e12, 80e12, 148, _HOPPER.format("GB200 NVL72"),
             tensor_float=1250e12, eight_bit=5000e12, four_bit=10000e12, double=40e12,
             sustained=0.82),
        _gpu("gb300", 279e9, 8000e9, 2500e12, 80e12, 148, _HOPPER.format("GB300 NVL72"),
             tensor_float=1250e12, eight_bit=5000e12, four_bit=15000e12, sustained=0.82),
        _gpu("gh200", 96e9, 4000e9, 989.4e12, 66.9e12, 132, _HOPPER.format("GH200, 96 GB"),
             tensor_float=494.7e12, eight_bit=1978.9e12, double=66.9e12, sustained=0.82),
        _gpu("rtx-3090", 24e9, 936e9, 71e12, 35.6e12, 82,
             "NVIDIA GA102 white paper, GeForce RTX 3090, float32 accumulation, dense figures",
             tensor_float=35.6e12, eight_bit=284e12),
        _gpu("rtx-2080ti", 11e9, 616e9, 53.8e12, 13.4e12, 68,
             "NVIDIA TU102 white paper, GeForce RTX 2080 Ti, float32 accumulation; no bfloat16 "
             "units", bfloat16=13.4e12, eight_bit=215e12),
        _gpu("l4", 24e9, 300e9, 121e12, 30.3e12, 58,
             "NVIDIA L4 data sheet, dense figures: half of those given with sparsity",
             tensor_float=60e12, eight_bit=242.5e12),
        _gpu("rtx-titan", 24e9, 672e9, 130.5e12, 16.3e12, 72,
             "NVIDIA TITAN RTX data sheet; no bfloat16 units: computed in float32",
             bfloat16=16.3e12, eight_bit=261e12),
        _tpu("tpu-v3", 32 * _GIB, 900e9, 123e12, 123e12,
             "Google Cloud TPU v3 documentation, per chip of two cores"),
        _tpu("tpu-v4", 32 * _GIB, 1228e9, 275e12, 275e12,
             "Google Cloud TPU v4 documentation, per chip"),
        _tpu("tpu-v5e", 16 * _GIB, 819e9, 197e12, 394e12,
             "Google Cloud TPU v5e documentation, per chip"),
        _tpu("tpu-v5p", 95 * _GIB, 2765e9, 459e12, 918e12,
             "Google Cloud TPU v5p documentation, per chip"),
    )
}  # fmt: skip


def _link(name: str, bandwidth: float, latency: float, source: str, efficiency: float) -> LinkSpec:
    return LinkSpec(
        name=name, bandwidth=bandwidth, latency=latency, source=source, efficiency=efficiency
    )


LINKS: Mapping[str, LinkSpec] = {
    link.name: link
    for link in (
        _link("nvlink2", 150e9, 3.4e-6, f"V100 data sheet; {_NCCL}; {_BUS}", 0.82),
        _link("nvlink2-32gb", 150e9, 3.4e-6, f"V100 data sheet; {_NCCL}; {_BUS}", 0.82),
        _link("nvlink3", 300e9, 3.4e-6, f"A100 data sheet; {_NCCL}; {_BUS}", 0.77),
        _link("nvlink4", 450e9, 3.4e-6, f"H100 data sheet; {_NCCL}; {_LIKE}", 0.80),
        _link("nvlink-h800", 200e9, 3.4e-6, f"H800: 400 GB/s both ways; {_NCCL}; {_LIKE}", 0.80),
        _link("nvlink5", 900e9, 3.4e-6, f"B200 data sheet; {_NCCL}; {_LIKE}", 0.80),
        _link("nvlink-gh200", 450e9, 3.4e-6,
              f"GH200: NVLink 4, 150 GB/s to each of 3 others; {_NCCL}; {_LIKE}", 0.80),
        _link("slingshot-200", 25e9, 1.4e-5, f"HPE Slingshot 11, 200 Gbit/s a GPU; {_NET}", 0.85),
        _link("pcie3", 15.75e9, 5.7e-6, f"PCIe 3.0 x16; {_NCCL}; {_SOME}", 0.70),
        _link("pcie4", 31.5e9, 5.7e-6, f"PCIe 4.0 x16; {_NCCL}; {_SOME}", 0.75),
        _link("pcie5", 63e9, 5.7e-6, f"PCIe 5.0 x16; {_NCCL}; {_SOME}", 0.80),
        _link("ethernet-25", 3.125e9, 3e-5, f"Amazon EC2 p3.16xlarge: 25 Gbit/s; {_NET}", 0.85),
        _link("ethernet-10", 1.25e9, 3e-5, f"Amazon EC2 p3.8xlarge: 10 Gbit/s; {_NET}", 0.85),
        _link("ethernet-100", 12.5e9, 2e-5, f"100 Gbit/s Ethernet; {_NET}", 0.85),
        _link("efa-100", 12.5e9, 2e-5, f"Amazon EC2 p4d: 4 x 100 Gbit/s EFA; {_NET}", 0.85),
        _link("efa-400", 50e9, 2e-5, f"Amazon EC2 p5: 3200 Gbit/s EFA, 400 a GPU; {_NET}", 0.85),
        _link("infiniband-100", 12.5e9, 1.4e-5, f"EDR InfiniBand; {_NCCL}; {_SOME}", 0.85),
        _link("infiniband-200", 25e9, 1.4e-5, f"HDR InfiniBand; {_NCCL}; {_SOME}", 0.85),
        _link("infiniband-400", 50e9, 1.4e-5, f"NDR InfiniBand; {_NCCL}; {_SOME}", 0.85),
        _link("roce-100", 12.5e9, 1.4e-5, f"100 Gbit/s RoCE; {_NCCL}; {_SOME}", 0.85),
        # TPU links: per chip and direction, over all torus links that one axis can use (two)
        _link("ici-v3", 140e9, 1e-6, f"TPU v3: 2 of 4 links of 70 GB/s; {_NET}", 0.85),
        _link("ici-v4", 90e9, 1e-6, f"TPU v4: 2 links of 45 GB/s; {_NET}", 0.90),
        _link("ici-v5e", 90e9, 1e-6, f"TPU v5e: 2 links of 45 GB/s; {_NET}", 0.90),
        _link("ici-v5p", 200e9, 1e-6, f"TPU v5p: 2 of 6 links of 100 GB/s; {_NET}", 0.90),
    )
}  # fmt: skip


def _host(
    device: str, count: int, intra: str, inter: str, num_nics: int, rail: bool, host_link: str
) -> HostGroup:
    return HostGroup(
        device=DEVICES[device],
        num_hosts=1,
        devices_per_host=count,
        intra_host=LINKS[intra],
        inter_host=LINKS[inter],
        num_nics=num_nics,
        rail=rail,
        host_link=LINKS[host_link],
    )


_P3 = _host("v100-16gb", 8, "nvlink2", "ethernet-25", 1, False, "pcie3")
_DGX_A100 = _host("a100-80gb", 8, "nvlink3", "infiniband-200", 8, True, "pcie4")
_DGX_H100 = _host("h100", 8, "nvlink4", "infiniband-400", 8, True, "pcie5")

HOSTS: Mapping[str, HostGroup] = {
    "p3.16xlarge": _P3,
    "p3.8xlarge": evolve(_P3, devices_per_host=4, inter_host=LINKS["ethernet-10"]),
    "p3dn.24xlarge": _host("v100-32gb", 8, "nvlink2-32gb", "ethernet-100", 1, False, "pcie3"),
    "v100-16gb": _host("v100-16gb", 8, "nvlink2", "infiniband-100", 4, False, "pcie3"),
    "v100-32gb": _host("v100-32gb", 8, "nvlink2-32gb", "infiniband-100", 4, False, "pcie3"),
    "dgx-1": _host("v100-32gb", 8, "nvlink2-32gb", "infiniband-100", 4, False, "pcie3"),
    "dgx-2": _host("v100-32gb", 16, "nvlink2-32gb", "infiniband-100", 8, False, "pcie3"),
    "a100-40gb": _host("a100-40gb", 8, "nvlink3", "infiniband-200", 8, True, "pcie4"),
    "a100-80gb": _DGX_A100,
    "dgx-a100-40gb": _host("a100-40gb", 8, "nvlink3", "infiniband-200", 8, True, "pcie4"),
    "dgx-a100-80gb": _DGX_A100,
    "selene": _DGX_A100,
    "p4d.24xlarge": _host("a100-40gb", 8, "nvlink3", "efa-100", 4, True, "pcie4"),
    "h100": _DGX_H100,
    "dgx-h100": _DGX_H100,
    "p5.48xlarge": _host("h100", 8, "nvlink4", "efa-400", 8, True, "pcie5"),
    "h200": _host("h200", 8, "nvlink4", "infiniband-400", 8, True, "pcie5"),
    "b200": _host("b200", 8, "nvlink5", "infiniband-400", 8, True, "pcie5"),
    "b300": _host("b300", 8, "nvlink5", "infiniband-400", 8, True, "pcie5"),
    # one NVLink domain of 72 counts as a host: its devices reach each other at NVLink speed
    "gb200": _host("gb200", 72, "nvlink5", "infiniband-400", 72, True, "pcie5"),
    "gb300": _host("gb300", 72, "nvlink5", "infiniband-400", 72, True, "pcie5"),
    "gh200": _host("gh200", 4, "nvlink-gh200", "slingshot-200", 4, True, "pcie5"),
    "rtx-3090": _host("rtx-3090", 8, "pcie3", "ethernet-10", 1, False, "pcie3"),
    "rtx-2080ti": _host("rtx-2080ti", 8, "pcie3", "ethernet-10", 1, False, "pcie3"),
    "h800": _host("h800", 8, "nvlink-h800", "roce-100", 8, True, "pcie5"),
    "l4": _host("l4", 8, "pcie4", "ethernet-100", 1, False, "pcie4"),
    "rtx-titan": _host("rtx-titan", 8, "pcie3", "infiniband-100", 1, False, "pcie3"),
    "tpu-v3": _host("tpu-v3", 4, "ici-v3", "ici-v3", 4, True, "pcie3"),
    "tpu-v4": _host("tpu-v4", 4, "ici-v4", "ici-v4", 4, True, "pcie3"),
    "tpu-v5e": _host("tpu-v5e", 8, "ici-v5e", "ici-v5e", 8, True, "pcie4"),
    "tpu-v5p": _host("tpu-v5p", 4, "ici-v5p", "ici-v5p", 4, True, "pcie4"),
}

_KINDS = (
    (r"a100.*80gb", "a100-80gb"),
    (r"a100", "a100-40gb"),
    (r"v100.*32gb", "v100-32gb"),
    (r"v100", "v100-16gb"),
    (r"(gh200|gb300|gb200|b300|b200|h800|h200|h100|l4)", r"\1"),
    (r"rtx 3090", "rtx-3090"),
    (r"rtx 2080 ti", "rtx-2080ti"),
    (r"titan rtx", "rtx-titan"),
    (r"tpu v5 ?(lite|e)", "tpu-v5e"),
    (r"tpu v5p?", "tpu-v5p"),
    (r"tpu (v3|v4)", r"tpu-\1"),
)


def catalogue_device(kind: str) -> DeviceSpec | None:
    """Return the device of a kind as jax names it ("NVIDIA A100-SXM4-40GB"), None if unknown.

    A cluster of that device has the device's name: "a100-40gb:8".
    """
    for pattern, name in _KINDS:
        found = re.search(rf"\b{pattern}\b", kind.lower())
        if found is not None:
            return DEVICES[found.expand(name)]
    return None

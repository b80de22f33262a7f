"""This machine as a cluster of XLA host devices that share its cores."""

from __future__ import annotations

import datetime
import os
import platform
import time

import numpy as np
from attrs import evolve

from alpa_interchange.cluster import DeviceSpec, HostGroup, LinkSpec
from cost_model.kernel import KernelEfficiency
from cost_model.profile import Profile, Sample, store_profile, stored_profile

HOST_PROFILE = "host"
_QUICK_DRIVER = "numpy "


def host_profile(*, measure: bool = True) -> Profile:
    """Return the profile of this machine: the stored one, else a quick measurement, stored.

    The quick measurement takes well under a second (one matmul and one copy); `alpa calibrate`
    replaces it by a thorough one. With `measure=False` nothing is measured or written, and a
    machine without a stored profile gets documented defaults. What a quick measurement did not
    measure is as this version assumes it, not as the version that stored it did.
    """
    stored = stored_profile(HOST_PROFILE)
    if stored is not None:
        return _updated(stored) if stored.driver.startswith(_QUICK_DRIVER) else stored
    if not measure:
        return default_host_profile()
    profile = quick_host_profile()
    try:
        store_profile(profile)
    except OSError:  # a read-only home: the next process measures again
        return profile
    return profile


def default_host_profile() -> Profile:
    """Return round figures of a small CPU host: 20 Gflop/s a core in float32, 10 GB/s of copies."""
    cores = os.cpu_count() or 1
    return _profile(20e9 * cores, 10e9, "defaults of the package, not measured", ())


def quick_host_profile() -> Profile:
    """Return a profile from one matmul and one copy on this machine, in well under a second."""
    matrix = np.ones((1024, 1024), np.float32)
    result = np.empty_like(matrix)
    np.matmul(matrix[:256], matrix, out=result[:256])
    matmul = min(_seconds(lambda: np.matmul(matrix, matrix, out=result)) for _ in range(3))
    source, target = np.ones(1 << 22, np.float32), np.empty(1 << 22, np.float32)
    np.copyto(target, source)
    copy = min(_seconds(lambda: np.copyto(target, source)) for _ in range(3))
    samples = (
        Sample(name="matmul", seconds=matmul, dtype="float32", shape=(1024, 1024, 1024),
               flops=2.0 * 1024**3, bytes=12.0 * 1024**2),
        Sample(name="elementwise", seconds=copy, dtype="float32", shape=(1 << 22,),
               bytes=2.0 * source.nbytes),
    )  # fmt: skip
    return _quick_profile(samples)


def _quick_profile(samples: tuple[Sample, Sample]) -> Profile:
    matmul, copy = samples
    flops, bandwidth = matmul.flops / matmul.seconds, copy.bytes / copy.seconds
    return _profile(flops, bandwidth, "measured with numpy", samples)


def _updated(quick: Profile) -> Profile:
    """Return a stored quick profile with the assumptions of this version around its samples."""
    if [sample.name for sample in quick.samples] != ["matmul", "elementwise"]:
        return quick
    matmul, copy = quick.samples
    return evolve(_quick_profile((matmul, copy)), date=quick.date, driver=quick.driver)


def host_group(profile: Profile, num_devices: int) -> HostGroup:
    """Return one host of `num_devices` XLA host devices that share the cores of `profile`.

    They also share the memory bus, so each gets its part of the bandwidth between devices.
    """
    return HostGroup(
        device=profile.device,
        num_hosts=1,
        devices_per_host=num_devices,
        intra_host=evolve(profile.intra_host, bandwidth=profile.intra_host.bandwidth / num_devices),
        inter_host=LinkSpec(
            name="loopback",
            bandwidth=profile.intra_host.bandwidth,
            latency=1e-4,
            source="sockets on the same machine",
            efficiency=0.5,
        ),
        shared_compute=True,
    )


def _profile(
    flops: float, copy_bandwidth: float, source: str, samples: tuple[Sample, ...]
) -> Profile:
    return Profile(
        name=HOST_PROFILE,
        date=datetime.date.today().isoformat(),
        driver=f"{_QUICK_DRIVER}{np.__version__}, {platform.machine()}",
        device=DeviceSpec(
            name="cpu",
            memory=host_memory() * 0.8,
            memory_bandwidth=copy_bandwidth,
            # XLA's CPU backend computes 16-bit floats through float32 with conversions around
            peak_flops={"float32": flops, "float64": flops / 2, "bfloat16": flops / 2,
                        "float16": flops / 4},
            launch_latency=2e-5,
            platform="cpu",
            source=source,
        ),
        devices_per_host=1,
        intra_host=LinkSpec(
            name="memory",
            # a byte that changes device is read and written once; all devices share the bus
            bandwidth=copy_bandwidth / 2,
            # per device that meets: 50 to 60, 75 to 125 and 125 to 190 us for 2, 4 and 8 devices in
            # chains of 20 collectives of 1 KiB (all-reduce, all-gather, reduce-scatter), 115 to 280
            # us for 8 between other work; jax 0.10.2, 2 cores; `alpa calibrate` measures it
            latency=2.5e-5,
            source=source,
        ),
        efficiency=KernelEfficiency(
            compute={"matmul": 0.9, "convolution": 0.5, "attention": 0.6},
            half_bytes=1e5,
            half_depth=8.0,
            tile=(1, 1),
            source=source,
        ),
        shared_compute=True,
        samples=samples,
    )  # fmt: skip


def _seconds(action: object) -> float:
    start = time.perf_counter()
    action()  # type: ignore[operator]
    return time.perf_counter() - start


def host_memory() -> float:
    """Return the bytes of memory of this machine."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError, AttributeError):
        return 8e9

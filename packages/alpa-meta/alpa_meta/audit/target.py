"""Compiles for GPUs that are not there, to audit the real GPU program on a machine without any.

XLA's CUDA compiler needs no device: it takes a description of one. The descriptions below are
written from NVIDIA's A100 and H100 architecture white papers and the compute-capability tables of
the CUDA C++ programming guide. The compiler itself comes with the stock plugin wheels (extra
`alpa-meta[audit-gpu]`), which need neither a GPU nor a driver to compile.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from types import MappingProxyType
from typing import cast

import jax
import numpy as np
from attrs import frozen
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from alpa_meta.errors import PlanError
from alpa_meta.types import Function, PyTree

XlaOption = str | bool | int

COMPILER_OPTIONS: Mapping[str, Mapping[str, XlaOption]] = MappingProxyType(
    {
        "cpu": {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False},
        "gpu": {"xla_gpu_autotune_level": 0},
    }
)
"""Per platform, those that make audits cheap. CPU code is only run to compare results, and its
collectives are fixed before code is generated; without the fusion emitters, which newer XLA no
longer lets one turn off, code is generated about six times as fast. Autotuning on GPUs would
measure kernels on a device."""

CUBLAS = MappingProxyType({"xla_gpu_enable_triton_gemm": False})
"""Options for GPU programs with matrix products that XLA finds no tiles for where it cannot
autotune, as XLA of jax 0.10.2 with f32[1576, 768]: all are left to cuBLAS."""

NO_TILES = "Couldn't find output tile sizes"
"""What XLA says of such a program."""

SOUND = MappingProxyType({"xla_backend_optimization_level": 0})
"""Options under which a difference in results counts: without the fusion emitters, XLA of jax
0.10.2 was seen to generate wrong code for one program of 2529 collectives, which is right with
them."""


@functools.cache
def compiler_options(platform: str) -> Mapping[str, XlaOption]:
    """Return the options of `COMPILER_OPTIONS` for "cpu" or "gpu" that this XLA knows.

    CPU options are tried on an empty program; the others are of every supported version.
    """
    options = COMPILER_OPTIONS[platform]
    if platform != "cpu":
        return options
    device = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    empty = jax.jit(lambda: 0, out_shardings=device).lower()
    known = {}
    for name, value in options.items():
        try:
            empty.compile(compiler_options=_typed({name: value}))
        except jax.errors.JaxRuntimeError:
            continue
        known[name] = value
    return MappingProxyType(known)


def _typed(options: Mapping[str, XlaOption]) -> dict[str, str | bool]:
    """Return options as jax types them, which leaves out the numbers that XLA takes."""
    return cast(dict[str, str | bool], dict(options))


@frozen(kw_only=True)
class GpuTarget:
    """A GPU as XLA's compiler sees it; bytes, bytes/s and GHz."""

    name: str
    compute_capability: tuple[int, int]
    num_cores: int
    fpus_per_core: int
    clock_ghz: float
    memory_bytes: int
    memory_bandwidth: int
    l2_bytes: int
    shared_memory_per_core: int
    shared_memory_per_block: int
    devices_per_host: int = 8

    def text_proto(self) -> str:
        """Return XLA's `GpuTargetConfigProto` as text."""
        major, minor = self.compute_capability
        return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {self.num_cores}
  fpus_per_core: {self.fpus_per_core}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes}
  memory_bandwidth: {self.memory_bandwidth}
  l2_cache_size: {self.l2_bytes}
  shared_memory_per_core: {self.shared_memory_per_core}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {self.shared_memory_per_block}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{self.name}"
"""


TARGETS: Mapping[str, GpuTarget] = MappingProxyType(
    {
        "a100-80gb": GpuTarget(
            name="NVIDIA A100-SXM4-80GB",
            compute_capability=(8, 0),
            num_cores=108,
            fpus_per_core=64,
            clock_ghz=1.41,
            memory_bytes=80 * 2**30,
            memory_bandwidth=2_039_000_000_000,
            l2_bytes=40 * 2**20,
            shared_memory_per_core=164 * 2**10,
            shared_memory_per_block=163 * 2**10,
        ),
        "h100": GpuTarget(
            name="NVIDIA H100 80GB HBM3",
            compute_capability=(9, 0),
            num_cores=132,
            fpus_per_core=128,
            clock_ghz=1.98,
            memory_bytes=80 * 2**30,
            memory_bandwidth=3_352_000_000_000,
            l2_bytes=50 * 2**20,
            shared_memory_per_core=228 * 2**10,
            shared_memory_per_block=227 * 2**10,
        ),
    }
)
"""GPUs that can be compiled for, by the names of the cluster presets."""


def parse_target(text: str) -> tuple[GpuTarget, int]:
    """Return the GPU and the number of devices that "h100:8" names; "a100" is the one of 80 GB."""
    name, _, number = text.partition(":")
    found = [one for one in TARGETS if name.lower() in (one, one.partition("-")[0])]
    if not found:
        raise PlanError(
            f"--target must name one of {', '.join(TARGETS)} and a number of devices, "
            f"such as h100:8, got {text!r}"
        )
    target = TARGETS[found[0]]
    if not number.isdecimal() or int(number) < 1:
        raise PlanError(
            f"--target {name} needs a number of devices, such as {name}:8, got {text!r}"
        )
    count = int(number)
    if count > target.devices_per_host and count % target.devices_per_host:
        raise PlanError(
            f"--target {text}: more than one host must be whole hosts of "
            f"{target.devices_per_host} devices, got {count}; ask for a multiple of "
            f"{target.devices_per_host}"
        )
    return target, count


def target_devices(target: GpuTarget, num_devices: int) -> Sequence[jax.Device]:
    """Return descriptions of `num_devices` GPUs that programs can be compiled for."""
    if find_spec("jax_cuda12_plugin") is None or find_spec("jax_plugins.xla_cuda12") is None:
        raise PlanError(
            "auditing for a GPU needs XLA's CUDA compiler, which is not installed; "
            "run: pip install 'alpa-meta[audit-gpu]' (about 500 MB; no GPU or driver needed)"
        )
    hosts = max(num_devices // target.devices_per_host, 1)
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            target_config=target.text_proto(),
            topology=f"1x{hosts}x{num_devices // hosts}",
        )
    except RuntimeError as error:
        raise PlanError(
            f"the installed CUDA plugin cannot describe {num_devices} x {target.name}: {error}; "
            f"its version must be that of jax, {jax.__version__}"
        ) from error
    return tuple(topology.devices)


def compile_for(
    devices: Sequence[jax.Device],
    axis_sizes: Mapping[str, int],
    function: Function[PyTree],
    shapes: Sequence[jax.ShapeDtypeStruct],
    specs: Sequence[PartitionSpec],
    donate: Sequence[int] = (),
    options: Mapping[str, XlaOption] | None = None,
) -> jax.stages.Compiled:
    """Return `function` compiled for a mesh of `devices`, its flat arguments sharded by `specs`.

    `options` are XLA's, by default the cheapest (`compiler_options`).
    """
    mesh = Mesh(
        np.array(devices).reshape(tuple(axis_sizes.values())),
        tuple(axis_sizes),
        axis_types=(AxisType.Auto,) * len(axis_sizes),
    )
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    jitted = jax.jit(function, in_shardings=shardings, donate_argnums=tuple(donate))
    chosen = compiler_options(devices[0].platform) if options is None else options
    return jitted.lower(*shapes).compile(compiler_options=_typed(chosen))

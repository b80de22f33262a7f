"""Layouts, tensors and networks in a line of text, as the command line takes them.

2x4:S0,R        2 hosts x 4 devices, dim 0 cut over hosts, dim 1 whole (arXiv 2211.05322)
2x4:S0,R+device dim 0 cut over hosts, of which each device holds a summand (unreduced)
3x8@2:S10,R     hosts 2, 3 and 4; dim 0 cut over devices, then over hosts
int32[1024,512]
nic=1.25e9,device=25e9,latency=1e-5,nics=2
"""

from __future__ import annotations

import re
from typing import Any

from alpa_interchange.reshard import PlacedTensor
from alpa_interchange.tensor import ShardingSpec, TensorType, dtype_bytes
from resharding.network import Network

AXES: dict[str, tuple[str, ...]] = {
    "R": (),
    "S0": ("host",),
    "S1": ("device",),
    "S01": ("host", "device"),
    "S10": ("device", "host"),
}
DEVICES_PER_HOST = 100  # device k of host h has the number 100 h + k
_MOST_DEVICES = 1 << 14  # more than any job had; a plan names each, and a typing error costs GBs
_MOST_ELEMENTS = 1 << 50  # borders of parts are found in double precision
_NETWORK = {
    "nic": "nic_bandwidth",
    "device": "device_bandwidth",
    "nics": "num_nics",
    "latency": "latency",
}


def place(
    spec: ShardingSpec, num_hosts: int, devices_per_host: int, first_host: int = 0
) -> PlacedTensor:
    """Return `spec` on a (host, device) mesh; device numbers are 100 per host."""
    hosts = [first_host + k // devices_per_host for k in range(num_hosts * devices_per_host)]
    return PlacedTensor(
        spec=spec,
        axis_names=("host", "device"),
        mesh_shape=(num_hosts, devices_per_host),
        devices=tuple(
            DEVICES_PER_HOST * host + k % devices_per_host for k, host in enumerate(hosts)
        ),
        hosts=tuple(hosts),
    )


def parse_spec(text: str) -> ShardingSpec:
    """Return the spec of "S0,R": an entry per dim, none for a scalar."""
    text, *partial = (part.strip() for part in text.split("+"))
    parts = [part for part in re.split(r"[,\s]+", text) if part]
    unknown = [part for part in parts if part not in AXES]
    if unknown:
        raise ValueError(
            f"a layout has one of {', '.join(AXES)} per dim, got {unknown[0]!r} in {text!r}"
        )
    if not set(partial) <= {"host", "device"}:
        raise ValueError(f"a layout is unreduced over +host or +device, got {partial}")
    return ShardingSpec(tuple(AXES[part] for part in parts), tuple(partial))


def parse_placed(text: str, first_host: int = 0) -> PlacedTensor:
    """Return the layout of "2x4:S0,R" or "2x4@HOST:S0,R"; `first_host` where no host is named."""
    match = re.fullmatch(r"\s*(\d+)x(\d+)(?:@(\d+))?:(.*)", text)
    if match is None:
        raise ValueError(
            f"a layout must look like 2x4:S0,R (hosts x devices, then an entry per dim), got "
            f"{text!r}"
        )
    hosts, devices = int(match[1]), int(match[2])
    if not (hosts and 0 < devices <= DEVICES_PER_HOST):
        raise ValueError(
            f"a mesh has at least one host and 1 to {DEVICES_PER_HOST} devices on each, got "
            f"{hosts}x{devices} in {text!r}"
        )
    if hosts * devices > _MOST_DEVICES:
        raise ValueError(
            f"a mesh has at most {_MOST_DEVICES} devices, got {hosts * devices} in {text!r}"
        )
    first = first_host if match[3] is None else int(match[3])
    return place(parse_spec(match[4]), hosts, devices, first)


def parse_tensor(text: str) -> TensorType:
    """Return the type of "float32[1024,512]"; "float32[]" is a scalar."""
    match = re.fullmatch(r"\s*(\w+)\[\s*((?:\d+\s*(?:,\s*\d+\s*)*,?)?)\s*\]\s*", text)
    if match is None:
        raise ValueError(f"a tensor must look like float32[1024,512], got {text!r}")
    dtype_bytes(match[1])  # refuses a dtype of no known size
    made = TensorType(tuple(int(part) for part in match[2].split(",") if part.strip()), match[1])
    if made.size > _MOST_ELEMENTS:
        raise ValueError(f"a tensor has at most 2**50 elements, got {made.size} in {text!r}")
    return made


def parse_network(text: str, issue: str) -> Network:
    """Return the network of "nic=1.25e9,device=25e9,latency=1e-5,nics=2", in bytes/s and s."""
    values: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name.strip() not in _NETWORK:
            raise ValueError(f"a network has {', '.join(_NETWORK)}, got {part.strip()!r}")
        if _NETWORK[name.strip()] in values:
            raise ValueError(f"a network names {name.strip()} once, got {text!r}")
        try:
            values[_NETWORK[name.strip()]] = float(value)
        except ValueError:
            raise ValueError(f"{name.strip()} of a network is a number, got {value!r}") from None
    if "num_nics" in values:
        if not values["num_nics"].is_integer():
            raise ValueError(f"nics of a network is a whole number, got {values['num_nics']}")
        values["num_nics"] = int(values["num_nics"])
    return Network(issue=issue, **values)

"""Plans, simulates and executes the move of a sharded tensor from one device mesh to another.

`plan` is the main verb; `simulate` is the referee; `HostExecutor` carries a plan out on numpy
shards, `HostTransport` between processes. `reshard` (extra `jax`, imported when it is first used)
moves jax arrays of one process, `resharding.nccl_transport` (extra `nccl`) GPU memory between
processes.
"""

from typing import TYPE_CHECKING, Any

from resharding.bound import lower_bound
from resharding.coverage import PlanError, check_plan
from resharding.host_executor import HostExecutor
from resharding.host_transport import HostTransport
from resharding.network import HostLinks, Network
from resharding.planner import PlanOptions, plan
from resharding.simulator import Simulation, simulate
from resharding.slices import Box, Slice, cut_slices, device_tiles
from resharding.socket_link import new_token
from resharding.transport import Transport, TransportError

if TYPE_CHECKING:
    from resharding.jax_executor import reshard as reshard

__all__ = [
    "Box",
    "HostExecutor",
    "HostLinks",
    "HostTransport",
    "Network",
    "PlanError",
    "PlanOptions",
    "Simulation",
    "Slice",
    "Transport",
    "TransportError",
    "check_plan",
    "cut_slices",
    "device_tiles",
    "lower_bound",
    "new_token",
    "plan",
    "simulate",
]


def __getattr__(name: str) -> Any:
    """Return `reshard`, which is not in `__all__`: all else works without jax."""
    if name == "reshard":
        from resharding.jax_executor import reshard

        return reshard
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

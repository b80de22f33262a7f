"""Plans, simulates and executes the move of a sharded tensor from one device mesh to another.

`plan` is the main verb; `simulate` is the referee; `HostExecutor` carries a plan out on numpy
shards, `HostTransport` between processes. `reshard` (extra `jax`, imported when it is first used)
moves jax arrays of one process, `resharding.nccl_transport` (extra `nccl`) GPU memory between
processes.
"""

from resharding.arrays import reshard
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
    "reshard",
    "simulate",
]

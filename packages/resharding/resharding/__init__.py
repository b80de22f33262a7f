"""Plans, simulates and executes the move of a sharded tensor from one device mesh to another.

`plan` is the main verb; `simulate` is the referee; `HostExecutor` carries a plan out on numpy
shards, `RankExecutor` one device's part of it over a communicator. `resharding.jax_executor`
(extra `jax`) moves jax arrays of one process, `resharding.nccl` (extra `nccl`) GPU memory between
processes.
"""

from resharding.bound import lower_bound
from resharding.communicator import Communicator
from resharding.coverage import PlanError, check_plan
from resharding.host_executor import HostExecutor
from resharding.host_transport import HostTransport
from resharding.loopback import CommunicationError, LoopbackCommunicator, LoopbackWorld
from resharding.network import HostLinks, Network
from resharding.planner import PlanOptions, plan
from resharding.rank_executor import RankExecutor
from resharding.simulator import Simulation, simulate
from resharding.slices import Box, Slice, cut_slices, device_tiles
from resharding.socket_link import new_token
from resharding.transport import Transport, TransportError

__all__ = [
    "Box",
    "CommunicationError",
    "Communicator",
    "HostExecutor",
    "HostLinks",
    "HostTransport",
    "LoopbackCommunicator",
    "LoopbackWorld",
    "Network",
    "PlanError",
    "PlanOptions",
    "RankExecutor",
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

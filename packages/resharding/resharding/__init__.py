"""Plans, simulates and executes the move of a sharded tensor from one device mesh to another.

`plan` is the main verb; `simulate` is the referee, `HostExecutor` carries a plan out on numpy shards.
`resharding.jax_executor` (extra `jax`) moves jax arrays of one process, `resharding.nccl` (extra
`nccl`) moves device memory between processes. The planner itself needs neither.
"""

from resharding.bound import lower_bound
from resharding.coverage import PlanError, check_plan
from resharding.network import Network
from resharding.planner import PlanOptions, plan
from resharding.simulator import Simulation, simulate
from resharding.slices import Box, Slice, cut_slices, device_tiles

__all__ = [
    "Box",
    "Network",
    "PlanError",
    "PlanOptions",
    "Simulation",
    "Slice",
    "check_plan",
    "cut_slices",
    "device_tiles",
    "lower_bound",
    "plan",
    "simulate",
]

"""Pipeline stages: layer clustering, stage construction, schedules and instruction emission."""

from stage_dp.device_pool import place
from stage_dp.emission import emit, instruction_lists
from stage_dp.fixed_stages import Known
from stage_dp.infeasibility import BoundError, InfeasibleError, check_bound
from stage_dp.joint_interleaved import CHUNKS
from stage_dp.joint_search import bound_joint, microbatch_counts, solve_joint
from stage_dp.layer_clustering import (
    Clustering,
    OpSequence,
    cluster_layers,
    live_bytes,
)
from stage_dp.mesh_memory import (
    Chunk,
    alive_together,
    bytes_together,
    chunks_of,
    device_bytes,
    with_device_bytes,
)
from stage_dp.pipeline_time import PipelineTime, pipeline_time
from stage_dp.schedules import (
    SCHEDULE_RULES,
    SCHEDULES,
    Schedule,
    ScheduleRule,
    Step,
    adaptive_warmups,
    default_warmups,
    order,
)
from stage_dp.stage_construction import (
    bound_in_slices,
    in_flight_counts,
    peak_bytes,
    schedule_of,
    solve_stages,
    step_seconds,
)
from stage_dp.stage_price import best_known, price_stages
from stage_dp.token_slicing import TokenPlan, TokenProblem, flow_seconds, slice_tokens
from stage_dp.torch_csv import torch_csv

__all__ = [
    "CHUNKS",
    "SCHEDULES",
    "SCHEDULE_RULES",
    "BoundError",
    "Chunk",
    "Clustering",
    "InfeasibleError",
    "Known",
    "OpSequence",
    "PipelineTime",
    "Schedule",
    "ScheduleRule",
    "Step",
    "TokenPlan",
    "TokenProblem",
    "adaptive_warmups",
    "alive_together",
    "best_known",
    "bound_in_slices",
    "bound_joint",
    "bytes_together",
    "check_bound",
    "chunks_of",
    "cluster_layers",
    "default_warmups",
    "device_bytes",
    "emit",
    "flow_seconds",
    "in_flight_counts",
    "instruction_lists",
    "live_bytes",
    "microbatch_counts",
    "order",
    "peak_bytes",
    "pipeline_time",
    "place",
    "price_stages",
    "schedule_of",
    "slice_tokens",
    "solve_joint",
    "solve_stages",
    "step_seconds",
    "torch_csv",
    "with_device_bytes",
]

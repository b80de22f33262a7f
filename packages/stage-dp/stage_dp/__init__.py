"""Pipeline stages: layer clustering, stage construction, schedules and instruction emission."""

from stage_dp.device_pool import place
from stage_dp.emission import emit
from stage_dp.infeasibility import InfeasibleError
from stage_dp.pipeline_time import PipelineTime, pipeline_time
from stage_dp.schedules import (
    SCHEDULES,
    Schedule,
    Step,
    adaptive_warmups,
    default_warmups,
    order,
)
from stage_dp.stage_construction import (
    in_flight_counts,
    peak_bytes,
    solve_stages,
    step_seconds,
)

__all__ = [
    "SCHEDULES",
    "InfeasibleError",
    "PipelineTime",
    "Schedule",
    "Step",
    "adaptive_warmups",
    "default_warmups",
    "emit",
    "in_flight_counts",
    "order",
    "peak_bytes",
    "pipeline_time",
    "place",
    "solve_stages",
    "step_seconds",
]

"""A planned jaxpr as one shard_map with explicit collectives, or under sharding constraints."""

from alpa_meta.spmd.bucketing import HOST_BUCKETS, BucketLimits
from alpa_meta.spmd.collectives import CollectiveLog, Collectives
from alpa_meta.spmd.completion import natural_result
from alpa_meta.spmd.constraint_program import completed_plan, constraint_program
from alpa_meta.spmd.evaluation import evaluate, run_local
from alpa_meta.spmd.plan import JaxprPlan, RegionPlan, stacked
from alpa_meta.spmd.program import (
    abstract_mesh,
    global_shape,
    jax_sharding,
    partition_spec,
    planned_collectives,
    shard_map_program,
)
from alpa_meta.spmd.random_plan import random_plan

__all__ = [
    "HOST_BUCKETS",
    "BucketLimits",
    "CollectiveLog",
    "Collectives",
    "JaxprPlan",
    "RegionPlan",
    "abstract_mesh",
    "completed_plan",
    "constraint_program",
    "evaluate",
    "global_shape",
    "jax_sharding",
    "natural_result",
    "partition_spec",
    "planned_collectives",
    "random_plan",
    "run_local",
    "shard_map_program",
    "stacked",
]

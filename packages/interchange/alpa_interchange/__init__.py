"""The typed schema that all packages of the system speak: frozen attrs classes and JSON
documents."""

from alpa_interchange.cluster import ClusterSpec, DeviceSpec, HostGroup, LinkSpec
from alpa_interchange.document import (
    SCHEMA_VERSION,
    DocumentError,
    from_json,
    load,
    save,
    to_json,
)
from alpa_interchange.kept_menu import (
    BoundaryLayout,
    BoundaryValue,
    KeptMenu,
    load_menu,
    menu_path,
    save_plan,
)
from alpa_interchange.layer import Layer
from alpa_interchange.mesh import DeviceMesh, LogicalMesh, MeshAxis, SubmeshSpec
from alpa_interchange.plan import (
    InputSummary,
    OperatorSharding,
    ParallelPlan,
    ProgramSummary,
    StageSharding,
)
from alpa_interchange.reshard import PlacedTensor, ReshardingPlan, ReshardingTask, Transfer
from alpa_interchange.rule import Factor, ShardingRule, Strategy
from alpa_interchange.schedule import Instruction, PipelineSchedule, TaskGraph, TaskSpec
from alpa_interchange.selection import ShardingProblem, ShardingSolution
from alpa_interchange.stage import (
    DeviceGroup,
    PlacedStage,
    StageCandidate,
    StagePlan,
    StageProblem,
    TokenSlice,
)
from alpa_interchange.tensor import ShardingSpec, TensorType, dtype_bytes

__all__ = [
    "SCHEMA_VERSION",
    "BoundaryLayout",
    "BoundaryValue",
    "ClusterSpec",
    "DeviceGroup",
    "DeviceMesh",
    "DeviceSpec",
    "DocumentError",
    "Factor",
    "HostGroup",
    "InputSummary",
    "Instruction",
    "KeptMenu",
    "Layer",
    "LinkSpec",
    "LogicalMesh",
    "MeshAxis",
    "OperatorSharding",
    "ParallelPlan",
    "PipelineSchedule",
    "PlacedStage",
    "PlacedTensor",
    "ProgramSummary",
    "ReshardingPlan",
    "ReshardingTask",
    "ShardingProblem",
    "ShardingRule",
    "ShardingSolution",
    "ShardingSpec",
    "StageCandidate",
    "StagePlan",
    "StageProblem",
    "StageSharding",
    "Strategy",
    "SubmeshSpec",
    "TaskGraph",
    "TaskSpec",
    "TensorType",
    "TokenSlice",
    "Transfer",
    "dtype_bytes",
    "from_json",
    "load",
    "load_menu",
    "menu_path",
    "save",
    "save_plan",
    "to_json",
]

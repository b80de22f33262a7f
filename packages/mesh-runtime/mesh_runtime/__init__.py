"""Device meshes and workers that run the static instruction lists of a pipeline schedule.

`InProcessRuntime` drives meshes of this process's devices; `RayRuntime` drives one worker process
per mesh host on a Ray cluster. Both follow the protocol `Runtime`: load, init, place, put, step,
fetch, close.
"""

from mesh_runtime.array_store import (
    ArrayReader,
    ArrayWriter,
    FileSums,
    Part,
    StoredArray,
    StoreError,
    chunk_shape,
    file_sums,
    tile_boxes,
)
from mesh_runtime.device_memory import memory_of
from mesh_runtime.exported import ExportedProgram
from mesh_runtime.host_batches import HostBatches, HostLeaf
from mesh_runtime.in_process import InProcessRuntime
from mesh_runtime.order import ScheduleError, ScheduleOrder, check_schedule, value_name
from mesh_runtime.pacing import Pace
from mesh_runtime.ray_checkpoints import restore_remote, save_remote
from mesh_runtime.ray_connection import check_reachable
from mesh_runtime.ray_options import RayOptions
from mesh_runtime.ray_placement import RayMesh
from mesh_runtime.ray_runtime import RayRuntime
from mesh_runtime.ray_workers import RayWorkers
from mesh_runtime.remote_array import Buffer, RemoteArray, StaleArrayError, fetched
from mesh_runtime.runtime import (
    Array,
    Executable,
    NoRoomError,
    Runtime,
    StepError,
    ValueShardings,
    WorkerError,
)
from mesh_runtime.trace import TRACE_MODES, TraceEvent

__all__ = [
    "TRACE_MODES",
    "Array",
    "ArrayReader",
    "ArrayWriter",
    "Buffer",
    "Executable",
    "ExportedProgram",
    "FileSums",
    "HostBatches",
    "HostLeaf",
    "InProcessRuntime",
    "NoRoomError",
    "Pace",
    "Part",
    "RayMesh",
    "RayOptions",
    "RayRuntime",
    "RayWorkers",
    "RemoteArray",
    "Runtime",
    "ScheduleError",
    "ScheduleOrder",
    "StaleArrayError",
    "StepError",
    "StoreError",
    "StoredArray",
    "TraceEvent",
    "ValueShardings",
    "WorkerError",
    "check_reachable",
    "check_schedule",
    "chunk_shape",
    "fetched",
    "file_sums",
    "memory_of",
    "restore_remote",
    "save_remote",
    "tile_boxes",
    "value_name",
]

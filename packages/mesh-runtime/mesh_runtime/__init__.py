"""Device meshes and workers that run the static instruction lists of a pipeline schedule.

`InProcessRuntime` drives meshes of this process's devices; `RayRuntime` drives one worker process
per mesh host on a Ray cluster. Both follow the protocol `Runtime`: load, init, place, put, step,
fetch, close.
"""

from mesh_runtime.exported import ExportedProgram
from mesh_runtime.in_process import InProcessRuntime
from mesh_runtime.order import ScheduleError, ScheduleOrder, check_schedule, value_name
from mesh_runtime.pacing import Pace
from mesh_runtime.ray_placement import RayMesh
from mesh_runtime.ray_runtime import RayRuntime
from mesh_runtime.ray_workers import RayOptions, RayWorkers
from mesh_runtime.remote_array import RemoteArray, StaleArrayError, fetched
from mesh_runtime.runtime import Array, Executable, Runtime, StepError, ValueShardings, WorkerError
from mesh_runtime.trace import TRACE_MODES, TraceEvent

__all__ = [
    "TRACE_MODES",
    "Array",
    "Executable",
    "ExportedProgram",
    "InProcessRuntime",
    "Pace",
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
    "TraceEvent",
    "ValueShardings",
    "WorkerError",
    "check_schedule",
    "fetched",
    "value_name",
]

"""Device meshes and workers that run the static instruction lists of a pipeline schedule.

`InProcessRuntime` drives meshes of this process's devices; `RayRuntime` drives one worker process
per mesh host on a Ray cluster. Both follow the protocol `Runtime`: load, put, step, fetch, close.
"""

from mesh_runtime.in_process import InProcessRuntime
from mesh_runtime.order import ScheduleError, ScheduleOrder, check_schedule, value_name
from mesh_runtime.pacing import Pace
from mesh_runtime.ray_runtime import RayMesh, RayOptions, RayRuntime
from mesh_runtime.runtime import Executable, Runtime, StepError, ValueShardings, WorkerError
from mesh_runtime.trace import TRACE_MODES, TraceEvent

__all__ = [
    "TRACE_MODES",
    "Executable",
    "InProcessRuntime",
    "Pace",
    "RayMesh",
    "RayOptions",
    "RayRuntime",
    "Runtime",
    "ScheduleError",
    "ScheduleOrder",
    "StepError",
    "TraceEvent",
    "ValueShardings",
    "WorkerError",
    "check_schedule",
    "value_name",
]

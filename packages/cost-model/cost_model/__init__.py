"""Predicts time, memory and communication of training steps on catalogued or calibrated hardware."""

from cost_model.cluster_name import cluster, cluster_names
from cost_model.collective import COLLECTIVE_BYTES
from cost_model.kernel import KERNEL_KINDS, KernelEfficiency
from cost_model.memory import MemoryBreakdown, breakdown, in_flight
from cost_model.model import CostModel
from cost_model.profile import Profile, Sample, store_profile, stored_profile
from cost_model.simulator import Simulation, Timeline, simulate
from cost_model.topology import logical_mesh
from cost_model.trace import trace_events, write_trace

__all__ = [
    "COLLECTIVE_BYTES",
    "KERNEL_KINDS",
    "CostModel",
    "KernelEfficiency",
    "MemoryBreakdown",
    "Profile",
    "Sample",
    "Simulation",
    "Timeline",
    "breakdown",
    "cluster",
    "cluster_names",
    "in_flight",
    "logical_mesh",
    "simulate",
    "store_profile",
    "stored_profile",
    "trace_events",
    "write_trace",
]

"""Predicts time, memory and communication of training on catalogued or calibrated hardware."""

from cost_model.arithmetic import product_arithmetic
from cost_model.calibration import calibrate
from cost_model.catalogue import catalogue_device
from cost_model.cluster_name import cluster, cluster_names
from cost_model.collective import COLLECTIVE_BYTES
from cost_model.kernel import KERNEL_KINDS, KernelEfficiency
from cost_model.measurer import JaxMeasurer, Measurer
from cost_model.memory import MemoryBreakdown, breakdown, in_flight
from cost_model.model import CostModel, calibrated_model
from cost_model.prediction import Prediction, predict
from cost_model.profile import Profile, Sample, cache_directory, store_profile, stored_profile
from cost_model.quantile import at_quantile
from cost_model.shared_processor import simulate_shared
from cost_model.simulator import Simulation, Timeline, simulate
from cost_model.topology import logical_mesh
from cost_model.training_run import TrainingRun
from cost_model.transformer import TransformerSpec

__all__ = [
    "COLLECTIVE_BYTES",
    "KERNEL_KINDS",
    "CostModel",
    "JaxMeasurer",
    "KernelEfficiency",
    "Measurer",
    "MemoryBreakdown",
    "Prediction",
    "Profile",
    "Sample",
    "Simulation",
    "Timeline",
    "TrainingRun",
    "TransformerSpec",
    "at_quantile",
    "breakdown",
    "cache_directory",
    "calibrate",
    "calibrated_model",
    "catalogue_device",
    "cluster",
    "cluster_names",
    "in_flight",
    "logical_mesh",
    "predict",
    "product_arithmetic",
    "simulate",
    "simulate_shared",
    "store_profile",
    "stored_profile",
]

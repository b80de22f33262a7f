"""Fits constants of kernels to measured layers (`layer_table`), where an executor was profiled.

`predict` looks such layers up, so that runs say nothing of these constants; what prices kernels one
by one (`program`) has no table to look into. Of the 15 runs of Sailor none is seen here.

Layers have 2,048 tokens, as Sailor's runs have. Those of LLaMA-8B are left out: they take 3.5 times
as long as OPT-30B's on GH200, which are 2.8 times as large, as with longer sequences. The embedding
is left out as well: the form of its time does not describe it (OPT-30B's takes 1.4 times as long as
OPT-350M's, with 7 times the width).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from attrs import evolve

from alpa_interchange.cluster import ClusterSpec
from cost_model.catalogue import HOSTS
from cost_model.layer_table import LayerTime, layer_table
from cost_model.least_squares import fit_parameters
from cost_model.measured_row import NAMED_MODELS
from cost_model.step_constants import StepConstants
from cost_model.step_layers import priced_edges, priced_layer, run_axes
from cost_model.training_run import TrainingRun
from cost_model.transformer import TransformerSpec

_MODELS = ("opt-350m", "opt-30b", "gpt-neo-2.7b")
_TOKENS = 2048
_WEIGHT = 8.0  # of all rows together against the prior, as a source of runs has (`step_fit`)


def fit_layers(
    executor: str,
    devices: Collection[str],
    first: Mapping[str, float],
    bounds: Mapping[str, tuple[float, float]],
) -> dict[str, float]:
    """Return the constants with which layers and heads measured on `devices` are predicted nearest,
    from the values `first`: those alone that any of them depends on."""
    models = {(one["hidden"], one["layers"]): one for one in map(NAMED_MODELS.get, _MODELS) if one}
    times = [
        time
        for time in layer_table().times
        if time.device in devices and (time.hidden, time.layers) in models
    ]
    if not times:
        return {}
    runs = [_run(executor, time, models[time.hidden, time.layers]) for time in times]
    measured = np.array([[time.seconds, time.last] for time in times]).ravel()

    def predict(values: Mapping[str, float]) -> np.ndarray:
        c = StepConstants(**(dict(first) | dict(values)))
        found = []
        for run in runs:
            axes = run_axes(run, c)
            _, product, loss = priced_edges(run, axes, c)
            found += [priced_layer(run, axes, c, 0).seconds, product + loss]
        seconds: np.ndarray = np.log(found)
        return seconds

    same = predict({})
    start = {
        name: value
        for name, value in first.items()
        if value and not np.array_equal(predict({name: 0.9 * value}), same)
    }
    weights = np.full(len(measured), _WEIGHT / math.sqrt(len(measured)))
    return fit_parameters(predict, measured, start, bounds, weights=weights)


def _run(executor: str, time: LayerTime, model: Mapping[str, Any]) -> TrainingRun:
    """Return the run of one microbatch on one host that has the measured layer."""
    host = evolve(HOSTS[time.device], num_hosts=1, devices_per_host=time.tensor)
    return TrainingRun(
        model=TransformerSpec(seq=_TOKENS, **model),
        cluster=ClusterSpec(name=time.device, host_groups=(host,)),
        global_batch=time.micro_batch,
        micro_batch=time.micro_batch,
        tensor=time.tensor,
        executor=executor,
        dtype="float16",
    )

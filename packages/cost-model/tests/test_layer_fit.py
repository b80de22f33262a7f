"""Constants of kernels of a profiled program follow from its measured layers."""

import numpy as np
from attrs import asdict, evolve

from alpa_interchange import ClusterSpec
from cost_model import TrainingRun, TransformerSpec
from cost_model.catalogue import HOSTS
from cost_model.layer_fit import fit_layers
from cost_model.layer_table import layer_table
from cost_model.prediction import step_model
from cost_model.step_constants import StepConstants
from cost_model.step_layers import priced_layer, run_axes

OPT = {
    1024: TransformerSpec(hidden=1024, layers=24, heads=16, seq=2048, vocab=50272),
    7168: TransformerSpec(hidden=7168, layers=48, heads=56, seq=2048, vocab=50272),
}


def _errors(c: StepConstants) -> np.ndarray:
    """Return predicted over measured seconds, less one, of the layers of OPT on GH200."""
    found = []
    for time in layer_table().times:
        if time.device == "gh200" and time.hidden in OPT:
            host = evolve(HOSTS["gh200"], num_hosts=1, devices_per_host=time.tensor)
            run = TrainingRun(
                model=OPT[time.hidden],
                cluster=ClusterSpec(name="gh200", host_groups=(host,)),
                global_batch=time.micro_batch,
                micro_batch=time.micro_batch,
                tensor=time.tensor,
                executor="sailor",
                dtype="float16",
            )
            layer = priced_layer(run, run_axes(run, c), c, 0)
            found.append(layer.seconds / time.seconds - 1)
    return np.array(found)


def test_shipped_constants_describe_the_layers_that_were_measured():
    shipped = step_model("sailor")
    assert np.abs(_errors(StepConstants())).mean() > 0.4  # those of no program
    for fitted in (shipped.whole, *shipped.folds):
        assert np.abs(_errors(fitted.constants)).mean() < 0.07


def test_devices_that_were_not_profiled_leave_the_constants_alone():
    assert fit_layers("sailor", {"h100"}, asdict(StepConstants()), {}) == {}

"""Causal corpus models are cut into token slices; the others are refused for a reason of theirs.

`benchmarks/token_slices.py corpus` runs and audits them.
"""

from importlib.util import find_spec

import pytest

from alpa_meta.corpus import NAMES, build
from alpa_meta.step.program import Step
from alpa_meta.token_slices.places import SliceRequest
from alpa_meta.token_slices.program import in_wanted_slices
from alpa_meta.token_slices.values import SlicingError

CAUSAL = ("gpt", "mamba", "mamba-sequential", "gpt-scan", "gpt-remat", "gpt-tied", "llama")
REASONS = {
    "convnet": "convolves with a window that reaches later tokens",
    "diffusion": "convolves with a window that reaches later tokens",
    "dlrm": "none of its operators works on them one by one",
    "dropout-mlp": "none of its operators works on them one by one",
    "equinox-mlp": "none of its operators works on them one by one",
    "moe-einsum": r"through_experts\) needs a value of all tokens",  # second choices come last
    "moe-sort": "sort at .* cuts, joins or reorders the dim of tokens",
    "t5": "most of its work is on all tokens at once",  # the encoder, beside half as many targets
    "unet": "convolves with a window that reaches later tokens",
    "vit": "none of its operators works on them one by one",
    "wide-resnet": "convolves with a window that reaches later tokens",
}
NEEDS = {"equinox-mlp": "equinox"}


def sliced(name, request):
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    model = build(name)
    program = Step(model.train_step, (model.state, model.batch)).program(1)
    holds = [leaf.role == "batch" for leaf in program.inputs]
    return in_wanted_slices(program.closed, program.phases.of_eqn, holds, request)


@pytest.mark.sample(name=4)
@pytest.mark.parametrize("name", CAUSAL)
def test_causal_models_are_cut_into_uneven_slices(name):
    assert sliced(name, SliceRequest((5, 1, 10))).slices.lengths == (5, 1, 10)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in CAUSAL])
def test_models_that_are_not_causal_are_refused_for_a_reason_of_theirs(name):
    with pytest.raises(SlicingError, match=REASONS[name]):
        sliced(name, SliceRequest(count=2))

"""Options: defaults, and what is refused."""

import pytest
from attrs import evolve

from alpa_meta.options import Options


def test_the_planner_chooses_what_is_not_given():
    options = Options()
    assert (
        options.num_stages is options.num_microbatches is options.mesh_shape is options.plan is None
    )
    assert options.donate
    assert options.exact
    assert options.progress("plan", 0, 1) is None
    assert evolve(options, progress=None).progress("plan", 0, 1) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_stages": 0},
        {"num_microbatches": 0},
        {"num_layers": -1},
        {"schedule": "zigzag"},
        {"max_mesh_axes": 0},
        {"plan": "plan.json"},
    ],
)
def test_impossible_options_are_refused(wrong):
    with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
        Options(**wrong)


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="colour"):
        Options(colour="red")

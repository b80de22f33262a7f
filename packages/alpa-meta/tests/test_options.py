"""Options: defaults, and what is refused."""

from typing import Any

import pytest
from attrs import evolve, fields

from alpa_meta.errors import PlanError
from alpa_meta.options import Options
from mesh_runtime import RayOptions


def test_the_planner_chooses_what_is_not_given():
    options = Options()
    assert options.num_stages is options.num_microbatches is None
    assert options.mesh_shape is None and options.plan is None
    assert options.donate
    assert options.exact
    options.progress("plan", 0, 1)
    evolve(options, progress=None).progress("plan", 0, 1)


WRONG: list[dict[str, Any]] = [
    {"num_stages": 0},
    {"num_stages": True},
    {"on_nan": "ignore"},
    {"checkpoints": 3},
    {"checkpoint_every": -1},
    {"num_microbatches": 0},
    {"num_token_slices": 0},
    {"token_slices": (4, 0)},
    {"num_layers": -1},
    {"recompute": "some"},
    {"offload": "weights"},
    {"recompute": {"0": "full"}},
    {"schedule": "1f2b"},
    {"schedule": "1f2b"},
    {"memory": -5},
    {"memory": "lots"},
    {"mesh_shape": "2x4"},
    {"mesh_shape": ()},
    {"max_mesh_axes": 0},
    {"plan": "plan.json"},
    {"progress": 3},
    {"batch_argnums": "batch"},
    {"static_argnums": -1},
    {"donate": 1},
    {"exact": "no"},
    {"solver_seconds": 0},
    {"solver_seconds": float("nan")},
    {"seed": 1.5},
    {"trace": "nonsense"},
    {"pins": 3},
    {"pins": {"weights": "x"}},
    {"preset": "pd"},
    {"axis_names": ("x", "x")},
    {"dynamic_dims": "batch"},
    {"executor": "gspmd"},
    {"cache": "yes"},
    {"runtime": "slurm"},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_impossible_options_are_refused_with_what_came(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(PlanError) as refused:
        Options(**wrong)
    assert name in str(refused.value)
    assert repr(value).strip("()") in str(refused.value)


def test_every_option_is_checked():
    assert {name for wrong in WRONG for name in wrong} == {one.name for one in fields(Options)}


def test_sizes_may_be_written_with_their_unit():
    assert Options(memory="16GiB").memory == 16 * 2**30
    assert Options(memory="40 GB").memory == 40e9


def test_lists_and_single_numbers_stand_for_tuples():
    options = Options(mesh_shape=[2, 4], batch_argnums=1, static_argnums=[2, 3])
    assert options == Options(mesh_shape=(2, 4), batch_argnums=(1,), static_argnums=(2, 3))


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="colour"):
        Options(colour="red")  # type: ignore[call-arg]  # on purpose


def test_ray_is_asked_for_by_one_word_or_by_its_options():
    assert Options().ray_options is None
    assert Options(runtime="ray").ray_options == RayOptions()
    chosen = RayOptions(address="auto")
    assert Options(runtime=chosen).ray_options is chosen

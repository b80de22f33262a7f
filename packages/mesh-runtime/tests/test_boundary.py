import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_runtime import StepError, check_schedule
from mesh_runtime.boundary import (
    check_present,
    complete_layouts,
    destinations,
    layout_on,
    listing,
)


def test_layouts_may_be_specs_or_shardings_over_an_abstract_mesh(meshes):
    (mesh,) = meshes(1)
    abstract = AbstractMesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    for given in (P("data"), NamedSharding(abstract, P("data")), NamedSharding(mesh, P("data"))):
        assert layout_on(0, mesh, "x", given) == NamedSharding(mesh, P("data"))
    with pytest.raises(TypeError, match=r"shardings\[0\]\['x'\] must be a NamedSharding or Part"):
        layout_on(0, mesh, "x", ("data",))  # type: ignore[arg-type]  # on purpose


def test_a_carried_value_takes_the_layout_of_its_input(pipeline):
    job = pipeline(1, 1)
    order = check_schedule(job.schedule)
    (complete,) = complete_layouts(job.schedule, order, job.specs, job.carry)
    assert complete["new_w0"] == job.specs[0]["w0"]


def test_an_input_goes_to_every_mesh_that_reads_it_first(pipeline):
    order = check_schedule(pipeline(2, 2).schedule)
    assert destinations(order, ["w1", "x@0"], "put") == [(1, "w1"), (0, "x@0")]


def test_a_missing_input_names_mesh_and_remedy():
    with pytest.raises(StepError, match=r"mesh 3 reads 'b' before .* give it to put\(\)"):
        check_present(3, ["a", "b"], ["a"])


def test_long_lists_of_names_are_shortened():
    assert listing(["a", "b", "c"], limit=2) == "'a', 'b' and 1 more"
    assert listing([]) == "nothing"

import pytest

from alpa_interchange.document import from_json, to_json
from alpa_interchange.reshard import PlacedTensor, ReshardingPlan, ReshardingTask, Transfer
from alpa_interchange.tensor import ShardingSpec, TensorType


def placed(**changes):
    given = {
        "spec": ShardingSpec((("x",), ())),
        "axis_names": ("x", "y"),
        "mesh_shape": (2, 2),
        "devices": (0, 1, 2, 3),
        "hosts": (0, 0, 1, 1),
    }
    return PlacedTensor(**{**given, **changes})


def task():
    return ReshardingTask(tensor=TensorType((4, 6), "bfloat16"), source=placed(), target=placed())


def test_a_plan_survives_the_round_trip_through_json():
    made = ReshardingPlan(
        task=task(),
        transfers=(
            Transfer(method="copy", start=(0, 0), stop=(2, 6), sender=0, receivers=(2,)),
            Transfer(
                method="gather", start=(0, 0), stop=(4, 6), sender=2, receivers=(2, 3), after=(0,)
            ),
        ),
        strategy="local_all_gather",
        seconds=0.25,
        lower_bound=0.125,
    )
    assert from_json(to_json(made), ReshardingPlan) == made


def test_a_layout_needs_as_many_devices_and_hosts_as_its_mesh():
    with pytest.raises(ValueError, match="needs 4 devices and as many hosts, got 3 devices"):
        placed(devices=(0, 1, 2))
    with pytest.raises(ValueError, match="4 devices and 1 hosts"):
        placed(hosts=(0,))
    with pytest.raises(ValueError, match="one axis name per mesh axis"):
        placed(axis_names=("x",))


def test_devices_are_distinct_and_axes_known():
    with pytest.raises(ValueError, match="devices must be distinct"):
        placed(devices=(0, 1, 2, 2))
    with pytest.raises(ValueError, match=r"uses the mesh axes \['z'\]"):
        placed(spec=ShardingSpec((("z",), ())))


def test_a_layout_has_an_entry_per_dim_of_the_tensor():
    with pytest.raises(ValueError, match="target.spec has 1 dims, but the tensor"):
        ReshardingTask(
            tensor=TensorType((4, 6), "int8"),
            source=placed(),
            target=placed(spec=ShardingSpec((("x",),))),
        )


def test_unknown_methods_and_zero_chunks_are_refused():
    with pytest.raises(ValueError, match="Transfer.method must be one of"):
        Transfer(method="teleport", start=(), stop=(), sender=0, receivers=(1,))
    with pytest.raises(ValueError, match="num_chunks must be above 0"):
        Transfer(method="copy", start=(), stop=(), sender=0, receivers=(1,), num_chunks=0)

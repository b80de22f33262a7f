import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_runtime.pieces import box_of, box_size, device_boxes

SPECS = [(), ("data",), (None, "model"), (("model", "data"),), ("model", "data")]


@pytest.mark.parametrize("spec", SPECS)
def test_tiles_are_those_of_jax(meshes, spec):
    (mesh,) = meshes(1, (2, 4))
    indices = NamedSharding(mesh, P(*spec)).devices_indices_map((16, 8))
    expected = [box_of(indices[device], (16, 8)) for device in mesh.devices.flat]
    found = device_boxes((16, 8), spec, (2, 4), ("data", "model"))
    assert found == expected
    assert sum(map(box_size, dict.fromkeys(found))) == 128


def test_layouts_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"dim 0 of a value of shape \(6,\) cannot be cut 4 ways"):
        device_boxes((6,), ("x",), (4,), ("x",))

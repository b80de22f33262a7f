"""Meshes: sizes, order, and what is refused."""

from typing import Any

import pytest

from alpa_interchange.document import from_json, to_json
from alpa_interchange.mesh import DeviceMesh, LogicalMesh, MeshAxis, SubmeshSpec

MESH = LogicalMesh(axes=(MeshAxis(name="x", size=2), MeshAxis(name="y", size=4)))


def test_sizes_of_axes_multiply() -> None:
    assert MESH.shape == (2, 4)
    assert MESH.num_devices == 8
    assert MESH.axis_names == ("x", "y")
    assert MESH.size(("y",)) == 4
    assert MESH.size(("y", "x")) == 8
    assert MESH.size(()) == 1


def test_an_axis_that_the_mesh_lacks_has_no_size() -> None:
    with pytest.raises(KeyError, match="z"):
        MESH.size(("z",))


def test_two_axes_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"distinct names, got \['x', 'x'\]"):
        LogicalMesh(axes=(MeshAxis(name="x", size=2), MeshAxis(name="x", size=4)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 0}, "MeshAxis.size must be above 0, got 0"),
        ({"name": ""}, "MeshAxis.name must not be empty"),
        ({"bandwidth": 0.0}, "MeshAxis.bandwidth must be above 0"),
        ({"bandwidth": float("inf")}, "MeshAxis.bandwidth must be above 0, got inf"),
        ({"latency": -1e-9}, "MeshAxis.latency must be at least 0"),
    ],
)
def test_impossible_axes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MeshAxis(**{"name": "x", "size": 2, **changes})


def test_a_submesh_is_a_rectangle_of_devices() -> None:
    assert SubmeshSpec(num_hosts=2, devices_per_host=4).num_devices == 8
    with pytest.raises(ValueError, match="num_hosts must be above 0"):
        SubmeshSpec(num_hosts=0, devices_per_host=4)


def test_a_device_mesh_needs_a_device_for_every_place() -> None:
    submesh = SubmeshSpec(num_hosts=1, devices_per_host=8)
    mesh = DeviceMesh(submesh=submesh, logical=MESH, device_ids=tuple(range(8)))
    assert from_json(to_json(mesh), DeviceMesh) == mesh
    with pytest.raises(ValueError, match=r"has 7 devices, but the logical mesh \(2, 4\) needs 8"):
        DeviceMesh(submesh=submesh, logical=MESH, device_ids=tuple(range(7)))

import pytest

from mesh_runtime import RayMesh
from mesh_runtime.ray_placement import bundles_of


def mesh(**changes):
    return RayMesh(shape=(4,), axis_names=("x",), **changes)


def test_meshes_on_one_host_share_its_bundle():
    bundles, places = bundles_of(
        [
            mesh(num_hosts=2, hosts=(0, 1), num_gpus=2),
            mesh(hosts=(1,), num_cpus=3, num_gpus=4),
        ]
    )
    assert bundles == [{"CPU": 1.0, "GPU": 2.0}, {"CPU": 4.0, "GPU": 6.0}]
    assert places == [[0, 1], [1]]


def test_by_default_every_actor_has_a_host_of_its_own():
    bundles, places = bundles_of([mesh(num_hosts=2), mesh()])
    assert bundles == [{"CPU": 1.0, "GPU": 0.0}] * 3
    assert places == [[0, 1], [2]]


def test_meshes_that_cannot_be_spread_or_named_are_refused():
    with pytest.raises(ValueError, match="3 devices cannot be spread evenly over 2 hosts"):
        RayMesh(shape=(3,), axis_names=("x",), num_hosts=2)
    with pytest.raises(ValueError, match="needs a name per axis"):
        RayMesh(shape=(3, 2), axis_names=("x",))
    with pytest.raises(ValueError, match=r"a different host for each of the 2 .*, got \(1, 1\)"):
        mesh(num_hosts=2, hosts=(1, 1))

from types import SimpleNamespace

from mesh_runtime.gpu_plane import GpuPlane


def test_the_way_between_gpus_is_taken_only_where_it_can_be():
    maker = SimpleNamespace(obstacle=lambda: "CuPy is not installed")
    gpu, cpu = SimpleNamespace(platform="gpu"), SimpleNamespace(platform="cpu")
    assert GpuPlane("mesh 0 host 0", maker, {0: gpu, 1: cpu}).obstacle() == (
        "mesh 0 host 0 has cpu devices"
    )
    assert GpuPlane("a", maker, {0: gpu}).obstacle() == "a: CuPy is not installed"
    assert "was handed in" in GpuPlane("a", None, {0: gpu}).obstacle()
    maker.obstacle = str
    assert GpuPlane("a", maker, {0: gpu}).obstacle() == ""

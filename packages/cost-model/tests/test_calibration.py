import pytest

from cost_model import CostModel, calibrate, catalogue_device, cluster, stored_profile
from cost_model.calibration import measurements
from cost_model.profile import store_profile


def test_the_constants_of_an_imaginary_machine_are_found(made_up_machine):
    profile = calibrate(made_up_machine())
    device = profile.device
    assert device.name == "imaginary-9000" and device.memory == 16e9
    for dtype, peak in (("float32", 1e13), ("tensorfloat32", 4e13), ("bfloat16", 8e13)):
        reached = device.peak_flops[dtype] * profile.efficiency.compute["matmul"]
        assert reached == pytest.approx(peak, rel=0.25)
    assert profile.intra_host and profile.host_link
    assert profile.intra_host.bandwidth == pytest.approx(4e10, rel=0.02)
    assert profile.host_link.bandwidth == pytest.approx(1e10, rel=0.02)
    assert not profile.shared_compute


def test_devices_of_a_cpu_share_its_cores_and_its_memory_bus(made_up_machine):
    profile = calibrate(made_up_machine("cpu", "cpu"))
    assert (profile.name, profile.shared_compute, profile.host_link) == ("host", True, None)
    # per device 40 GB/s with 4 at work: the bus they share has four times that
    assert profile.intra_host.bandwidth == pytest.approx(4 * 4e10, rel=0.02)


def test_devices_that_do_not_speed_each_other_up_are_not_counted_twice(
    made_up_machine, monkeypatch
):
    alone = calibrate(made_up_machine("cpu", "cpu")).device.peak_flops["float32"]
    idle_matmul = made_up_machine.matmul

    def crowded_matmul(machine, m, n, k, dtype, num_devices):
        penalty = 2.0 if num_devices > 1 else 1.0
        return penalty * idle_matmul(machine, m, n, k, dtype, num_devices)

    monkeypatch.setattr(made_up_machine, "matmul", crowded_matmul)
    crowded = calibrate(made_up_machine("cpu", "cpu")).device.peak_flops["float32"]
    assert crowded == pytest.approx(alone / 2, rel=0.05)


def test_a_profile_of_this_machine_is_what_host_clusters_are_made_of(made_up_machine):
    store_profile(calibrate(made_up_machine("cpu", "cpu")))
    model = CostModel(cluster("host:4"))
    flops = 1e12
    seconds = model.compute_seconds(flops, 0.0, "float32", shape=(5000, 20000, 5000))
    assert seconds == pytest.approx(4 * flops / 1e13, rel=0.3)


def test_one_device_has_no_collectives(made_up_machine):
    machine = made_up_machine(devices=1)
    profile = calibrate(machine)
    assert {sample.num_devices for sample in profile.samples} == {1}
    assert profile.intra_host.bandwidth > 0


def test_a_profile_survives_its_file(made_up_machine, tmp_path):
    profile = calibrate(made_up_machine(), name="mine")
    assert store_profile(profile) == tmp_path / "cache" / "profiles" / "mine.json"
    assert stored_profile("mine") == profile


def test_progress_counts_every_measurement(made_up_machine):
    seen = []
    calibrate(made_up_machine(), progress=lambda *step: seen.append(step))
    total = seen[-1][2]
    assert seen[0][0] == "compiling"
    assert [position for _, position, _ in seen[1:]] == list(range(total + 1))
    assert seen[-1][0] == "done"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA L4", "l4"),
        ("TPU v5 lite", "tpu-v5e"),
        ("TPU v4", "tpu-v4"),
        ("TPU v5p", "tpu-v5p"),
        ("NVIDIA TITAN RTX", "rtx-titan"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx-2080ti"),
    ],
)
def test_device_kinds_are_found_in_the_catalogue(kind, name):
    device = catalogue_device(kind)
    assert device is not None and device.name == name
    assert cluster(f"{name}:1").host_groups[0].device == device


def test_unknown_device_kinds_are_not():
    assert catalogue_device("cpu") is None
    assert catalogue_device("NVIDIA L40S") is None


def test_layers_that_may_not_fit_are_not_measured():
    def widths(memory):
        todo = measurements(8192, "gpu", 1, memory=memory)
        return {arguments[0] for method, arguments in todo if method == "layer"}

    assert widths(0.0) == widths(80e9) == {1024, 2048, 4096, 8192}
    assert widths(16e9) == {1024, 2048, 4096}


def test_both_platforms_measure_matmuls_layers_and_collectives():
    for platform in ("cpu", "gpu"):
        methods = {method for method, _ in measurements(1024, platform, 4)}
        assert {"matmul", "elementwise", "collective", "layer"} <= methods

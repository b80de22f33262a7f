import numpy as np
import pytest
from attrs import evolve

from alpa_interchange.mesh import MeshAxis, SubmeshSpec
from cost_model import CostModel, TrainingRun, TransformerSpec, cluster
from cost_model.prediction import step_model
from cost_model.profile import Profile, apply_profile
from cost_model.program import as_run_by, cluster_of_run, program_of
from cost_model.topology import leaves_host

H100 = cluster("h100:16")
SIZES = (1e3, 1e9)
AXIS = (MeshAxis(name="model", size=8, bandwidth=3e11, latency=3e-6),)


def test_a_name_states_the_program_and_what_it_does():
    stated = cluster("h100:16+nanotron,flash,staged")
    assert stated == as_run_by(H100, "nanotron", {"staged", "flash"})
    program = program_of(stated)
    assert program and program.executor == "nanotron" and program.attends
    assert program_of(H100) is None
    eager = program_of(cluster("h100:16+megatron-deepspeed"))
    assert eager and not eager.attends


def test_unknown_programs_and_properties_are_refused():
    with pytest.raises(ValueError, match="executor must be one of .* got 'numotron'"):
        cluster("h100:16+numotron")
    with pytest.raises(ValueError, match="must be of flash, fused, staged, got 'flush'"):
        cluster("h100:16+nanotron,flush")
    with pytest.raises(ValueError, match="has an executor already"):
        as_run_by(cluster("h100:16+nanotron"), "fsdp")


def test_a_quantile_is_stated_before_the_program():
    program = program_of(cluster("h100:16@90%+nanotron"))
    assert program and program.executor == "nanotron"
    with pytest.raises(ValueError, match="put the quantile before it"):
        cluster("h100:16+nanotron@90%")


def test_layers_take_their_kernels_or_their_launches_but_in_a_compiled_program():
    eager, ours = (CostModel(cluster(f"h100:16+{name}")) for name in ("nanotron", "xla"))
    c = step_model("nanotron").whole.constants
    assert eager.program and eager.program.launch * 18 == pytest.approx(c.launch)
    assert ours.program and ours.program.launch == ours.program.launch_seconds("all-gather", 8) == 0
    # one small kernel is as quick as its traffic: the host is ahead
    small, large = (eager.compute_seconds(0.0, size, "bfloat16", "elementwise") for size in SIZES)
    assert small < eager.program.launch / 1000 < large
    seconds = eager.program.passes_seconds(np.array([0.0, 1.0, 8.0]), np.array([2.0, 8.0, 1.0]))
    assert seconds == pytest.approx([2.0, 8.0, 8.0])
    equal = eager.program.passes_seconds(3.0, 3.0)  # the host is not always ahead
    assert equal == pytest.approx(3 * 2 ** (1 / c.sharpness))


def test_stages_take_time_beside_their_layers_but_in_a_compiled_program():
    eager, ours = (program_of(cluster(f"h100:16+{name}")) for name in ("nanotron", "xla"))
    c = step_model("nanotron").whole.constants
    assert eager and ours
    assert sum(eager.microbatch_seconds) == pytest.approx(c.microbatch)
    assert eager.step_seconds == c.step
    assert (*ours.microbatch_seconds, ours.step_seconds) == (0.0, 0.0, 0.0)


def test_transfers_between_stages_have_the_program_s_latency_and_share_of_the_links():
    stated, c = CostModel(cluster("h100:16+nanotron")), step_model("nanotron").whole.constants
    host = SubmeshSpec(num_hosts=1, devices_per_host=8)
    idle = CostModel(H100).transfer_links(host, host, "hosts")
    assert idle.hosts is not None
    found = stated.transfer_links(host, host, "hosts")
    assert found.latency == c.pipeline_latency and found.hosts is not None
    assert found.hosts == pytest.approx([rate * c.pipeline_bandwidth for rate in idle.hosts])
    moved = 1e9 / min(found.hosts)
    assert stated.transfer_seconds(1e9, host, host, "hosts") == pytest.approx(
        c.pipeline_latency + moved
    )


def test_products_reach_the_memory_that_unfused_kernels_around_them_do_not():
    costs, c = CostModel(cluster("h100:16+fsdp")), step_model("fsdp").whole.constants
    product, other = (
        costs.compute_seconds(0.0, 1e9, "bfloat16", kind) for kind in ("attention", "elementwise")
    )
    assert other == pytest.approx(c.unfused_memory * product)


def test_narrow_products_reach_less_of_the_peak():
    costs = CostModel(cluster("h100:16+nanotron"))

    def rate(columns):
        flops = 2 * 8192.0 * 8192 * columns
        shape = (1, 8192, columns, 8192)
        return flops / costs.compute_seconds(flops, 0.0, "bfloat16", "matmul", shape)

    assert rate(1024) < rate(2048) < rate(8192)


def test_collectives_of_stages_on_several_hosts_take_long_to_launch():
    alone, staged = (program_of(cluster(f"h100:16+nanotron{more}")) for more in ("", ",staged"))
    c = step_model("nanotron").whole.constants
    assert alone and staged
    seconds = [program.launch_seconds("all-reduce", 8) for program in (alone, staged)]
    assert seconds[1] - seconds[0] == pytest.approx(c.launch_staged * 8 / 4)
    assert staged.launch_seconds("all-gather", 8) == pytest.approx(seconds[1] / 2)
    assert staged.launch_seconds("all-reduce", 1) == 0
    costs = CostModel(cluster("h100:16+nanotron"))
    assert costs.collective_seconds("all-reduce", 0.0, AXIS) == 0


def test_collectives_inside_layers_take_what_products_beside_them_do_not_hide():
    idle, c = CostModel(H100), step_model("nanotron").whole.constants
    mesh = idle.logical_mesh(SubmeshSpec(num_hosts=2, devices_per_host=8), (2, 8), ("x", "y"))
    far, near = mesh.axes
    group = H100.host_groups[0]
    assert leaves_host(far, group) and not leaves_host(near, group)
    start, moved = (idle.collective_seconds("all-gather", size, (near,)) for size in (1.0, 1e8))
    found = CostModel(cluster("h100:16+nanotron")).collective_seconds("all-gather", 1e8, (near,))
    exposed = start + c.tensor_exposed * (moved - start)
    assert found == pytest.approx(c.tensor_latency / 2 + exposed / c.tensor_bandwidth)
    # between hosts they take longer than products beside them, and count in full
    slower = evolve(far, bandwidth=far.bandwidth * c.fabric_tensor)
    alone = idle.collective_seconds("all-gather", 1e8, (slower,))
    found = CostModel(cluster("h100:16+nanotron")).collective_seconds("all-gather", 1e8, (far,))
    assert found == pytest.approx(c.tensor_latency / 2 + alone / c.tensor_bandwidth)
    # megatron's have the devices for themselves, and less of the links between hosts
    megatron = CostModel(cluster("h100:16+megatron-deepspeed"))
    c = step_model("megatron-deepspeed").whole.constants
    for axis, share in ((near, 1.0), (far, c.fabric_tensor)):
        slower = evolve(axis, bandwidth=axis.bandwidth * share)
        alone = idle.collective_seconds("all-reduce", 1e8, (slower,))
        found = megatron.collective_seconds("all-reduce", 1e8, (axis,))
        assert found == pytest.approx(c.tensor_latency + alone / c.tensor_bandwidth)


@pytest.mark.parametrize("name", ["nanotron", "megatron", "fsdp"])
def test_gradients_take_what_the_backward_pass_does_not_hide(name):
    c, costs = step_model(name).whole.constants, CostModel(cluster(f"h100:16+{name}"))
    sizes = [3e6, 5e7, 5e7, 2e8]
    for kind, exposed in (
        ("all-reduce", c.gradient_exposed),
        ("reduce-scatter", c.sharded_exposed if name == "nanotron" else c.gradient_exposed),
        ("all-gather", c.gradient_exposed if name == "fsdp" else c.sharded_exposed),
    ):
        alone = CostModel(H100).collective_seconds(kind, sum(sizes), AXIS)
        found = costs.bucketed_seconds(kind, sizes, AXIS)
        assert found == pytest.approx(alone * exposed / c.gradient_bandwidth)
        assert costs.bucketed_seconds(kind, {3e6: 1, 5e7: 2, 2e8: 1}, AXIS) == pytest.approx(found)
        shares = sum(costs.bucket_share_seconds(kind, size, AXIS) for size in sizes)
        assert 0.9 * found < shares <= found


def test_a_run_states_its_own_program():
    run = TrainingRun(
        model=TransformerSpec(hidden=2048, layers=8, heads=16, seq=2048), cluster=H100,
        global_batch=32, tensor=4, pipeline=4, executor="nanotron", fused_attention=True,
    )  # fmt: skip
    assert cluster_of_run(run).name == "h100:16+nanotron,flash,staged"
    judged = program_of(cluster_of_run(run, fold=1))
    assert judged and judged.constants == step_model("nanotron").folds[1].constants


def test_a_profile_of_our_kernels_is_not_that_of_another_program():
    group = H100.host_groups[0]
    slow = evolve(group.device, memory_bandwidth=1e12)
    profile = Profile(
        name="h100", date="2026-01-01", driver="none", device=slow, devices_per_host=8,
        intra_host=group.intra_host,
    )  # fmt: skip
    stated = cluster("h100:16+nanotron")
    assert apply_profile(stated, profile) == stated
    assert apply_profile(H100, profile) != H100

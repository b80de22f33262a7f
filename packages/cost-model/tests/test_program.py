import pytest
from attrs import evolve

from alpa_interchange.mesh import MeshAxis
from cost_model import CostModel, TrainingRun, TransformerSpec, cluster
from cost_model.prediction import step_model
from cost_model.profile import Profile, apply_profile
from cost_model.program import as_run_by, cluster_of_run, program_of

H100 = cluster("h100:16")
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


def test_no_kernel_is_quicker_than_its_launch_but_in_a_compiled_program():
    eager, ours = (CostModel(cluster(f"h100:16+{name}")) for name in ("nanotron", "xla"))
    launch = step_model("nanotron").whole.constants.launch / 80
    assert eager.compute_seconds(0.0, 1e3, "bfloat16", "elementwise") == pytest.approx(launch)
    assert ours.compute_seconds(0.0, 1e3, "bfloat16", "elementwise") < launch / 100
    large = eager.compute_seconds(0.0, 1e9, "bfloat16", "elementwise")
    assert large == pytest.approx(2 * eager.compute_seconds(0.0, 5e8, "bfloat16", "elementwise"))


def test_narrow_products_reach_less_of_the_peak():
    costs = CostModel(cluster("h100:16+nanotron"))

    def rate(columns):
        flops = 2 * 8192.0 * 8192 * columns
        shape = (1, 8192, columns, 8192)
        return flops / costs.compute_seconds(flops, 0.0, "bfloat16", "matmul", shape)

    assert rate(1024) < rate(2048) < rate(8192)


def test_collectives_of_stages_on_several_hosts_wait_for_their_launch():
    alone, staged = (CostModel(cluster(f"h100:16+nanotron{more}")) for more in ("", ",staged"))
    c = step_model("nanotron").whole.constants
    seconds = [model.collective_seconds("all-reduce", 1e6, AXIS) for model in (alone, staged)]
    assert seconds[1] > c.launch_staged * 8 / 4 > 10 * seconds[0]
    assert staged.collective_seconds("all-gather", 1e6, AXIS) == pytest.approx(seconds[1] / 2)
    assert staged.collective_seconds("all-reduce", 0.0, AXIS) == 0


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

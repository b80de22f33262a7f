import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attrs import evolve
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from alpa_interchange.schedule import Instruction, PipelineSchedule
from mesh_runtime import InProcessRuntime, StepError


def load(runtime, job, executables=None, **changes):
    arguments = {"outputs": job.outputs, "carry": job.carry, **changes}
    runtime.load(
        job.schedule, job.jitted() if executables is None else executables, job.specs, **arguments
    )


@pytest.mark.parametrize(("num_stages", "shape"), [(1, (2, 4)), (2, (2, 2)), (4, (2, 1))])
def test_three_pipelined_steps_equal_the_same_training_on_one_device(
    pipeline, meshes, num_stages, shape
):
    job = pipeline(num_stages, 4)
    runtime = InProcessRuntime(meshes(num_stages, shape))
    load(runtime, job)
    runtime.put(job.state())
    losses = [float(runtime.step(job.batch(step))[job.outputs[0]]) for step in range(3)]
    expected_losses, expected = job.reference(3)
    # float32 sums of 16 terms in another order: a few ulps, not more
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for name, value in runtime.fetch(expected).items():
        # weights of size 1 after three updates by 0.1 x gradients of size 10 to 100
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=2e-5)


def test_exported_programs_give_the_same_step_as_callables(pipeline, meshes):
    job, cut = pipeline(2, 2), meshes(2)
    results = []
    for executables in (job.jitted(), job.exported(cut)):
        runtime = InProcessRuntime(cut)
        load(runtime, job, executables)
        runtime.put(job.state())
        runtime.step(job.batch(0))
        results.append(runtime.fetch(["w0", "w1"]))
    for name in ("w0", "w1"):
        # compiled on their own, so rounding may differ
        np.testing.assert_allclose(results[0][name], results[1][name], rtol=1e-5, atol=1e-6)


def test_carried_state_stays_on_the_devices_of_its_mesh_in_its_layout(pipeline, meshes):
    job, cut = pipeline(2, 2), meshes(2)
    runtime = InProcessRuntime(cut)
    load(runtime, job)
    runtime.put(job.state())
    runtime.step(job.batch(0))
    weight = runtime.fetch(["w1"])["w1"]
    assert weight.sharding.is_equivalent_to(NamedSharding(cut[1], P(None, "model")), 2)


def test_the_injected_transfer_moves_every_received_buffer(pipeline, meshes):
    job, moved = pipeline(2, 3), []

    def transfer(array, sharding):
        moved.append(sharding)
        return jax.device_put(array, sharding)

    runtime = InProcessRuntime(meshes(2), transfer=transfer)
    load(runtime, job)
    runtime.put(job.state())
    runtime.step(job.batch(0))
    assert len(moved) == 6  # 3 activations forward, 3 gradients back


@pytest.mark.parametrize("mode", ["dispatch", "ready", "blocking"])
def test_the_trace_holds_every_instruction_once_and_no_mesh_runs_two_at_a_time(
    pipeline, meshes, mode
):
    job = pipeline(2, 3)
    runtime = InProcessRuntime(meshes(2), trace=mode)
    load(runtime, job)
    runtime.put(job.state())
    runtime.step(job.batch(0))
    for mesh, program in enumerate(job.schedule.programs):
        events = [event for event in runtime.trace if event.mesh == mesh]
        assert sorted(map(repr, (event.instruction for event in events))) == sorted(
            map(repr, program)
        )
        runs = [event for event in events if event.instruction.kind == "run"]
        for first, second in zip(runs, runs[1:], strict=False):
            assert 0 <= first.start <= first.stop <= second.start + 1e-9


def test_a_missing_input_is_named_before_anything_runs(pipeline, meshes):
    job = pipeline(2, 2)
    runtime = InProcessRuntime(meshes(2))
    load(runtime, job)
    runtime.put(job.state())
    batch = job.batch(0)
    del batch["y@1"]
    with pytest.raises(StepError, match=r"mesh 1 reads 'y@1' before anything writes it"):
        runtime.step(batch)


def test_an_unknown_input_is_refused_with_the_known_names(pipeline, meshes):
    runtime = InProcessRuntime(meshes(1))
    load(runtime, pipeline(1, 2))
    with pytest.raises(ValueError, match=r"'w7' is an input of no mesh.*'w0'"):
        runtime.put({"w7": np.zeros(3)})


def test_an_executable_with_the_wrong_number_of_results_is_named(pipeline, meshes):
    job = pipeline(2, 2)
    runtime = InProcessRuntime(meshes(2))
    load(runtime, job, {**job.jitted(), "backward1": lambda *arrays: (arrays[0],)})
    runtime.put(job.state())
    with pytest.raises(StepError, match=r"'backward1' of microbatch 0.* must return 3 arrays"):
        runtime.step(job.batch(0))


def test_a_failing_executable_is_named_with_mesh_and_microbatch(pipeline, meshes):
    job = pipeline(2, 2)

    def fail(*_):
        raise RuntimeError("boom")

    runtime = InProcessRuntime(meshes(2))
    load(runtime, job, {**job.jitted(), "forward0": fail})
    runtime.put(job.state())
    with pytest.raises(StepError, match=r"mesh 0.*'forward0' of microbatch 0.*boom"):
        runtime.step(job.batch(0))


def test_reading_a_donated_buffer_again_is_explained(meshes):
    (mesh,) = meshes(1, (1, 1))
    run = Instruction(kind="run", task="double", inputs=("a",), outputs=("b",))
    schedule = PipelineSchedule(
        name="x", num_stages=1, num_microbatches=1, programs=((run, evolve(run, outputs=("c",))),)
    )
    runtime = InProcessRuntime([mesh])
    double = jax.jit(lambda a: (a * 2,), donate_argnums=0)
    runtime.load(schedule, {"double": double}, [{"a": P()}], outputs=["c"])
    runtime.put({"a": jax.numpy.ones(64)})
    with pytest.raises(StepError, match=r"its input 'a' was donated to an earlier run"):
        runtime.step({})
    with pytest.raises(StepError, match=r"mesh 0 reads 'a' before anything writes it"):
        runtime.step({})


def test_another_mesh_reads_state_as_it_was_before_it_is_updated_in_place(meshes):
    double = Instruction(kind="run", task="double", inputs=("a",), outputs=("a2",))
    send = Instruction(kind="send", inputs=("a",), peer=1, task="read")
    receive = Instruction(kind="receive", outputs=("a",), peer=0, task="read")
    read = Instruction(kind="run", task="read", inputs=("a",), outputs=("sum",))
    schedule = PipelineSchedule(
        name="x",
        num_stages=2,
        num_microbatches=1,
        programs=((send, double), (receive, read)),  # the receive comes after both
    )
    runtime = InProcessRuntime(meshes(2, (1, 1)))
    tasks = {
        "double": jax.jit(lambda a: (a * 2,), donate_argnums=0),
        "read": jax.jit(lambda a: (a.sum(),)),
    }
    runtime.load(schedule, tasks, [{"a": P()}, {"a": P()}], outputs=["sum"], carry={"a2": "a"})
    runtime.put({"a": jnp.ones(64)})
    assert [float(runtime.step({})["sum"]) for _ in range(3)] == [64.0, 128.0, 256.0]


def test_state_that_is_updated_in_place_stays_resident_without_a_carry(meshes):
    (mesh,) = meshes(1, (2, 2))
    run = Instruction(kind="run", task="count", inputs=("n",), outputs=("n",))
    schedule = PipelineSchedule(name="x", num_stages=1, num_microbatches=1, programs=((run,),))
    runtime = InProcessRuntime([mesh])
    runtime.load(schedule, {"count": jax.jit(lambda n: (n + 1,))}, [{"n": P()}], outputs=["n"])
    runtime.put({"n": 0})
    assert [int(runtime.step({})["n"]) for _ in range(3)] == [1, 2, 3]


def test_a_carry_to_an_input_of_another_mesh_moves_there(meshes):
    first, second = meshes(2, (1, 2))
    make = Instruction(kind="run", task="make", inputs=("a",), outputs=("b",))
    use = Instruction(kind="run", task="use", inputs=("c",), outputs=("d",))
    schedule = PipelineSchedule(
        name="x", num_stages=2, num_microbatches=1, programs=((make,), (use,))
    )
    runtime = InProcessRuntime([first, second])
    step = jax.jit(lambda x: (x + 1,))
    runtime.load(
        schedule,
        {"make": step, "use": step},
        [{"a": P()}, {"c": P("model")}],
        outputs=["d"],
        carry={"b": "c"},
    )
    runtime.put({"a": np.arange(4.0), "c": np.zeros(4)})
    runtime.step({})
    assert set(runtime.fetch(["c"])["c"].sharding.device_set) == set(second.devices.flat)
    np.testing.assert_array_equal(runtime.step({})["d"], np.arange(4.0) + 2)


def test_the_number_of_meshes_must_match_the_schedule(pipeline, meshes):
    with pytest.raises(
        ValueError, match="has programs for 2 meshes, but the runtime was made with 1"
    ):
        load(InProcessRuntime(meshes(1)), pipeline(2, 2))


def test_a_layout_on_devices_outside_the_mesh_is_refused(pipeline, meshes):
    job, cut = pipeline(2, 2), meshes(2)
    specs = list(job.specs)
    specs[1] = {**specs[1], "w1": NamedSharding(cut[0], P())}
    with pytest.raises(
        ValueError, match=r"shardings\[1\]\['w1'\].*not among the 4 devices of mesh 1"
    ):
        InProcessRuntime(cut).load(job.schedule, job.jitted(), specs, carry=job.carry)


def test_an_exported_program_for_another_device_count_is_refused(pipeline, meshes):
    job = pipeline(1, 2)
    with pytest.raises(ValueError, match="is for 2 devices, but its mesh has 4"):
        load(InProcessRuntime(meshes(1)), job, job.exported(meshes(1, (2, 1))))


def test_outputs_and_carries_that_do_not_survive_the_step_are_refused_at_load(pipeline, meshes):
    job, cut = pipeline(1, 2), meshes(1)
    with pytest.raises(ValueError, match="output 'g0' is on no mesh after the step"):
        load(InProcessRuntime(cut), job, outputs=["g0"])
    with pytest.raises(ValueError, match="carry: 'nothing'"):
        load(InProcessRuntime(cut), job, carry={"nothing": "w0"})


def test_a_layout_is_required_for_every_input_and_received_value(pipeline, meshes):
    job = pipeline(2, 2)
    with pytest.raises(ValueError, match=r"'h1' has no entry in shardings\[1\]"):
        InProcessRuntime(meshes(2)).load(
            job.schedule, job.jitted(), [job.specs[0], {"w1": P(), "y": P()}]
        )


def test_a_closed_or_empty_runtime_says_what_to_do(meshes):
    with pytest.raises(RuntimeError, match=r"call load\(\) first"):
        InProcessRuntime(meshes(1)).step({})


def test_a_run_that_finds_no_memory_is_named(meshes):
    runs = [
        Instruction(kind="run", task="a", microbatch=0, inputs=("x@0",), outputs=("h@0",)),
        Instruction(kind="run", task="b", microbatch=0, inputs=("h@0",), outputs=("y@0",)),
    ]
    send = Instruction(kind="send", inputs=("h@0",), peer=1, microbatch=0)
    receive = Instruction(kind="receive", outputs=("h@0",), peer=0, microbatch=0)
    schedule = PipelineSchedule(
        name="large",
        num_stages=2,
        num_microbatches=1,
        programs=((runs[0], send), (receive, runs[1])),
    )
    runtime = InProcessRuntime(meshes(2), trace="blocking")
    large = jax.jit(lambda x: (jnp.sort(jnp.outer(x, x), axis=0)[0],))
    executables = {"a": large, "b": jax.jit(lambda h: (h,))}
    runtime.load(schedule, executables, [{"x": P()}, {"h": P()}], outputs=["y@0"])
    with pytest.raises(StepError, match=r"mesh 0, .*run 'a'.*failed: .*Out of memory"):
        float(runtime.step({"x@0": np.ones(1 << 21, np.float32)})["y@0"][0])


def test_a_batch_given_whole_is_dealt_out_to_the_microbatches_in_order(pipeline, meshes):
    job = pipeline(2, 4)
    results = []
    for whole in (False, True):
        runtime = InProcessRuntime(meshes(2))
        load(runtime, job)
        runtime.put(job.state())
        losses = [
            runtime.step(job.whole(step) if whole else job.batch(step))[job.outputs[0]]
            for step in range(2)
        ]
        results.append((losses, runtime.fetch(["w0", "w1"])))
    jax.tree.map(np.testing.assert_array_equal, *results)
    odd = {name: np.concatenate([array, array[:1]]) for name, array in job.whole(0).items()}
    with pytest.raises(ValueError, match="'x' has 17 rows, which 4 microbatches cannot share"):
        runtime.step(odd)
    with pytest.raises(ValueError, match="'x' is an input of no mesh"):
        runtime.put({"x": odd["x"]})  # what stays is named as it is read


@pytest.mark.parametrize("dim", [0, 1])
def test_what_every_microbatch_makes_a_part_of_is_joined_along_a_dim(pipeline, meshes, dim):
    job, cut = pipeline(2, 3), meshes(2)
    runtime = InProcessRuntime(cut)
    contract = {"outputs": job.outputs, "carry": job.carry, "joined": {"h1": dim}}
    runtime.load(job.keeping("h1"), job.jitted(), job.specs, **contract)
    runtime.put(job.state())
    parts = [np.tanh(job.batch(0)[f"x@{m}"] @ job.state()["w0"]) for m in range(3)]
    found = runtime.step(job.batch(0))["h1"]
    np.testing.assert_allclose(found, np.concatenate(parts, axis=dim), rtol=1e-5, atol=1e-6)

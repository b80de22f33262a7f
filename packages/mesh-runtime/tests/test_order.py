import pytest
from attrs import evolve

from alpa_interchange.schedule import Instruction, PipelineSchedule
from mesh_runtime import ScheduleError, check_schedule, value_name


def run(task, inputs=(), outputs=()):
    return Instruction(kind="run", task=task, inputs=inputs, outputs=outputs)


def send(name, peer):
    return Instruction(kind="send", inputs=(name,), peer=peer)


def receive(name, peer):
    return Instruction(kind="receive", outputs=(name,), peer=peer)


def free(*names):
    return Instruction(kind="free", inputs=names)


def schedule(*programs):
    return PipelineSchedule(
        name="test", num_stages=len(programs), num_microbatches=1, programs=tuple(programs)
    )


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (2, 3), (4, 6)])
def test_a_pipeline_is_ordered_so_that_every_receive_follows_its_send(
    pipeline, num_stages, num_microbatches
):
    job = pipeline(num_stages, num_microbatches)
    order = check_schedule(job.schedule)
    assert sorted(order.turns) == [
        (mesh, k) for mesh, program in enumerate(job.schedule.programs) for k in range(len(program))
    ]
    under_way = set()
    for mesh, position in order.turns:
        instruction = job.schedule.programs[mesh][position]
        if instruction.kind == "send":
            under_way.add((mesh, instruction.peer, instruction.inputs))
        if instruction.kind == "receive":
            under_way.remove((instruction.peer, mesh, instruction.outputs))
    assert not under_way


def test_inputs_and_remaining_buffers_are_those_at_the_ends_of_the_program():
    order = check_schedule(
        schedule(
            (run("a", ("w", "x@0"), ("h@0",)), send("h@0", 1), free("h@0", "x@0")),
            (receive("h@0", 0), run("b", ("h@0", "n"), ("n", "loss"))),
        )
    )
    assert order.inputs == (("w", "x@0"), ("n",))
    assert order.remaining == (("w",), ("h@0", "n", "loss"))


def test_meshes_take_turns_after_each_run():
    order = check_schedule(schedule((run("a"), run("b")), (run("c"), run("d"))))
    assert order.turns == ((0, 0), (1, 0), (0, 1), (1, 1))


def test_two_meshes_that_wait_for_each_other_are_named():
    with pytest.raises(ScheduleError, match="the schedule blocks.*") as caught:
        check_schedule(schedule((receive("b", 1), send("a", 1)), (receive("a", 0), send("b", 0))))
    assert "mesh 0, instruction 0 (receive of b from mesh 1)" in str(caught.value)
    assert "mesh 1, instruction 0 (receive of a from mesh 0)" in str(caught.value)


def test_sends_and_receives_in_another_order_are_refused():
    with pytest.raises(
        ScheduleError, match="expects b, but the next send of mesh 0 to it carries a"
    ):
        check_schedule(schedule((send("a", 1), send("b", 1)), (receive("b", 0), receive("a", 0))))


def test_a_send_nobody_receives_is_refused():
    with pytest.raises(ScheduleError, match="mesh 0 sends a to mesh 1, which never receives it"):
        check_schedule(schedule((send("a", 1),), ()))


def test_reading_or_freeing_a_freed_buffer_is_refused():
    for last in (run("t", ("a",)), free("a")):
        with pytest.raises(ScheduleError, match="reads buffer 'a', which an earlier free dropped"):
            check_schedule(schedule((free("a"), last)))


def test_receiving_over_a_living_buffer_is_refused():
    with pytest.raises(ScheduleError, match="would overwrite buffer 'a'"):
        check_schedule(schedule((send("a", 1),), (run("t", (), ("a",)), receive("a", 0))))


@pytest.mark.parametrize("peer", [None, 0, 2, -1])
def test_a_peer_must_be_another_mesh(peer):
    with pytest.raises(ScheduleError, match="peer must be another mesh of the 2"):
        check_schedule(schedule((evolve(send("a", 1), peer=peer),), ()))


def test_the_value_of_a_buffer_is_what_stands_before_its_microbatch():
    assert value_name("h@12") == "h" and value_name("w") == "w"
    assert value_name("state['a@b']@3") == "state['a@b']"


def test_microbatches_that_the_same_meshes_read_are_one_value():
    order = check_schedule(
        schedule(
            (run("a", ("w", "x@0", "x@1", "y@0")),),
            (run("b", ("x@1", "n@0", "n@2", "m")), run("c", ("x@0", "y@1", "m@0"))),
        )
    )
    assert order.microbatches == {"x": ("x@0", "x@1")}  # not y, of which each reads another
    assert order.reading("x") == (0, 1) and order.reading("w") == (0,) and not order.reading("y")
    assert order.values == (("w", "x", "y@0"), ("x", "n@0", "n@2", "m", "y@1", "m@0"))

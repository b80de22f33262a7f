import pytest

from alpa_interchange.schedule import Instruction, PipelineSchedule
from mesh_runtime import check_schedule
from mesh_runtime.carry import check_outputs, with_carries


@pytest.fixture
def two():
    """Mesh 0 makes b from a; mesh 1 makes d from c and also reads a."""
    make = Instruction(kind="run", task="make", inputs=("a",), outputs=("b",))
    use = Instruction(kind="run", task="use", inputs=("c", "a"), outputs=("d",))
    return PipelineSchedule(
        name="two", num_stages=2, num_microbatches=1, programs=((make,), (use,))
    )


def test_an_output_on_the_mesh_of_its_input_moves_nothing(two):
    assert with_carries(two, check_schedule(two), {"d": "c"}) is two


def test_an_output_needed_on_another_mesh_is_sent_there_at_the_end(two):
    extended = with_carries(two, check_schedule(two), {"b": "a"})
    assert [each.kind for each in extended.programs[0]] == ["run", "send"]
    assert [each.kind for each in extended.programs[1]] == ["run", "receive"]
    assert "b" in check_schedule(extended).remaining[1]


def test_carries_that_cannot_be_are_refused(two):
    order = check_schedule(two)
    with pytest.raises(ValueError, match="'x' .to become 'a'. is on no mesh after the step"):
        check_outputs(order, (), {"x": "a"}, {}, 1)
    with pytest.raises(ValueError, match="'y' .to be replaced by 'b'. is an input of no mesh"):
        check_outputs(order, (), {"b": "y"}, {}, 1)
    with pytest.raises(ValueError, match=r"two outputs to the inputs \['a'\]"):
        check_outputs(order, (), {"b": "a", "d": "a"}, {}, 1)
    with pytest.raises(ValueError, match="output 'z' is on no mesh"):
        check_outputs(order, ("z",), {}, {}, 1)
    with pytest.raises(
        ValueError, match="joined output 'z': no mesh holds z@0, z@1 after the step"
    ):
        check_outputs(order, (), {}, {"z": 0}, 2)

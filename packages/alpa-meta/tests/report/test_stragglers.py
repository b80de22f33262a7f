from alpa_meta.report.step_parts import StepParts
from alpa_meta.report.stragglers import Stragglers


def parts(*busy):
    longest = max(busy)
    return {
        mesh: StepParts(compute=one, update=0.0, transfer=0.0, bubble=longest - one)
        for mesh, one in enumerate(busy)
    }


def test_a_mesh_that_takes_twice_as_long_for_several_steps_is_named_with_its_share():
    watch = Stragglers()
    for _ in range(10):
        assert watch.note(parts(1.0, 1.5)) == []
    assert watch.note(parts(2.0, 1.5)) == []  # once may be anything
    assert watch.note(parts(1.0, 1.5)) == []
    assert watch.note(parts(2.0, 1.5)) == [] and watch.note(parts(2.0, 1.5)) == []
    (slow,) = watch.note(parts(2.0, 1.5))
    assert slow.mesh == 0 and slow.times == 2.0 and slow.share == 1.0
    assert "mesh 0 takes 2.0 times as long as before and computes 100% of the step" in str(slow)
    assert len(watch.note(parts(2.0, 1.5))) == 1
    assert watch.note(parts(1.0, 1.5)) == []


def test_a_machine_on_which_all_are_slow_has_no_straggler():
    watch = Stragglers()
    for _ in range(10):
        watch.note(parts(1.0, 1.5))
    assert all(watch.note(parts(2.0, 3.0)) == [] for _ in range(5))


def test_a_mesh_that_stays_slow_does_not_become_the_usual():
    watch = Stragglers()
    for _ in range(10):
        watch.note(parts(1.0, 1.5))
    found = [watch.note(parts(2.0, 1.5)) for _ in range(100)]
    assert all(len(one) == 1 for one in found[2:])

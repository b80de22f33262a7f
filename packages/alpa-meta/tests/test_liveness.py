"""When values hold memory: lifetimes, fusion, and lifetimes of what fused readers read."""

from alpa_interchange import ShardingSpec
from alpa_meta.liveness import Timeline
from alpa_meta.stage_problem import Source


def value(size=8.0):
    return Source(0, (ShardingSpec(((),)),), (int(size),), size)


def spans(timeline):
    return {id(span.source): (span.start, span.stop) for span in timeline.spans()}


def test_a_stored_value_lives_to_its_last_reader():
    timeline, first, second = Timeline(), value(), value()
    timeline.advance("forward")
    timeline.compute("dot_general", [], [first])
    timeline.advance("forward")
    timeline.compute("dot_general", [first], [second])
    timeline.advance("forward")
    timeline.compute("dot_general", [first, second], [value()])
    found = spans(timeline)
    assert found[id(first)] == (1, 4)
    assert found[id(second)] == (2, 4)


def test_an_elementwise_value_is_not_stored_and_its_operand_waits_for_its_readers():
    timeline, product, light = Timeline(), value(), value()
    timeline.advance("forward")
    timeline.compute("dot_general", [], [product])
    timeline.advance("forward")
    timeline.compute("tanh", [product], [light])
    for _ in range(3):
        timeline.advance("forward")
    timeline.compute("reduce_sum", [light], [value(1.0)])
    found = spans(timeline)
    assert id(light) not in found
    assert found[id(product)] == (1, 6)


def test_an_elementwise_value_that_a_heavy_operator_reads_takes_its_operands_place():
    timeline, product, light = Timeline(), value(), value()
    timeline.advance("forward")
    timeline.compute("dot_general", [], [product])
    timeline.advance("forward")
    timeline.compute("tanh", [product], [light])
    timeline.advance("forward")
    timeline.compute("dot_general", [light], [value()])
    found = spans(timeline)
    assert found[id(product)] == (1, 2)
    assert found[id(light)] == (2, 4)


def test_a_sum_of_two_tensors_that_is_read_twice_is_stored_one_read_once_is_not():
    for readers, stored in ((1, False), (2, True)):
        timeline, one, two, total = Timeline(), value(), value(), value()
        for source in (one, two):
            timeline.advance("forward")
            timeline.compute("dot_general", [], [source])
        timeline.advance("forward")
        timeline.compute("add", [one, two], [total])
        for _ in range(readers):
            timeline.advance("forward")
            timeline.compute("reduce_sum", [total], [value(1.0)])
        assert (id(total) in spans(timeline)) is stored


def test_a_name_of_a_value_keeps_the_value():
    timeline, product, name = Timeline(), value(), value()
    timeline.advance("forward")
    timeline.compute("dot_general", [], [product])
    timeline.advance("forward")
    timeline.compute("reshape", [product], [name])
    timeline.advance("backward")
    timeline.compute("dot_general", [name], [value()])
    found = spans(timeline)
    assert id(name) not in found
    assert found[id(product)] == (1, 4)


def test_what_is_written_over_an_input_takes_no_memory():
    timeline, new = Timeline(), value()
    timeline.advance("update")
    timeline.compute("dot_general", [], [new])
    timeline.replace(new)
    assert not timeline.spans()

"""When values hold memory: lifetimes, fusion, and lifetimes of what fused readers read."""

from alpa_interchange import ShardingSpec
from alpa_meta.intra_op.liveness import Timeline
from alpa_meta.intra_op.stage_problem import Source


def value(size=8.0):
    return Source(0, (ShardingSpec(((),)),), (int(size),), size)


def spans(timeline):
    return {span.source: (span.start, span.stop) for span in timeline.spans()}


def test_a_stored_value_lives_to_its_last_reader():
    timeline, first, second = Timeline(), value(), value()
    timeline.advance("forward")
    timeline.compute("stored", [], [first])
    timeline.advance("forward")
    timeline.compute("stored", [first], [second])
    timeline.advance("forward")
    timeline.compute("stored", [first, second], [value()])
    found = spans(timeline)
    assert found[first] == (1, 4)
    assert found[second] == (2, 4)


def test_an_elementwise_value_is_not_stored_and_its_operand_waits_for_its_readers():
    timeline, product, light = Timeline(), value(), value()
    timeline.advance("forward")
    timeline.compute("stored", [], [product])
    timeline.advance("forward")
    timeline.compute("fused", [product], [light])
    for _ in range(3):
        timeline.advance("forward")
    timeline.compute("reduced", [light], [value(1.0)])
    found = spans(timeline)
    assert light not in found
    assert found[product] == (1, 6)


def test_an_elementwise_value_that_a_heavy_operator_reads_takes_its_operands_place():
    timeline, product, light = Timeline(), value(), value()
    timeline.advance("forward")
    timeline.compute("stored", [], [product])
    timeline.advance("forward")
    timeline.compute("fused", [product], [light])
    timeline.advance("forward")
    timeline.compute("stored", [light], [value()])
    found = spans(timeline)
    assert found[product] == (1, 2)
    assert found[light] == (2, 4)


def test_a_sum_of_two_tensors_that_is_read_twice_is_stored_one_read_once_is_not():
    for readers, stored in ((1, False), (2, True)):
        timeline, one, two, total = Timeline(), value(), value(), value()
        for source in (one, two):
            timeline.advance("forward")
            timeline.compute("stored", [], [source])
        timeline.advance("forward")
        timeline.compute("fused", [one, two], [total])
        for _ in range(readers):
            timeline.advance("forward")
            timeline.compute("reduced", [total], [value(1.0)])
        assert (total in spans(timeline)) is stored


def test_a_tensor_with_a_mean_taken_off_is_computed_again_by_all_its_readers():
    timeline, product, mean, centred = Timeline(), value(), value(1.0), value()
    for source in (product, mean):
        timeline.advance("forward")
        timeline.compute("stored", [], [source])
    timeline.advance("forward")
    timeline.compute("fused", [product, mean], [centred])
    for _ in range(3):
        timeline.advance("forward")
        timeline.compute("reduced", [centred], [value(1.0)])
    found = spans(timeline)
    assert centred not in found
    assert found[product] == (1, 7)


def test_what_is_written_into_a_value_takes_its_place_unless_it_is_read_later():
    for later, stop in ((False, 3), (True, 5)):
        timeline, whole, update, updated = Timeline(), value(), value(), value()
        for source in (update, whole):
            timeline.advance("forward")
            timeline.compute("stored", [], [source])
        timeline.advance("forward")
        timeline.compute("written", [whole, update], [updated])
        timeline.advance("forward")
        timeline.compute("stored", [updated, whole] if later else [updated], [value()])
        found = spans(timeline)
        assert found[whole] == (2, stop)
        assert found[updated] == (3, 5)
        assert found[update] == (1, 4)


def test_a_dear_value_is_stored_on_hosts_if_several_kernels_would_compute_it():
    for on_host, readers, stored in ((True, 2, True), (True, 1, False), (False, 2, False)):
        timeline, product, light = Timeline(on_host=on_host), value(), value()
        timeline.advance("forward")
        timeline.compute("stored", [], [product])
        timeline.advance("forward")
        timeline.compute("fused", [product], [light], dear=True)
        for _ in range(readers):
            timeline.advance("forward")
            timeline.compute("reduced", [light], [value(1.0)])
        assert (light in spans(timeline)) is stored


def test_a_mask_is_found_again_by_all_its_readers_on_hosts():
    for on_host in (True, False):
        bits, mask = Source(0, (ShardingSpec(((),)),), (8,), 32.0), value()
        timeline = Timeline(on_host=on_host)
        timeline.advance("forward")
        timeline.compute("stored", [], [bits])
        timeline.advance("forward")
        timeline.compute("fused", [bits], [mask])
        for phase in ("forward", "backward"):
            timeline.advance(phase)
            timeline.compute("reduced", [mask], [value(1.0)])
        found = spans(timeline)
        assert found[bits] == ((1, 5) if on_host else (1, 3))
        assert (mask in found) is not on_host


def test_what_a_late_gradient_is_computed_from_lives_until_the_update_on_hosts():
    for on_host, stop in ((True, 6), (False, 3)):
        timeline, product, gradient, new = (
            Timeline(on_host=on_host),
            value(),
            value(4.0),
            value(4.0),
        )
        timeline.advance("forward")
        timeline.compute("stored", [], [product])
        timeline.advance("backward")
        timeline.compute("stored", [product], [gradient], late=True)
        for _ in range(3):
            timeline.advance("backward")
        timeline.advance("update")
        timeline.compute("fused", [gradient], [new])
        timeline.replace(new, value())
        found = spans(timeline)
        assert found[product] == (1, stop)
        assert found[gradient] == (5 if on_host else 2, 7)


def test_gradients_take_the_place_of_arrays_that_a_step_on_hosts_copies():
    timeline, state, gradient, new = Timeline(on_host=True, whole_step=True), *map(value, [8.0] * 3)
    timeline.advance("forward")
    timeline.store_copy(state)
    timeline.compute("stored", [state], [value(4.0)])
    timeline.advance("backward")
    timeline.compute("stored", [], [gradient], late=True)
    timeline.advance("update")
    timeline.compute("fused", [state, gradient], [new])
    timeline.replace(new, state)
    found = spans(timeline)
    assert found[state] == (1, 4)
    assert gradient not in found


def test_a_name_of_a_value_keeps_the_value():
    timeline, product, name = Timeline(), value(), value()
    timeline.advance("forward")
    timeline.compute("stored", [], [product])
    timeline.advance("forward")
    timeline.compute("alias", [product], [name])
    timeline.advance("backward")
    timeline.compute("stored", [name], [value()])
    found = spans(timeline)
    assert name not in found
    assert found[product] == (1, 4)


def test_what_is_written_over_an_input_takes_no_memory():
    timeline, new = Timeline(), value()
    timeline.advance("update")
    timeline.compute("stored", [], [new])
    timeline.replace(new, value())
    assert not timeline.spans()


def test_buffers_that_begin_as_zeros_are_born_with_the_first_of_their_shape():
    timeline, first, second, other = Timeline(), value(), value(), value(9.0)
    for source in (first, other, second):
        for _ in range(3):
            timeline.advance("forward")
        timeline.store_zeros(source)
        timeline.hold([source])
    found = spans(timeline)
    assert found[first] == (3, 4)
    assert found[other] == (6, 7)
    assert found[second] == (3, 10)


def test_zeros_of_another_computation_are_other_zeros():
    timeline, outside, inside = Timeline(), value(), value()
    timeline.advance("forward")
    timeline.store_zeros(outside)
    outer = timeline.enter()
    timeline.advance("forward")
    timeline.store_zeros(inside)
    timeline.leave(outer)
    assert spans(timeline)[inside] == (2, 3)


def test_zeros_that_are_read_live_beside_the_buffers_made_from_them():
    timeline, product, light, gradient, scattered = (
        Timeline(),
        value(),
        value(),
        value(4.0),
        value(),
    )
    timeline.advance("forward")
    timeline.compute("stored", [], [product])
    timeline.advance("forward")
    timeline.compute("fused", [product], [light], reads_zero=True)
    timeline.advance("backward")
    timeline.compute("stored", [light], [gradient])
    timeline.advance("backward")
    timeline.compute("windows", [gradient, light], [scattered])
    found = [(span.source.bytes, span.start, span.stop) for span in timeline.spans()]
    assert found.count((8.0, 2, 5)) == 3  # zeros, what is scattered into, and what max returns
    assert (4.0 + 4.0 * 4, 4, 5) in found  # extremes and one position each


def test_extremes_are_found_in_one_kernel_on_gpus_and_before_the_scatter_on_hosts():
    for on_host in (False, True):
        timeline = Timeline(on_host=on_host)
        product, light, scattered = (value() for _ in range(3))
        timeline.advance("forward")
        timeline.compute("stored", [], [product])
        timeline.advance("forward")
        timeline.compute("fused", [product], [light])
        timeline.advance("backward")
        timeline.compute("windows", [value(4.0), light], [scattered])
        found = timeline.spans()
        assert any(span.source is light for span in found) == on_host
        # beside the result: positions in its 8 elements of one dim, less what is not there yet
        held = sum(span.source.bytes for span in found if span.start <= 3 < span.stop)
        assert held == ((8.0 + 4.0 * 8 + 4.0 + 4.0 * 4) if on_host else 8.0 + 8.0 + 4.0 + 4.0 * 4)


def test_a_value_takes_the_place_of_what_its_kernel_reads_though_what_is_between_is_wider():
    timeline, narrow, wide, last = Timeline(), value(8.0), value(16.0), value(8.0)
    timeline.advance("forward")
    timeline.compute("stored", [], [narrow])
    for operand, result in ((narrow, wide), (wide, last)):
        timeline.advance("forward")
        timeline.compute("fused", [operand], [result])
    timeline.advance("forward")
    timeline.compute("stored", [last], [value()])
    found = spans(timeline)
    assert found[narrow] == (1, 3)
    assert found[last] == (3, 5)

"""When values hold memory: lifetimes, fusion, and lifetimes of what fused readers read."""

from alpa_interchange import ShardingSpec
from alpa_meta.intra_op.liveness import Timeline
from alpa_meta.intra_op.stage_problem import Source


def value(size=8.0):
    return Source(0, (ShardingSpec(((),)),), (int(size),), size)


def elements(count, size):
    """Return a value of `count` elements of `size` bytes."""
    return Source(0, (ShardingSpec(((),)),), (count,), float(size * count))


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


def test_a_result_of_a_program_is_set_aside_before_it_runs_though_it_is_computed_late():
    timeline, product, gradient = Timeline(on_host=True), value(), value(4.0)
    timeline.advance("backward")
    timeline.compute("stored", [], [product])
    timeline.advance("backward")
    timeline.compute("stored", [product], [gradient], late=True)
    timeline.advance("backward")
    timeline.hold([gradient])
    timeline.leave_program([gradient], began=1)
    assert spans(timeline)[gradient] == (1, 4)


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


def test_the_loss_is_computed_last_on_hosts():
    for on_host, stop in ((True, 7), (False, 5)):
        timeline, logits, loss = Timeline(on_host=on_host, whole_step=True), value(), value(1.0)
        timeline.advance("forward")
        timeline.compute("stored", [], [logits])
        timeline.advance("forward")
        timeline.compute("reduced", [logits], [loss], late=True)
        timeline.advance("update")
        timeline.compute("fused", [loss], [value(1.0)])
        timeline.advance("backward")
        timeline.compute("reduced", [logits], [value(1.0)])
        timeline.advance("backward")
        timeline.advance("backward")
        assert spans(timeline)[logits] == (1, stop)


def test_padded_values_of_a_sum_are_stored_apart_where_two_kernels_read_it_on_hosts():
    for on_host, readers in ((True, 1), (True, 2), (False, 2)):
        timeline, parts = Timeline(on_host=on_host), [value(4.0), value(4.0)]
        padded, total = [value(), value()], value()
        timeline.advance("forward")
        timeline.compute("stored", [], parts)
        for part, one in zip(parts, padded, strict=True):
            timeline.advance("forward")
            timeline.compute("fused", [part], [one], apart=True)
        timeline.advance("forward")
        timeline.compute("fused", padded, [total])
        for _ in range(readers):
            timeline.advance("forward")
            timeline.compute("reduced", [total], [value(1.0)])
        found = spans(timeline)
        assert (set(padded) <= set(found)) is (on_host and readers == 2)
        assert total not in found


def test_a_slice_is_computed_in_all_its_readers_on_hosts():
    for on_host in (True, False):
        timeline, product, part = Timeline(on_host=on_host), elements(16, 4), elements(8, 4)
        timeline.advance("forward")
        timeline.compute("stored", [], [product])
        timeline.advance("forward")
        timeline.compute("fused", [product], [part])
        for phase in ("forward", "backward"):
            timeline.advance(phase)
            timeline.compute("reduced", [part], [value(1.0)])
        assert (part in spans(timeline)) is not on_host


def test_what_many_slices_are_taken_of_is_stored_on_hosts():
    for on_host, count in ((True, 3), (True, 4), (False, 4)):
        timeline, product, whole = Timeline(on_host=on_host), value(16.0), value(16.0)
        timeline.advance("forward")
        timeline.compute("stored", [], [product])
        timeline.advance("forward")
        timeline.compute("fused", [product], [whole])
        for _ in range(count):
            part = value(4.0)
            timeline.advance("forward")
            timeline.compute("fused", [whole], [part])
            timeline.compute("reduced", [part], [value(1.0)])
        assert (whole in spans(timeline)) is (on_host and count == 4)


def test_random_bits_are_two_words_an_element_on_hosts():
    for on_host, size in ((True, 64.0), (False, 32.0)):
        bits = Source(0, (ShardingSpec(((),)),), (8,), 32.0)
        timeline = Timeline(on_host=on_host)
        timeline.advance("forward")
        timeline.compute("words", [], [bits])
        assert [span.source.bytes for span in timeline.spans()] == [size]


ROWS = ((), (0,), ())  # how a product takes a vector


def test_a_product_that_several_read_is_held_as_two_bytes_an_element():
    for readers, held in ((1, [(32.0, 1, 3)]), (2, [(16.0, 1, 4), (32.0, 1, 2)])):
        timeline, left, product = Timeline(on_host=True), elements(4, 4), elements(8, 2)
        timeline.store(left)
        timeline.advance("forward")
        timeline.compute("stored", [left], [product], matrices=[ROWS])
        for _ in range(readers):
            timeline.advance("forward")
            timeline.compute("reduced", [product], [elements(1, 4)])
        found = [(s.source.bytes, s.start, s.stop) for s in timeline.spans() if s.start == 1]
        assert sorted(found) == held


def test_a_product_reads_what_was_rounded_for_it():
    timeline, whole, rounded = Timeline(on_host=True), elements(8, 4), elements(8, 2)
    timeline.advance("forward")
    timeline.compute("stored", [], [whole])
    timeline.advance("forward")
    timeline.compute("fused", [whole], [rounded])
    timeline.advance("forward")
    timeline.compute("stored", [rounded], [elements(2, 4)], matrices=[ROWS])
    found = sorted((span.source.bytes, span.start, span.stop) for span in timeline.spans())
    assert found == [(8.0, 3, 4), (32.0, 1, 4)]


def test_what_only_the_end_of_a_trip_waits_for_is_put_off_if_it_reads_copies_on_hosts():
    turned, straight = ((), (2,), (0, 1)), ((), (0, 1), (2,))
    for on_host, matrix, stop in ((True, turned, 6), (True, straight, 3), (False, turned, 3)):
        timeline, kept = Timeline(on_host=on_host), value()
        read = Source(0, (ShardingSpec(((), (), ())),), (2, 2, 2), 32.0)
        gradient = elements(2, 4)
        timeline.store(kept)
        timeline.advance("backward")
        timeline.compute("reduced", [kept], [read])
        timeline.advance("backward")
        timeline.compute("stored", [read], [gradient], matrices=[matrix], ends_trip=True)
        for _ in range(3):
            timeline.advance("backward")
        timeline.hold([gradient])
        assert (1, stop) in [(s.start, s.stop) for s in timeline.spans() if s.source is read]


def test_what_is_gathered_from_a_light_value_is_computed_from_its_operand():
    timeline, product, light = Timeline(), value(), value()
    timeline.advance("forward")
    timeline.compute("stored", [], [product])
    timeline.advance("forward")
    timeline.compute("fused", [product], [light])
    timeline.advance("forward")
    timeline.compute("gathered", [light], [value(1.0)])
    found = spans(timeline)
    assert light not in found
    assert found[product] == (1, 4)

"""The last array is updated first, where gradients wait for the update."""

from alpa_interchange import ShardingSpec
from alpa_meta.intra_op.liveness import Timeline
from alpa_meta.intra_op.stage_problem import Source


def value(size=8.0):
    return Source(0, (ShardingSpec(((),)),), (int(size),), size)


def two_updates(*, late=True, doublings=8):
    """Return when the operands of two gradients, of the first array and of the last, are held."""
    timeline, chain = Timeline(on_host=True, whole_step=True), value()
    timeline.advance("forward")
    timeline.compute("stored", [], [chain])
    for _ in range(doublings):  # each has as many paths to it as there are to its operand twice
        doubled = value()
        timeline.advance("forward")
        timeline.compute("stored", [chain, chain], [doubled])
        chain = doubled
    kept, gradients = [value(), value()], [value(1.0), value(1.0)]
    for one, gradient in zip(kept, gradients, strict=True):
        timeline.advance("backward")
        timeline.compute("stored", [chain], [one])
        timeline.advance("backward")
        timeline.compute("stored", [one], [gradient], late=late)
    for gradient in gradients:
        state, new = value(1.0), value(1.0)
        timeline.advance("update")
        timeline.compute("fused", [state, gradient], [new])
        timeline.replace(new, state)
    found = {span.source: span.stop for span in timeline.spans()}
    return [found[one] - timeline.now for one in kept]


def test_the_last_array_is_updated_first_in_large_programs():
    assert two_updates() == [0, -1]


def test_small_programs_update_arrays_in_their_order():
    assert two_updates(doublings=1) == [-1, 0]


def test_gradients_that_do_not_wait_for_the_update_keep_their_order():
    first, last = two_updates(late=False)
    assert first < last < 0

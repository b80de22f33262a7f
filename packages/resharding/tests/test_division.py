from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from resharding.bound import receive_seconds
from resharding.division import Delivery, divided
from resharding.minimum_cut import send_seconds
from resharding.slices import Box, Slice

LENGTH = 10_000  # elements of a slice along its one dim: cuts are exact to 1e-4


@st.composite
def delivery_lists(draw):
    found = []
    for k in range(draw(st.integers(1, 7))):
        size = float(draw(st.integers(1, 9)))
        senders = tuple(sorted(draw(st.sets(st.integers(0, 3), min_size=1))))
        receiver = 10 + draw(st.integers(0, 3))
        piece = Slice(
            box=Box((k * LENGTH,), ((k + 1) * LENGTH,)),
            num_bytes=size,
            holders=senders,
            receivers=(receiver,),
            in_place=(),
        )
        found.append(Delivery(piece, senders, (receiver,), remote=True))
    return found


def lanes_of(delivery, sender):
    return frozenset((sender, *delivery.receivers))


def rate_of(delivery, sender):
    return 1.0


def makespan(chosen):
    free: dict[int, float] = {}
    for delivery, sender in chosen:
        lanes = lanes_of(delivery, sender)
        stop = max(free.get(lane, 0.0) for lane in lanes) + delivery.piece.num_bytes
        free.update(dict.fromkeys(lanes, stop))
    return max(free.values())


@settings(max_examples=200, deadline=None, derandomize=True)
@given(delivery_lists())
def test_parts_with_one_sender_and_one_receiver_end_at_the_bound(deliveries):
    outgoing: dict[frozenset[int], float] = {}
    incoming: dict[int, float] = {}
    for each in deliveries:
        key = frozenset(each.senders)
        outgoing[key] = outgoing.get(key, 0.0) + each.piece.num_bytes
        to = each.receivers[0]
        incoming[to] = incoming.get(to, 0.0) + each.piece.num_bytes
    ones = dict.fromkeys(range(20), 1.0)
    bound = max(send_seconds(outgoing, ones), receive_seconds(incoming, ones))
    seconds = makespan(divided(deliveries, lanes_of, rate_of))
    assert bound * (1 - 2e-3) <= seconds <= bound * (1 + 5e-3)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(delivery_lists())
def test_the_parts_of_a_slice_are_the_slice(deliveries):
    parts: dict[int, list[tuple[int, int]]] = {}
    for part, sender in divided(deliveries, lanes_of, rate_of):
        assert sender in part.senders
        start, stop = part.piece.box.start[0], part.piece.box.stop[0]
        parts.setdefault(start // LENGTH, []).append((start, stop))
    for k in range(len(deliveries)):
        ends = sorted(parts[k])
        assert ends[0][0] == k * LENGTH and ends[-1][1] == (k + 1) * LENGTH
        assert all(a[1] == b[0] for a, b in zip(ends, ends[1:], strict=False))


def test_wide_deliveries_that_share_a_receiver_run_one_after_the_other():
    def wide(k, sender, receivers):
        box = Box((k * LENGTH,), ((k + 1) * LENGTH,))
        piece = Slice(box=box, num_bytes=1.0, holders=(sender,), receivers=receivers, in_place=())
        return Delivery(piece, (sender,), receivers, remote=True)

    # three pairs of three receivers: no two are disjoint, so 3 s though each lane works 2 s
    pairs = [wide(0, 0, (10, 11)), wide(1, 1, (11, 12)), wide(2, 2, (10, 12))]
    assert makespan(divided(pairs, lanes_of, rate_of)) == 3.0


def test_a_scalar_is_sent_whole():
    piece = Slice(box=Box((), ()), num_bytes=4.0, holders=(0, 1), receivers=(10,), in_place=())
    deliveries = [
        Delivery(piece, (0, 1), (10,), remote=True),
        Delivery(evolve(piece, num_bytes=1.0), (0, 1), (11,), remote=True),
    ]
    chosen = divided(deliveries, lanes_of, rate_of)
    assert sorted(part.receivers[0] for part, _ in chosen) == [10, 11]

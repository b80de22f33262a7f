"""Layers are whole repeated blocks, balanced, and there is always an answer."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_dp import OpSequence, cluster_layers, live_bytes


class Builder:
    """Writes a program op by op; values are numbered as they come."""

    def __init__(self):
        self.seconds, self.operands, self.results, self.signatures = [], [], [], []
        self.value_bytes = {}

    def value(self, size):
        self.value_bytes[len(self.value_bytes)] = size
        return len(self.value_bytes) - 1

    def op(self, name, operands, size, flops=0.0):
        result = self.value(size)
        self.seconds.append(flops)
        self.operands.append(tuple(operands))
        self.results.append((result,))
        self.signatures.append((name, size, flops))
        return result

    def sequence(self, **more):
        return OpSequence(
            seconds=self.seconds,
            operands=self.operands,
            results=self.results,
            value_bytes=self.value_bytes,
            signatures=self.signatures,
            **more,
        )


def transformer(num_blocks, *, head=0.5, shared_mask=False):
    """Return the program, and the op at which each block begins and the last one ends."""
    b = Builder()
    x = b.op("gather", [b.value(1000.0), b.value(1.0)], 10.0)
    x = b.op("add", [x, b.value(10.0)], 10.0)
    mask = b.op("iota", [], 5.0) if shared_mask else None
    starts = []
    for block in range(num_blocks):
        starts.append(len(b.seconds))
        h = b.op("norm", [x], 10.0)
        qkv = b.op("matmul", [h, b.value(300.0)], 30.0, 3.0)
        scores = b.op("scores", [qkv], 40.0, 1.0)
        if shared_mask and block == 0:
            mask = b.op("compare", [mask], 5.0)
        if mask is not None:
            scores = b.op("mask", [scores, mask], 40.0)
        h = b.op("matmul", [scores, b.value(100.0)], 10.0, 2.0)
        x = b.op("add", [x, h], 10.0)
        h = b.op("norm", [x], 10.0)
        h = b.op("matmul", [h, b.value(400.0)], 40.0, 4.0)
        h = b.op("gelu", [h], 40.0)
        h = b.op("matmul", [h, b.value(400.0)], 10.0, 4.0)
        x = b.op("add", [x, h], 10.0)
    starts.append(len(b.seconds))
    h = b.op("norm", [x], 10.0)
    logits = b.op("matmul", [h, b.value(1000.0)], 1000.0, 14.0 * head)
    b.op("loss", [logits], 1.0)
    return b.sequence(), starts


@pytest.mark.parametrize("shared_mask", [False, True])
def test_twelve_blocks_give_twelve_equal_layers(shared_mask):
    ops, starts = transformer(12, shared_mask=shared_mask)
    layers = cluster_layers(ops, 12)
    assert list(layers.starts) == [0, *starts[1:12], len(ops.seconds)]
    # The first has the embedding, the last the head; the ten between are alike.
    assert len(set(layers.equivalence_classes[1:-1])) == 1
    assert layers.boundary_bytes[3] == (15.0 if shared_mask else 10.0)


def test_thirteen_layers_give_a_head_of_a_block_s_work_its_own():
    ops, starts = transformer(12, head=1.0)
    layers = cluster_layers(ops, 13)
    assert list(layers.starts) == [0, *starts[1:], len(ops.seconds)]
    assert layers.equivalence_classes == (0, *[1] * 11, 2)


def test_a_heavy_head_becomes_a_layer_of_its_own_when_the_number_is_free():
    ops, starts = transformer(6, head=3.0)
    assert list(cluster_layers(ops).starts) == [0, *starts[1:], len(ops.seconds)]
    ops, starts = transformer(6, head=0.2)
    assert list(cluster_layers(ops).starts) == [0, *starts[1:-1], len(ops.seconds)]


@pytest.mark.parametrize(("num_layers", "blocks_each"), [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2)])
def test_layers_of_several_blocks_hold_whole_blocks(num_layers, blocks_each):
    ops, starts = transformer(12)
    layers = cluster_layers(ops, num_layers)
    assert list(layers.starts[1:-1]) == starts[blocks_each:12:blocks_each]


def test_more_layers_than_blocks_cut_every_block_alike():
    ops, starts = transformer(4, head=0.1)
    layers = cluster_layers(ops, 8)
    period = starts[1] - starts[0]
    inner = [s - starts[0] for s in layers.starts[1:-1]]
    assert sorted({s % period for s in inner})[0] == 0
    assert len({s % period for s in inner}) == 2
    assert layers.num_layers == 8


@pytest.mark.parametrize("num_blocks", [96, 192])
def test_every_block_of_a_deep_program_is_a_layer(num_blocks):
    ops, starts = transformer(num_blocks)
    layers = cluster_layers(ops)
    assert list(layers.starts[1:num_blocks]) == starts[1:num_blocks]
    assert len(set(layers.equivalence_classes)) <= 3


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(("num_blocks", "num_layers"), [(4, 6), (3, 5), (2, 7), (5, 6), (4, 11)])
def test_no_layer_is_left_without_work_where_there_are_more_layers_than_blocks(
    num_blocks, num_layers, skip
):
    ops, _ = transformer(num_blocks, head=0.1, shared_mask=skip)
    layers = cluster_layers(ops, num_layers)
    assert layers.num_layers == num_layers
    assert min(layers.seconds) >= 0.3 * sum(layers.seconds) / num_layers


def test_encoder_and_decoder_are_two_classes():
    b = Builder()
    x = b.op("embed", [b.value(1.0)], 8.0)
    for _ in range(4):
        h = b.op("wide", [x, b.value(10.0)], 20.0, 6.0)
        x = b.op("narrow", [h, b.value(10.0)], 8.0, 6.0)
    for _ in range(4):
        h = b.op("cross", [x, b.value(10.0)], 20.0, 4.0)
        h = b.op("mix", [h, b.value(10.0)], 20.0, 4.0)
        x = b.op("narrow", [h, b.value(10.0)], 8.0, 6.0)
    layers = cluster_layers(b.sequence())
    assert layers.num_layers == 8
    assert list(layers.starts[1:]) == [3, 5, 7, 9, 12, 15, 18, 21]
    assert len(set(layers.equivalence_classes)) <= 4


def test_unbalanced_programs_on_which_a_hard_limit_fails_are_clustered():
    # 8 equal matmuls in 3 or 6 layers, 7 in 2: a limit of 1.1 times the average has no solution.
    for num_ops, num_layers, most in [(8, 3, 3), (8, 6, 2), (7, 2, 4)]:
        b = Builder()
        x = b.value(4.0)
        for _ in range(num_ops):
            x = b.op("matmul", [x, b.value(16.0)], 4.0, 1.0)
        layers = cluster_layers(b.sequence(), num_layers)
        assert layers.num_layers == num_layers
        assert max(layers.seconds) == most


def test_trailing_cheap_ops_do_not_pull_the_cut():
    b = Builder()
    x = b.value(4.0)
    for _ in range(8):
        x = b.op("matmul", [x, b.value(16.0)], 4.0, 1.0)
    for _ in range(9):
        x = b.op("loss", [x], 4.0)
    assert cluster_layers(b.sequence(), 2).seconds == (4.0, 4.0)


def test_atomic_regions_are_not_cut():
    ops, starts = transformer(4)
    may_cut = [k in (starts[0], starts[2], starts[4]) for k in range(len(ops.seconds))]
    limited = OpSequence(
        seconds=ops.seconds, operands=ops.operands, results=ops.results,
        value_bytes=ops.value_bytes, signatures=ops.signatures, may_cut=may_cut,
    )  # fmt: skip
    assert set(cluster_layers(limited, 4).starts[1:-1]) <= {starts[0], starts[2], starts[4]}


def test_live_bytes_count_a_value_until_its_last_reader():
    b = Builder()
    x = b.op("a", [b.value(9.0)], 1.0)
    y = b.op("b", [x], 2.0)
    b.op("c", [y, x], 4.0)
    assert live_bytes(b.sequence()).tolist() == [0.0, 1.0, 3.0, 0.0]


@settings(derandomize=True, max_examples=80, deadline=None)
@given(data=st.data(), num_ops=st.integers(1, 9), num_layers=st.integers(1, 12))
def test_there_is_always_an_answer_and_layers_cover_all_ops(data, num_ops, num_layers):
    b = Builder()
    values = [b.value(3.0)]
    for k in range(num_ops):
        reads = data.draw(st.lists(st.sampled_from(values), max_size=2))
        flops = data.draw(st.sampled_from([0.0, 0.0, 1.0, 5.0]))
        values.append(b.op(data.draw(st.sampled_from("ab")), reads, 1.0 + k, flops))
    layers = cluster_layers(b.sequence(), num_layers)
    assert layers.num_layers == min(num_layers, num_ops)
    assert layers.starts[0] == 0
    assert layers.starts[-1] == num_ops
    assert all(a < b for a, b in itertools.pairwise(layers.starts))
    assert len(layers.layer_of_op) == num_ops
    assert sum(layers.seconds) == pytest.approx(sum(b.seconds))


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    flops=st.lists(st.floats(0.1, 10), min_size=2, max_size=8),
    sizes=st.lists(st.floats(0.1, 10), min_size=8, max_size=8),
    num_layers=st.integers(1, 4),
)
def test_cuts_are_the_best_of_all_cuts(flops, sizes, num_layers):
    """Brute force over all cuts of a chain of unlike ops, with the documented objective."""
    b = Builder()
    x = b.value(1.0)
    for k, work in enumerate(flops):
        x = b.op(f"op{k}", [x], sizes[k], work)
    num_layers = min(num_layers, len(flops))
    layers = cluster_layers(b.sequence(), num_layers)
    cost = objective(b.sequence(), num_layers)
    assert cost(layers.starts) == pytest.approx(min(map(cost, all_cuts(len(flops), num_layers))))


def all_cuts(num_ops, num_layers):
    for cuts in itertools.combinations(range(1, num_ops), num_layers - 1):
        yield (0, *cuts, num_ops)


def objective(ops, num_layers):
    """Return the documented sum as a function of where layers start."""
    live, seconds = live_bytes(ops), ops.seconds
    total = sum(seconds)
    before = [sum(seconds[:k]) for k in range(len(seconds) + 1)]
    middle = sorted(
        live[k]
        for k in range(len(seconds) + 1)
        if 0.1 * total < before[k] < 0.9 * total and live[k] > 0
    ) or sorted(v for v in live if v > 0)
    typical = (middle[(len(middle) - 1) // 2] + middle[len(middle) // 2]) / 2

    def cost(starts):
        value = sum(live[k] for k in starts[1:-1]) / (5 * typical)
        for a, b in itertools.pairwise(starts):
            w = sum(seconds[a:b]) * num_layers / total
            value += 10 * max(0, w - 1.5) ** 2 + 10 * max(0, 0.5 - w) ** 2 + (w - 1) ** 2 / 10
        return value

    return cost


@settings(derandomize=True, max_examples=150, deadline=None)
@given(
    block=st.lists(st.sampled_from([0.1, 1.0, 2.0, 4.0]), min_size=2, max_size=4),
    num_blocks=st.integers(2, 4),
    head=st.sampled_from([0.1, 1.0, 3.0]),
    num_layers=st.integers(1, 6),
)
def test_blocks_with_skip_connections_lose_little_to_the_best_of_all_cuts(
    block, num_blocks, head, num_layers
):
    """Cutting all blocks alike costs little of the documented sum, against all ways to cut."""
    b = Builder()
    x = b.op("embed", [b.value(1.0)], 4.0, 0.1)
    for _ in range(num_blocks):
        h = x
        for k, work in enumerate(block):
            h = b.op(f"op{k}", [h], 8.0, work)
        x = b.op("residual", [x, h], 4.0, 0.05)
    b.op("head", [x], 1.0, head)
    ops = b.sequence()
    num_layers = min(num_layers, len(ops.seconds))
    layers = cluster_layers(ops, num_layers)
    cost = objective(ops, num_layers)
    least = min(map(cost, all_cuts(len(ops.seconds), num_layers)))
    assert cost(layers.starts) <= 1.1 * least + 0.02


def test_lengths_must_agree():
    with pytest.raises(ValueError, match=r"OpSequence.operands needs one entry per op: 2, got 1"):
        OpSequence(seconds=[1.0, 1.0], operands=[()], results=[(), ()], value_bytes={})
    with pytest.raises(ValueError, match="at least 1"):
        cluster_layers(transformer(2)[0], 0)

"""Token slices against brute force, and TeraPipe's published cases."""

import itertools
import random

import numpy as np
import pytest

from stage_dp import InfeasibleError, TokenProblem, flow_seconds, slice_tokens


def all_plans(num_samples, cells, sizes):
    """Yield every list of units: ordered groups of samples, each with its own slices."""
    slicings = [
        list(itertools.pairwise((0, *cuts, cells)))
        for count in range(cells)
        for cuts in itertools.combinations(range(1, cells), count)
    ]

    def extend(units, left):
        if not left:
            yield units
        for b in range(1, min(sizes, left) + 1):
            for slicing in slicings:
                yield from extend(units + [(b, i, j) for i, j in slicing], left - b)

    yield from extend([], num_samples)


@pytest.mark.parametrize("seed", range(30))
def test_slices_of_equal_stages_are_the_best_of_all(seed):
    rng = random.Random(seed)
    sizes, cells, samples, stages = 2, 3, rng.randint(1, 3), rng.randint(1, 5)
    seconds = np.array(
        [[[rng.uniform(0.2, 1) for _ in range(cells + 1)] for _ in range(cells + 1)] for _ in
        range(sizes)]
    )  # fmt: skip
    best = min(
        sum(seconds[b - 1, i, j] for b, i, j in units)
        + (stages - 1) * max(seconds[b - 1, i, j] for b, i, j in units)
        for units in all_plans(samples, cells, sizes)
    )
    plan = slice_tokens(
        TokenProblem(seconds=seconds, num_samples=samples, stage_scale=(1.0,) * stages)
    )
    assert plan.step_seconds == pytest.approx(best)
    assert plan.lower_bound == pytest.approx(best)


@pytest.mark.parametrize("seed", range(15))
def test_unequal_stages_are_scored_by_the_longest_path(seed):
    rng = random.Random(seed)
    seconds = np.array(
        [[[0.1 + 0.3 * (j - i) + rng.uniform(0, 0.1) for j in range(4)] for i in range(4)]]
    )
    scale = tuple(rng.uniform(0.5, 1.0) for _ in range(3))
    plan = slice_tokens(TokenProblem(seconds=seconds, num_samples=2, stage_scale=scale))
    scored = [
        flow_seconds(np.array([[s * seconds[0, i, j] for _, i, j in units] for s in scale]))
        for units in all_plans(2, 3, 1)
    ]
    assert plan.lower_bound <= min(scored) * (1 + 1e-9)
    assert min(scored) * (1 - 1e-9) <= plan.step_seconds <= min(scored) * 1.05


def test_flow_of_equal_stages_is_the_sum_plus_the_slowest_unit_for_each_other_stage():
    units = [1.0, 3.0, 2.0]
    assert flow_seconds([units] * 4) == pytest.approx(sum(units) + 3 * max(units))


def published(layers, hidden, stages, tensor_parallel, samples, length, whole, slices, sliced):
    """Return a TeraPipe case from its two published latencies, and k of its model.

    One stage's seconds for s tokens after c: n (a + k 3 s (24 H^2 + 4 H (s + c)) / M), n layers per
    stage, with a (a floor per layer) and k (seconds per flop) from the latencies without slicing
    and with the published slices.
    """
    each = layers / stages

    def flops(start, stop):
        s = stop - start
        return 3 * s * (24 * hidden**2 + 4 * hidden * (s + start)) / tensor_parallel

    cuts = np.cumsum([0, *slices])
    work = [flops(i, j) for i, j in itertools.pairwise(cuts)]
    matrix = each * np.array(
        [
            [samples + stages - 1, (samples + stages - 1) * flops(0, length)],
            [samples * len(work) + stages - 1, samples * sum(work) + (stages - 1) * max(work)],
        ]
    )
    floor, rate = np.linalg.solve(matrix, [whole, sliced])
    cells = length // 8
    start, stop = np.meshgrid(np.arange(cells + 1) * 8, np.arange(cells + 1) * 8, indexing="ij")
    return TokenProblem(
        seconds=np.maximum(each * (floor + rate * flops(start, stop)), 0.0)[None],
        num_samples=samples,
        stage_scale=(1.0,) * stages,
        tokens_per_cell=8,
    )


@pytest.mark.parametrize(
    "case",
    [
        # Settings 10, 5, 8 and 9 of the paper, the ones without data parallelism.
        (96, 12288, 48, 8, 2, 2048, 5.822, [128] * 16, 1.160),
        (40, 5120, 40, 8, 32, 2048, 1.863, [704, 688, 656], 1.328),
        (96, 6144, 48, 8, 8, 2048, 2.662, [384, 384, 368, 320, 296, 296], 1.111),
        (96, 12288, 96, 4, 2, 2048, 9.990, [120] * 4 + [112] * 6 + [104] * 8 + [64], 1.481),
    ],
)
def test_published_cases_are_reached_or_beaten(case):
    plan = slice_tokens(published(*case))
    assert plan.step_seconds <= case[-1] * (1 + 1e-9)
    assert plan.step_seconds == pytest.approx(plan.lower_bound)
    assert all(sum(slices) == 2048 for _, slices in plan.groups)


@pytest.mark.parametrize(
    "hidden,length,samples,tensor_parallel,stages,each,floor,rate,original",
    [
        (12288, 2048, 2, 8, 48, 2, 3.8241648270426302e-3, 1.3780312754680692e-14, 1.16),
        (6144, 2048, 8, 8, 48, 2, 1.9252397260194024e-3, 1.9282321246826407e-14, 1.05196534961),
        (6144, 2048, 2, 1, 96, 1, 4.107156656422518e-2, 1.3617798758581215e-14, 5.83691188895),
        (2048, 2048, 16, 1, 24, 1, 7.074300497744137e-3, 3.649679417235721e-14, 1.23187007884),
        (5120, 4096, 8, 8, 40, 1, 1.5555317410436836e-3, 2.1618581529618676e-14, 0.78177443232),
        (5120, 8192, 2, 8, 40, 1, 1.5555317410436836e-3, 2.1618581529618676e-14, 0.49953910597),
        (2048, 2048, 16, 8, 24, 1, 0.005, 2e-14, 0.47717123097),
    ],
)
def test_the_original_programs_optimum_is_found(
    hidden, length, samples, tensor_parallel, stages, each, floor, rate, original
):
    # TeraPipe's latency_model.py on stages of n (a + k 3 s (24 H^2 + 4 H (s + c)) / M) seconds and
    # two transfers of s H values of 2 bytes, each 60 us and 25 Gb/s.
    position = np.arange(length // 8 + 1) * 8
    start, stop = np.meshgrid(position, position, indexing="ij")
    s = stop - start
    flops = 3 * s * (24 * hidden**2 + 4 * hidden * stop) / tensor_parallel
    transfers = 2 * (60e-6 + s * hidden * 2 / 3.125e9)
    seconds = np.where(s > 0, each * (floor + rate * flops) + transfers, 0.0)
    plan = slice_tokens(
        TokenProblem(
            seconds=seconds[None],
            num_samples=samples,
            stage_scale=(1.0,) * stages,
            tokens_per_cell=8,
        )
    )
    assert plan.step_seconds == pytest.approx(original, rel=1e-9)
    assert plan.step_seconds == pytest.approx(plan.lower_bound, rel=1e-12)


def linear(cells, **more):
    position = np.arange(cells + 1.0)
    seconds = 0.1 + (position[None, :] - position[:, None])
    both = np.stack([np.maximum(seconds, 0.0), np.maximum(2 * seconds, 0.0)])
    return TokenProblem(seconds=both, stage_scale=(1.0,) * 4, **more)


def test_a_batch_that_does_not_fit_runs_in_the_fewest_rounds():
    # 4 samples of 8 tokens at 1 byte each; 16 bytes hold two samples at a time.
    plan = slice_tokens(linear(8, num_samples=4, memory=17.0, token_bytes=1.0))
    assert plan.num_rounds == 2
    assert plan.peak_bytes == 16.0
    free = slice_tokens(linear(8, num_samples=4))
    assert free.num_rounds == 1
    assert free.step_seconds < plan.step_seconds


def test_units_too_large_for_the_memory_are_not_used():
    plan = slice_tokens(linear(8, num_samples=2, memory=3.0, unit_token_bytes=1.0))
    assert max(b * max(slices) for b, slices in plan.groups) <= 3


def test_missing_bytes_are_told():
    with pytest.raises(InfeasibleError, match="one sample") as caught:
        slice_tokens(linear(8, num_samples=2, memory=4.0, token_bytes=1.0))
    assert caught.value.missing_bytes == pytest.approx(4.0)


def test_tables_of_the_wrong_shape_are_refused():
    with pytest.raises(ValueError, match="must have shape"):
        TokenProblem(seconds=np.zeros((3, 3)), num_samples=1, stage_scale=(1.0,))

"""The bound of interleaved pipelines that keeps every run, against all of them."""

import itertools
import math

import numpy as np
import pytest
from attrs import evolve

from stage_dp import order, pipeline_time
from stage_dp.interleaved_order import interleaved_order
from stage_dp.interleaved_program import Layers, least_step

NAME = "interleaved-1f1b"


def follow_of(rng, sequence):
    """Return what layers after one of their class take more, and rows of them less."""
    parted = [a for a, b in itertools.pairwise(sequence) if a != b]
    together = [parted.count(c) + (c == sequence[-1]) == 1 for c in range(max(sequence) + 1)]
    return rng.uniform(0, [[0.3], [0.2]], (2, len(together))) * together


def random_layers(rng, sequence, rows):
    shape = (max(sequence) + 1, rows)
    forward, backward = rng.uniform(0.5, 1.5, shape), rng.uniform(0.5, 2.5, shape)
    return forward, Layers(
        seconds=forward + backward,
        step=rng.choice([0.0, 1.0, 4.0], shape),
        state=rng.uniform(0, 2, shape),
        activation=rng.uniform(0, 1, shape),
        forward=forward.min(axis=1),
        backward=backward.min(axis=1),
        number=np.bincount(sequence, minlength=shape[0]).astype(float),
        memory=float(rng.choice([math.inf, rng.uniform(8, 16)])),
        first=sequence[0],
        last=sequence[-1],
        follow=follow_of(rng, sequence),
    )


def best_of_all(forward, layers, sequence, runs, crossing):
    """Return the least step seconds of all cuts and rows that fit."""
    num, meshes = runs.num_stages, runs.num_meshes
    schedule = order(NAME, num, runs.num_microbatches, num_meshes=meshes)
    held = [schedule.in_flight(stage) for stage in range(num)]
    best = math.inf
    choices = list(itertools.product(range(forward.shape[1]), repeat=len(sequence)))
    for inner in itertools.combinations(range(1, len(sequence)), num - 1):
        cuts = (0, *inner, len(sequence))
        for rows in choices:
            own = [(sequence[a:b], rows[a:b]) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
            ahead, whole, step = ([x[at].sum() for at in own] for x in (
                forward, layers.seconds, layers.step))  # fmt: skip
            size = [
                (layers.state[at] + k * layers.activation[at]).sum()
                for at, k in zip(own, held, strict=True)
            ]
            if max(sum(size[m::meshes]) for m in range(meshes)) > layers.memory:
                continue
            for stage, (classes, _) in enumerate(own):
                for c in set(classes):
                    more = layers.follow[0, c] * (classes.count(c) - 1) - layers.follow[1, c]
                    whole[stage] += max(more, 0.0)
            seconds = pipeline_time(
                schedule,
                ahead,
                [t - f for t, f in zip(whole, ahead, strict=True)],
                [crossing] * (num - 1),
                [sum(step[m::meshes]) for m in range(meshes)],
            ).step_seconds
            best = min(best, seconds)
    return best


@pytest.mark.sample(seed=15)
@pytest.mark.parametrize("seed", range(40))
def test_no_pipeline_beats_the_program(seed):
    rng = np.random.default_rng(seed)
    meshes, chunks = [(2, 2), (2, 3), (3, 2)][rng.integers(3)]
    length = int(rng.integers(meshes * chunks, meshes * chunks + 3))
    rows = 2 if length < 7 else 1
    sequence = [0, *rng.integers(2, size=length - 2).tolist(), 1]
    crossing = float(rng.choice([0.0, 0.5]))
    forward, layers = random_layers(rng, sequence, rows)
    runs = interleaved_order(meshes, chunks, int(rng.integers(1, 6)))
    best = best_of_all(forward, layers, sequence, runs, crossing)
    free, whole = (least_step(layers, runs, [crossing] * meshes, own) for own in (False, True))
    assert free <= best * (1 + 1e-9)
    assert whole <= best * (1 + 1e-9)
    assert whole >= free * (1 - 1e-5) or math.isinf(whole)
    count = runs.num_microbatches
    for own in (False, True):
        assert least_step(layers, runs, [crossing] * meshes, own, count) <= best * (1 + 1e-9)


@pytest.mark.parametrize("count", [4, 16, 100])
def test_without_its_runs_the_program_keeps_work_layers_and_what_meshes_wait_for(count):
    rng = np.random.default_rng(3)
    forward, layers = random_layers(rng, [0] * 7, 1)
    layers = evolve(layers, memory=math.inf)
    runs = interleaved_order(2, 2, count)
    best = best_of_all(forward, layers, [0] * 7, runs, 3.0)
    bound = least_step(layers, runs, [3.0] * 2, True, count)
    # One mesh has four of the seven layers. The first of them may be that, and waits for two
    # crossings before its last chunk and two behind it.
    work = float(4 * count * layers.seconds[0, 0])
    assert work + 6 < bound <= best * (1 + 1e-9)
    assert least_step(layers, runs, [3.0] * 2, False, count) < bound


def test_of_as_many_stages_as_layers_the_program_is_the_longest_path():
    rng = np.random.default_rng(3)
    forward, layers = random_layers(rng, [0] * 4, 1)
    runs = interleaved_order(2, 2, 2)
    best = best_of_all(forward, layers, [0] * 4, runs, 0.25)
    assert least_step(layers, runs, [0.25] * 2, False) == pytest.approx(best, rel=1e-5)


def test_whole_layers_of_meshes_count():
    ones = np.ones((1, 1))
    layers = Layers(
        seconds=2 * ones,
        step=0 * ones,
        state=0 * ones,
        activation=0 * ones,
        forward=np.ones(1),
        backward=np.ones(1),
        number=np.array([5.0]),
        memory=math.inf,
        first=0,
        last=0,
        follow=np.zeros((2, 1)),
    )
    runs = interleaved_order(2, 2, 32)  # too many forwards for whole stages
    # One mesh has at least three of the five layers, for 32 microbatches.
    assert least_step(layers, runs, [0.0] * 2, True) >= 32 * 2 * 3 * (1 - 1e-5)
    assert least_step(layers, runs, [0.0] * 2, False) < 32 * 2 * 3


def test_what_fits_in_no_memory_takes_forever():
    rng = np.random.default_rng(0)
    _, layers = random_layers(rng, [0] * 4, 1)
    runs = interleaved_order(2, 2, 2)
    small = evolve(layers, memory=1e-3)
    assert math.isinf(least_step(small, runs, [0.0] * 2, False))


@pytest.mark.parametrize("seed", range(12))
def test_rows_that_are_sums_of_parts_bound_as_the_same_rows_with_one_that_never_pays(seed):
    # With it they are no longer all sums of parts.
    rng = np.random.default_rng(seed)
    classes, number = 2, np.array([1.0, float(rng.integers(7, 12))])
    parts, kept = rng.uniform(0.5, 2.0, (3, classes, 4)), rng.uniform(0.2, 1.0, (2, classes, 3))
    seconds, step, state = (part[:, :, None] for part in parts)
    again, activation = (part[:, None, :] for part in kept)
    sums = np.broadcast_arrays(seconds + again, 3 * step, state, activation)
    rows = [part.reshape(classes, -1) for part in sums]
    memory = float(rng.uniform(6, 14))

    def bound(rows, whole, count, runs):
        layers = Layers(
            **dict(zip(("seconds", "step", "state", "activation"), rows, strict=True)),
            forward=rows[0].min(axis=1) / 3,
            backward=rows[0].min(axis=1) / 2,
            number=number,
            memory=memory,
            first=0,
            last=1,
            follow=np.zeros((2, classes)),
        )
        return least_step(layers, runs, [0.1] * runs.num_meshes, whole, count)

    worst = [np.column_stack([part, 2 * part.max(axis=1)]) for part in rows]
    for runs, count in ((interleaved_order(2, 2, 4), None), (interleaved_order(3, 2, 9), 30)):
        free, alike = (bound(some, False, count, runs) for some in (rows, worst))
        assert free == pytest.approx(alike, rel=1e-5)
        whole, alike = (bound(some, True, count, runs) for some in (rows, worst))
        assert whole == pytest.approx(alike, rel=1e-4)
        assert whole >= free * (1 - 1e-5)

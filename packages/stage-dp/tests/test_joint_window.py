"""What pipelines faster than a limit can have, against all chains of stages."""

import itertools

import numpy as np
import pytest

from alpa_interchange.mesh import SubmeshSpec
from alpa_interchange.stage import DeviceGroup
from stage_dp.device_pool import CoarsePool, DevicePool
from stage_dp.joint_window import DeviceSeconds
from stage_dp.menu_table import Sequences

SIZES = (1, 2, 4)


def all_chains(layers):
    """Yield all stages (start, stop, kind) of all layers, on any submeshes."""
    for num in range(1, layers + 1):
        for inner in itertools.combinations(range(1, layers), num - 1):
            cuts = (0, *inner, layers)
            for kinds in itertools.product(range(len(SIZES)), repeat=num):
                yield list(zip(cuts, cuts[1:], kinds, strict=False))


@pytest.mark.parametrize("coarse", [None, True, False])
@pytest.mark.parametrize("seed", range(12))
def test_every_stage_and_state_of_a_faster_chain_is_in_the_window(seed, coarse):
    rng = np.random.default_rng(seed)
    layers, devices = 5, 8
    sequences = Sequences(tuple(rng.integers(2, size=layers).tolist()))
    kinds = [SubmeshSpec(num_hosts=1, devices_per_host=size) for size in SIZES]
    groups = [DeviceGroup(num_hosts=2, devices_per_host=4, memory=1.0)]
    pool = (
        DevicePool(groups, kinds)
        if coarse is None
        else CoarsePool(groups, kinds, round_up=coarse, most=4)
    )
    busy = rng.uniform(0.5, 2.0, (len(sequences), len(SIZES), 2)) / np.array(SIZES)[:, None]
    busy *= sequences.counts((0, 1)).sum(axis=1)[:, None, None]
    least = busy.min(axis=2)
    taken = DeviceSeconds.of(sequences, pool, busy)
    chains = []
    for chain in all_chains(layers):
        states = [0]
        for _, _, kind in chain:
            states.append(int(pool.following[kind][states[-1], 0]))
        work = [float(least[sequences.number[a, b], kind]) for a, b, kind in chain]
        if sum(SIZES[kind] for _, _, kind in chain) <= devices and pool.dead not in states:
            chains.append((max(work), chain, states))
            shared = sum(s * SIZES[kind] for s, (_, _, kind) in zip(work, chain, strict=True))
            assert taken.mean <= shared / devices * (1 + 1e-9)
    best = min(seconds for seconds, _, _ in chains)
    for limit in (best * (1 + 1e-6), 1.2 * best, 2 * best):
        window = taken.window(limit)
        assert window is not None
        stages = set(zip(*(part.tolist() for part in window.stages), strict=True))
        for seconds, chain, states in chains:
            if seconds > limit:
                continue
            for (a, b, kind), state in zip(chain, states, strict=False):
                assert (a, b, kind) in stages
                assert window.states[a].start <= state < window.states[a].stop
            last = window.states[layers]
            assert last.start <= states[-1] < last.stop
    # Of the fastest chain's time some stages are left out, which are in slower ones only.
    tight, wide = (taken.window(seconds) for seconds in (best * (1 + 1e-6), 100 * best))
    assert tight is not None and wide is not None
    assert len(tight.stages[0]) < len(wide.stages[0])

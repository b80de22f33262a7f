import random

import pytest
from random_plans import RandomPlan

from alpa_interchange.reshard import ReshardingTask
from alpa_interchange.tensor import ShardingSpec, TensorType
from resharding import HostLinks, Network, cut_slices, simulate
from resharding.bound import lower_bound
from resharding.notation import place
from resharding.slices import hosts_of

MOST_COPIES = 14  # of slices to receivers


def small_task(seed):
    """Return a task of 4 to 144 bytes on up to three hosts of four devices a side."""
    draw = random.Random(seed)
    rank = draw.choice((1, 1, 2))
    shape = tuple(draw.choice((4, 6, 8, 12)) for _ in range(rank))

    def side(first_host):
        dims: list[list[str]] = [[] for _ in range(rank)]
        for axis in draw.sample(("host", "device"), 2):
            if draw.random() < 0.6:
                dims[draw.randrange(rank)].append(axis)
        spec = ShardingSpec(tuple(tuple(axes) for axes in dims))
        return place(spec, draw.randint(1, 3), draw.choice((1, 2, 2, 4)), first_host)

    return ReshardingTask(
        tensor=TensorType(shape, "int8"), source=side(0), target=side(draw.choice((3, 3, 0, 1)))
    )


def ratios_of(seeds, network_of):
    """Return the least seconds of 8 random plans over the bound, for each small task."""
    found = []
    for seed in seeds:
        task = small_task(seed)
        slices = cut_slices(task)
        if not 0 < sum(len(piece.receivers) for piece in slices) <= MOST_COPIES:
            continue
        network = network_of(seed)
        bound = lower_bound(slices, hosts_of(task), network)
        plans = [RandomPlan(task, 100 * seed + k).made() for k in range(8)]
        found.append(min(simulate(task, plan, network).seconds for plan in plans) / bound)
    return found


@pytest.mark.parametrize("issue", ["host", "device", "none"])
@pytest.mark.parametrize("latency", [0.0, 1.0, 4.0, 30.0])
def test_no_random_plan_beats_the_bound_and_some_reach_it(issue, latency):
    def network_of(seed):
        return Network(
            nic_bandwidth=1.0,
            device_bandwidth=(1.0, 4.0)[seed % 2],
            num_nics=(4, 1, 2, 1, 1)[seed % 5],
            latency=latency,
            issue=issue,
        )

    ratios = ratios_of(range(30), network_of)
    assert min(ratios) >= 1 - 1e-9
    assert sum(ratio < 1.001 for ratio in ratios) >= len(ratios) / 5


@pytest.mark.parametrize("issue", ["host", "device"])
@pytest.mark.parametrize("latency", [0.0, 2.0])
def test_no_random_plan_beats_the_bound_of_hosts_with_a_card_for_every_device(issue, latency):
    def network_of(seed):
        return Network(
            nic_bandwidth=1.0,
            device_bandwidth=(1.0, 2.0, 20.0)[seed % 3],
            num_nics=4,
            hosts=(HostLinks(host=3, num_nics=2, nic_bandwidth=2.0),),
            latency=latency,
            issue=issue,
        )

    ratios = ratios_of(range(30, 55), network_of)
    assert min(ratios) >= 1 - 1e-9
    assert sum(ratio < 1.001 for ratio in ratios) >= len(ratios) / 6

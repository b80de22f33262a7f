import math
import random

import pytest

from resharding import Network
from resharding.course import Demand
from resharding.fluid import Fluid
from resharding.network import HostLinks, Links


def drawn_links(draw):
    """Return the ports of up to four hosts whose cards carry more or less than a device."""
    hosts = draw.randint(1, 4)
    network = Network(
        nic_bandwidth=draw.choice((1.0, 3.0, 25.0)),
        device_bandwidth=draw.choice((8.0, 20.0)),
        num_nics=draw.choice((1, 2, 8)),
        hosts=(HostLinks(host=0, num_nics=draw.choice((1, 4)), device_bandwidth=5.0),),
    )
    per_host = draw.choice((1, 2, 4))
    return Links(network, {100 * h + k: h for h in range(hosts) for k in range(per_host)})


def drawn_demand(draw, links):
    """Return a copy, a chain or a ring through devices of any hosts."""
    devices = sorted(links.host_of)
    chain = draw.choices(devices, k=draw.randint(2, len(devices) + 1))  # may come back
    hops = [(a, b) for a, b in zip(chain, chain[1:], strict=False) if a != b]
    hops = hops or [(devices[0], devices[1])]
    if draw.random() < 0.3 and chain[0] != chain[-1]:
        hops.append((chain[-1], chain[0]))
    used: dict[int, int] = {}
    for a, b in hops:
        for port in links.ports(a, b):
            used[port] = used.get(port, 0) + 1
    size = draw.choice((1.0, 2.0, 5.0)) * draw.randint(1, 3)
    return Demand(size, tuple(used), tuple(used.values()), 0.0, math.inf)


def filled(demands, rate):
    """Return the max-min fair rate of each flow, by the definition: all grow evenly, and those at
    a port that is full stop."""
    found: dict[int, float] = {}
    active = set(range(len(demands)))
    room = list(rate)
    while active:
        users = [0.0] * len(rate)
        for k in active:
            for port, times in zip(demands[k].ports, demands[k].times, strict=True):
                users[port] += times
        grown = min(room[port] / users[port] for port in range(len(rate)) if users[port])
        level = grown + max(found.values(), default=0.0)
        room = [left - grown * count for left, count in zip(room, users, strict=True)]
        full = {p for p in range(len(rate)) if users[p] and room[p] <= 1e-9 * rate[p]}
        for k in [k for k in active if full.intersection(demands[k].ports)]:
            found[k] = level
            active.remove(k)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_flows_end_when_ports_shared_by_definition_let_them(seed):
    draw = random.Random(seed)
    links = drawn_links(draw)
    if len(links.host_of) < 2:
        return
    count = draw.choice((2, 8, 60))  # also so many that arrays share
    demands = [drawn_demand(draw, links) for _ in range(count)]
    fluid = Fluid(demands, links)
    left = {}
    waiting = list(range(count))
    for _ in range(draw.randint(1, count)):
        index = waiting.pop()
        fluid.start(index)
        left[index] = demands[index].num_bytes
    while left:
        running = sorted(left)
        rates = filled([demands[k] for k in running], links.rate)
        rate = {k: rates[place] for place, k in enumerate(running)}
        seconds = fluid.horizon()
        assert seconds == pytest.approx(min(left[k] / rate[k] for k in running), rel=1e-9)
        ended = fluid.advance(seconds, 1e-12)
        left = {k: left[k] - rate[k] * seconds for k in running}
        assert sorted(ended) == [k for k in running if left[k] <= 1e-9]
        left = {k: size for k, size in left.items() if size > 1e-9}
        if waiting and draw.random() < 0.5:
            index = waiting.pop()
            fluid.start(index)
            left[index] = demands[index].num_bytes

"""Which submeshes fit on the hosts together, and where each one goes.

Submeshes of one host group are *nested* if each is either a number of whole hosts, or a part of one
host whose size divides the host's devices and every larger part's size. Nested submeshes fit if and
only if their devices do: placed from large to small, whole hosts come first, and when a part of size
a is due, all that lies on the hosts are multiples of a, so a host with free devices has a of them.
The state of such a group is its number of free devices. For other submeshes the state is the sorted
free devices of each host, and every way to take hosts is followed. -> DevicePool
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from alpa_interchange.mesh import SubmeshSpec
from alpa_interchange.stage import DeviceGroup
from numpy.typing import NDArray


class DevicePool:
    """States of free devices reachable by taking submeshes, numbered; state 0 has all free.

    `following[kind]` [states + 1, choices] are the states after taking submesh `kinds[kind]`; the
    number `dead` (one past the last state) stands for "does not fit". `empty` [states] is true where
    no device is left. With `relaxed` only devices are counted, never hosts: a superset of what fits.
    """

    def __init__(
        self,
        groups: Sequence[DeviceGroup],
        kinds: Sequence[SubmeshSpec],
        *,
        relaxed: bool = False,
    ) -> None:
        self.kinds = tuple(kinds)
        for kind in self.kinds:
            if kind.host_group >= len(groups):
                raise ValueError(
                    f"submesh {kind} is on host group {kind.host_group}, but there are only "
                    f"{len(groups)} device groups"
                )
        counted = [
            relaxed or nested(group, [k for k in self.kinds if k.host_group == g])
            for g, group in enumerate(groups)
        ]
        full = tuple(
            (group.num_hosts * group.devices_per_host,)
            if count
            else (group.devices_per_host,) * group.num_hosts
            for group, count in zip(groups, counted, strict=True)
        )
        number = {full: 0}
        queue = [full]
        choices: list[list[list[int]]] = []
        for state in queue:
            row = []
            for kind in self.kinds:
                group = groups[kind.host_group]
                part = state[kind.host_group]
                if kind.num_hosts > group.num_hosts or kind.devices_per_host > group.devices_per_host:
                    after: set[tuple[int, ...]] = set()
                elif counted[kind.host_group]:
                    after = {(part[0] - kind.num_devices,)} if part[0] >= kind.num_devices else set()
                else:
                    after = set(_taken(part, kind.num_hosts, kind.devices_per_host))
                numbers = []
                for new in sorted(after):
                    following = (
                        *state[: kind.host_group],
                        new,
                        *state[kind.host_group + 1 :],
                    )
                    if following not in number:
                        number[following] = len(queue)
                        queue.append(following)
                    numbers.append(number[following])
                row.append(numbers)
            choices.append(row)
        self.num_states = len(queue)
        self.dead = self.num_states
        self.empty: NDArray[np.bool_] = np.array([not any(map(sum, s)) for s in queue])
        self.following: list[NDArray[np.int64]] = []
        for k in range(len(self.kinds)):
            width = max([1, *(len(row[k]) for row in choices)])
            table = np.full((self.num_states + 1, width), self.dead, dtype=np.int64)
            for state_number, row in enumerate(choices):
                table[state_number, : len(row[k])] = row[k]
            self.following.append(table)


def nested(group: DeviceGroup, kinds: Iterable[SubmeshSpec]) -> bool:
    """Return whether counting devices is enough to know that submeshes of these kinds fit."""
    sizes = {group.devices_per_host}
    for kind in kinds:
        if kind.devices_per_host != group.devices_per_host and kind.num_hosts > 1:
            return False
        sizes.add(kind.devices_per_host)
    chain = sorted(sizes)
    return all(large % small == 0 for small, large in itertools.pairwise(chain))


def _taken(free: tuple[int, ...], num_hosts: int, devices: int) -> Iterable[tuple[int, ...]]:
    """Yield the sorted free devices per host after taking `devices` from `num_hosts` hosts."""
    eligible = [h for h, count in enumerate(free) if count >= devices]
    seen: set[tuple[int, ...]] = set()
    for hosts in itertools.combinations(eligible, num_hosts):
        counts = tuple(free[h] for h in hosts)
        if counts in seen:
            continue
        seen.add(counts)
        yield tuple(
            sorted(count - devices if h in hosts else count for h, count in enumerate(free))
        )


def place(
    groups: Sequence[DeviceGroup], submeshes: Sequence[SubmeshSpec]
) -> tuple[tuple[int, ...], ...]:
    """Return the global device numbers of each submesh, in row-major order (host, then device).

    Goes through the pipeline in order and puts each stage as near to the one before as the packing
    of the rest allows: on the same host, else on the nearest hosts. Raises ValueError if the
    submeshes do not fit together.
    """
    first_host = np.cumsum([0, *(group.num_hosts for group in groups)]).tolist()
    first_device = np.cumsum([0, *(g.num_hosts * g.devices_per_host for g in groups)]).tolist()
    free = [[list(range(g.devices_per_host)) for _ in range(g.num_hosts)] for g in groups]
    placed: list[tuple[int, ...]] = []
    near = 0.0
    for number, submesh in enumerate(submeshes):
        g = submesh.host_group
        hosts = _hosts_for(groups, free, submeshes[number:], near - first_host[g])
        devices: list[int] = []
        for h in hosts:
            block = _block(free[g][h], submesh.devices_per_host)
            free[g][h] = [d for d in free[g][h] if d not in block]
            start = first_device[g] + h * groups[g].devices_per_host
            devices.extend(start + d for d in block)
        placed.append(tuple(devices))
        near = first_host[g] + sum(hosts) / len(hosts)
    return tuple(placed)


def _hosts_for(
    groups: Sequence[DeviceGroup],
    free: list[list[list[int]]],
    submeshes: Sequence[SubmeshSpec],
    near: float,
) -> tuple[int, ...]:
    """Return hosts for `submeshes[0]`, nearest to `near`, that leave room for all the others."""
    first, rest = submeshes[0], submeshes[1:]
    room = [[len(devices) for devices in hosts] for hosts in free]
    own = room[first.host_group]
    eligible = [h for h, count in enumerate(own) if count >= first.devices_per_host]
    windows = {
        tuple(eligible[at : at + first.num_hosts])
        for at in range(len(eligible) - first.num_hosts + 1)
    }

    def distance(hosts: tuple[int, ...]) -> tuple[float, int, int]:
        centre = sum(hosts) / len(hosts)
        left = sum(own[h] for h in hosts) - first.num_devices
        return (abs(centre - near) + (hosts[-1] - hosts[0]), left, hosts[0])

    for hosts in sorted(windows, key=distance):
        remaining = [list(counts) for counts in room]
        for h in hosts:
            remaining[first.host_group][h] -= first.devices_per_host
        if _packed(groups, remaining, rest) is not None:
            return hosts
    packed = _packed(groups, room, submeshes)
    if packed is None:
        raise ValueError(
            f"submeshes {[(s.num_hosts, s.devices_per_host, s.host_group) for s in submeshes]} "
            f"(hosts, devices, group) do not fit together on hosts with {room} free devices"
        )
    return packed[0]


def _packed(
    groups: Sequence[DeviceGroup], room: list[list[int]], submeshes: Sequence[SubmeshSpec]
) -> list[tuple[int, ...]] | None:
    """Return hosts for every submesh, or None if they do not fit together (exact)."""
    result: list[tuple[int, ...]] = [()] * len(submeshes)
    for g, group in enumerate(groups):
        wanted = sorted(
            (k for k, s in enumerate(submeshes) if s.host_group == g),
            key=lambda k: (-submeshes[k].devices_per_host, -submeshes[k].num_hosts),
        )
        simple = nested(group, (submeshes[k] for k in wanted))
        failed: set[tuple[int, tuple[int, ...]]] = set()
        if not _pack_group(room[g], wanted, 0, submeshes, result, simple, failed):
            return None
    return result


def _pack_group(
    room: list[int],
    wanted: list[int],
    at: int,
    submeshes: Sequence[SubmeshSpec],
    result: list[tuple[int, ...]],
    simple: bool,
    failed: set[tuple[int, tuple[int, ...]]],
) -> bool:
    """Fill `result` for `wanted[at:]`, large first; nested submeshes need no second attempt."""
    room = list(room)
    while at < len(wanted):
        key = (at, tuple(sorted(room)))
        if key in failed:
            return False
        submesh = submeshes[wanted[at]]
        eligible = sorted(
            (h for h, count in enumerate(room) if count >= submesh.devices_per_host),
            key=lambda h: (room[h], h),
        )
        if simple:
            if len(eligible) < submesh.num_hosts:
                return False
            result[wanted[at]] = tuple(sorted(eligible[: submesh.num_hosts]))
            for h in result[wanted[at]]:
                room[h] -= submesh.devices_per_host
            at += 1
            continue
        seen: set[tuple[int, ...]] = set()
        for hosts in itertools.combinations(eligible, submesh.num_hosts):
            counts = tuple(room[h] for h in hosts)
            if counts in seen:
                continue
            seen.add(counts)
            after = [n - submesh.devices_per_host * (h in hosts) for h, n in enumerate(room)]
            if _pack_group(after, wanted, at + 1, submeshes, result, simple, failed):
                result[wanted[at]] = tuple(sorted(hosts))
                return True
        failed.add(key)
        return False
    return True


def _block(free: list[int], size: int) -> list[int]:
    """Return `size` of the free device numbers: an aligned run if there is one, else any run."""
    runs = [
        free[at : at + size]
        for at in range(len(free) - size + 1)
        if free[at + size - 1] - free[at] == size - 1
    ]
    aligned = [run for run in runs if run[0] % size == 0]
    return (aligned or runs or [free[:size]])[0]

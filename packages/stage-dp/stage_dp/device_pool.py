"""Which submeshes fit on the hosts together, and where each one goes.

Submeshes of one host group are *nested* if each is either a number of whole hosts, or a part of one
host whose size divides the host's devices and every larger part's size. Nested submeshes fit if and
only if their devices do: placed from large to small, whole hosts come first, and when a part of
size a is due, all that lies on the hosts are multiples of a, so a host with free devices has a of
them. The state of such a group is its number of free devices. For other submeshes the state is the
sorted free devices of each host, and every way to take hosts is followed. -> DevicePool
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from alpa_interchange.mesh import SubmeshSpec
from alpa_interchange.stage import DeviceGroup

MAX_STATES = 5000


class DevicePool:
    """States of free devices reachable by taking submeshes, numbered; state 0 has all free.

    `following[kind]` [states + 1, choices]: the states after taking submesh `kinds[kind]`; `dead`,
    one past the last state, stands for "does not fit". `free` [states]: devices left, falling;
    `taken` [kinds]: those that a submesh takes; `num_devices` there are. `exact` is False where the
    hosts have too many states to follow; then devices are only counted, and what fits here need not
    fit on hosts.

    `fills` [kinds, states + 1]: whether a nested submesh taken at a state fills as many devices as
    a host has, or more. Each such stage, but the last, can be counted as one whose boundary crosses
    hosts: stages joined on one host have at most its devices together, so m hosts are filled before
    the last stage by m such groups, each of which crosses to the next.
    """

    def __init__(self, groups: Sequence[DeviceGroup], kinds: Sequence[SubmeshSpec]) -> None:
        self.kinds = tuple(kinds)
        self.num_devices = _devices(groups)
        for kind in self.kinds:
            if kind.host_group >= len(groups):
                raise ValueError(
                    f"submesh {kind} is on host group {kind.host_group}, but there are only "
                    f"{len(groups)} device groups"
                )
        counted = [
            nested(group, [k for k in self.kinds if k.host_group == g])
            for g, group in enumerate(groups)
        ]
        reached = _reached(groups, self.kinds, counted)
        self.exact = reached is not None
        if reached is None:
            reached = _reached(groups, self.kinds, [True] * len(groups))
        states, choices = reached or ([], [])
        self.num_states = len(states)
        self.dead = self.num_states
        free = np.array([sum(map(sum, state)) for state in states])
        falling = np.argsort(-free, kind="stable")
        place_of = np.append(np.argsort(falling), self.dead)
        self.free: NDArray[np.int64] = free[falling]
        self.taken: NDArray[np.int64] = np.array([kind.num_devices for kind in self.kinds])
        self.fills = np.zeros((len(self.kinds), self.num_states + 1), dtype=np.bool_)
        for k, kind in enumerate(self.kinds):
            group, g = groups[kind.host_group], kind.host_group
            if counted[g]:
                size, all_free = group.devices_per_host, group.num_hosts * group.devices_per_host
                used = np.array([all_free - states[at][g][0] for at in falling])
                self.fills[k, : self.num_states] = (used + kind.num_devices) // size > used // size
        self.following: list[NDArray[np.int64]] = []
        for k in range(len(self.kinds)):
            width = max([1, *(len(row[k]) for row in choices)])
            table = np.full((self.num_states + 1, width), self.dead, dtype=np.int64)
            for number, at in enumerate(falling):
                row = choices[at][k]
                table[number, : len(row)] = place_of[row]
            self.following.append(table)


class CoarsePool:
    """As DevicePool, but devices are counted in units, some to a unit, in each group.

    Each submesh takes its devices' units, rounded up (what fits here fits by count) or down (what
    fits by count fits here). At most about `most` states. `free` [states] and `taken` [kinds] as
    there, by these units.
    """

    exact = False

    def __init__(
        self,
        groups: Sequence[DeviceGroup],
        kinds: Sequence[SubmeshSpec],
        *,
        round_up: bool,
        most: int,
    ) -> None:
        self.kinds = tuple(kinds)
        self.num_devices = _devices(groups)
        devices = [group.num_hosts * group.devices_per_host for group in groups]
        unit = 1
        while np.prod([count // unit + 1 for count in devices]) > most + 1:
            unit *= 2
        units = [count // unit if round_up else -(-count // unit) for count in devices]
        taken = np.array(
            [
                -(-kind.num_devices // unit) if round_up else kind.num_devices // unit
                for kind in kinds
            ]
        )
        # Units taken by group, in mixed radix: state 0 has all free.
        places = np.cumprod([1, *(n + 1 for n in units)])
        self.num_states = self.dead = int(places[-1])
        used = np.arange(self.num_states)[:, None] // places[:-1] % (np.array(units) + 1)
        left = np.array(units) - used
        self.free: NDArray[np.int64] = left.sum(axis=1) * unit
        self.taken: NDArray[np.int64] = taken * unit
        self.fills = np.zeros((len(kinds), self.num_states + 1), dtype=np.bool_)  # not known
        self.following: list[NDArray[np.int64]] = []
        for kind, count in zip(kinds, taken, strict=True):
            g = kind.host_group
            after = np.arange(self.num_states) + count * places[g]
            after = np.where(left[:, g] >= count, after, self.dead)
            self.following.append(np.append(after, self.dead)[:, None].astype(np.int64))


def _devices(groups: Sequence[DeviceGroup]) -> int:
    return sum(group.num_hosts * group.devices_per_host for group in groups)


State = tuple[tuple[int, ...], ...]  # per group: free devices in all, or of each host, sorted


def _reached(
    groups: Sequence[DeviceGroup], kinds: Sequence[SubmeshSpec], counted: Sequence[bool]
) -> tuple[list[State], list[list[list[int]]]] | None:
    """Return all states and, per state and kind, those after it by number; None: too many."""
    full: State = tuple(
        (group.num_hosts * group.devices_per_host,)
        if count
        else (group.devices_per_host,) * group.num_hosts
        for group, count in zip(groups, counted, strict=True)
    )
    number = {full: 0}
    states = [full]
    choices: list[list[list[int]]] = []
    for state in states:
        if len(states) > MAX_STATES and not all(counted):
            return None
        row = []
        for kind in kinds:
            g = kind.host_group
            numbers = []
            for part in sorted(_parts_after(groups[g], kind, state[g], counted[g])):
                after = (*state[:g], part, *state[g + 1 :])
                if after not in number:
                    number[after] = len(states)
                    states.append(after)
                numbers.append(number[after])
            row.append(numbers)
        choices.append(row)
    return states, choices


def _parts_after(
    group: DeviceGroup, kind: SubmeshSpec, part: tuple[int, ...], counted: bool
) -> set[tuple[int, ...]]:
    if kind.num_hosts > group.num_hosts or kind.devices_per_host > group.devices_per_host:
        return set()
    if counted:
        left = part[0] - kind.num_devices
        return {(left,)} if left >= 0 else set()
    return {
        tuple(sorted(n - kind.devices_per_host * (h in hosts) for h, n in enumerate(part)))
        for hosts in _host_choices(part, kind)
    }


def _host_choices(free: Sequence[int], kind: SubmeshSpec) -> Iterator[tuple[int, ...]]:
    """Yield hosts that `kind` can take, one choice for each combination of free counts."""
    by_count: dict[int, list[int]] = {}
    for h, count in enumerate(free):
        if count >= kind.devices_per_host:
            by_count.setdefault(count, []).append(h)
    alike = [by_count[count] for count in sorted(by_count)]

    def choose(at: int, wanted: int) -> Iterator[tuple[int, ...]]:
        if not wanted:
            yield ()
        elif at < len(alike):
            for taken in range(min(wanted, len(alike[at])), -1, -1):
                for rest in choose(at + 1, wanted - taken):
                    yield (*alike[at][:taken], *rest)

    yield from choose(0, kind.num_hosts)


def nested(group: DeviceGroup, kinds: Iterable[SubmeshSpec]) -> bool:
    """Return whether counting devices is enough to know that submeshes of these kinds fit."""
    sizes = {group.devices_per_host}
    for kind in kinds:
        if kind.devices_per_host != group.devices_per_host and kind.num_hosts > 1:
            return False
        sizes.add(kind.devices_per_host)
    chain = sorted(sizes)
    return all(large % small == 0 for small, large in itertools.pairwise(chain))


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
        for hosts in _host_choices(room, submesh):
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

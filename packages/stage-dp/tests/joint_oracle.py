"""All pipelines of a small joint problem: rows, counts and schedules by brute force."""

import itertools
import math
from typing import Any

import numpy as np

from stage_dp import (
    default_warmups,
    place,
)
from stage_dp.batched_time import batched_step_seconds


def chains(problem):
    """Yield (cuts, meshes, devices) of every placeable pipeline."""
    layers, meshes = problem.menu.num_layers, problem.menu.meshes
    total = sum(g.num_hosts * g.devices_per_host for g in problem.device_groups)
    for n in range(1, layers + 1):
        if problem.num_stages not in (None, n):
            continue
        for inner in itertools.combinations(range(1, layers), n - 1):
            for chosen in itertools.product(range(len(meshes)), repeat=n):
                used = sum(meshes[m].submesh.num_devices for m in chosen)
                if used > total or (problem.use_all_devices and used != total):
                    continue
                try:
                    devices = place(problem.device_groups, [meshes[m].submesh for m in chosen])
                except ValueError:
                    continue
                yield (0, *inner, layers), chosen, devices


def link_between(problem, before, after):
    hosts = []
    for g, group in enumerate(problem.device_groups):
        for h in range(group.num_hosts):
            hosts += [(g, h)] * group.devices_per_host
    touched = {hosts[d] for d in (*before, *after)}
    if len(touched) == 1:
        return "host"
    return "hosts" if len({g for g, _ in touched}) == 1 else "groups"


def stage_options(problem, start, stop, mesh, samples):
    """Yield (f, b, u, state, activation, transient, layout in, layout out, b by weight, bytes
    delayed, more b where it is split, bytes waiting) of all row choices."""
    menu = problem.menu.meshes[mesh]
    rows = [menu.rows[c] for c in problem.menu.class_of_layer[start:stop]]
    for choice in itertools.product(*rows):
        if any(samples % row.batch_split for row in choice):
            continue
        change = sum(
            menu.convert(a.layout_out, b.layout_in, samples) for a, b in itertools.pairwise(choice)
        )
        yield (
            sum(r.forward.value(samples) for r in choice) + change / 2,
            sum(r.backward_input.value(samples) + r.backward_weight.value(samples) for r in choice)
            + change / 2,
            sum(r.step_seconds for r in choice),
            sum(r.state_bytes for r in choice),
            sum(r.activation_bytes.value(samples) for r in choice),
            max(r.transient_bytes.value(samples) for r in choice),
            choice[0].layout_in,
            choice[-1].layout_out,
            sum(r.backward_weight.value(samples) for r in choice),
            sum(r.delayed_bytes.value(samples) for r in choice),
            sum(r.split_seconds.value(samples) for r in choice),
            sum(waiting_bytes(r, samples) for r in choice),
        )


def waiting_bytes(row, samples):
    if row.waiting_bytes is None:
        return row.activation_bytes.value(samples) + row.delayed_bytes.value(samples)
    return row.waiting_bytes.value(samples)


def need(stage, held, delayed=0):
    waiting = max(delayed - 1, 0)
    kept = (held - waiting) * stage[4] + waiting * stage[11]
    return stage[3] + kept + stage[5] + min(delayed, 1) * stage[9]


def held_by(schedule, stages, count, extras, memory):
    num = len(stages)
    if schedule == "zero-bubble-h1":
        return tuple(
            max(
                k
                for k in range(least, min(num, count) + 1)
                if k == least or need(stage, k, 1 + k - least) <= room * (1 + 1e-12)
            )
            for stage, least, room in zip(
                stages, default_warmups("1f1b", num, count), memory, strict=True
            )
        )
    if schedule != "adaptive":
        return default_warmups(schedule, num, count)
    held = [1]
    for extra in reversed(extras):
        held.append(held[-1] + 1 + extra)
    return tuple(min(count, k) for k in reversed(held))


def brute_force(problem):
    """Return the least step time of all pipelines (inf: none fits)."""
    best = math.inf
    for cuts, meshes, devices in chains(problem):
        links = [link_between(problem, a, b) for a, b in itertools.pairwise(devices)]
        memory = [
            problem.device_groups[problem.menu.meshes[m].submesh.host_group].memory for m in meshes
        ]
        for count in problem.counts:
            samples = problem.batch_size // count
            options = [
                list(stage_options(problem, start, stop, mesh, samples))
                for (start, stop), mesh in zip(itertools.pairwise(cuts), meshes, strict=True)
            ]
            groups: dict[tuple[tuple[int, ...], bool], list[tuple[Any, list[float]]]] = {}
            for stages in itertools.product(*options):
                crossing = [
                    problem.boundary(meshes[i], a[7], meshes[i + 1], b[6], links[i]).value(samples)
                    for i, (a, b) in enumerate(itertools.pairwise(stages))
                ]
                extras = [
                    range(math.ceil(2 * c / (a[0] + a[1]) - 1e-9) + 1)
                    for c, a in zip(crossing, stages, strict=False)
                ]
                for schedule in problem.schedules:
                    shares = itertools.product(*extras) if schedule == "adaptive" else [()]
                    for share in shares:
                        held = held_by(schedule, stages, count, share, memory)
                        split = schedule == "zero-bubble-h1"
                        least = default_warmups("1f1b", len(stages), count) if split else held
                        if all(
                            need(s, k, split + k - n) <= m * (1 + 1e-12)
                            for s, k, n, m in zip(stages, held, least, memory, strict=True)
                        ):
                            groups.setdefault((held, split), []).append((stages, crossing))
            for (held, split), members in groups.items():
                figures = np.array([stages for stages, _ in members])
                seconds = batched_step_seconds(
                    held,
                    count,
                    figures[:, :, 0],
                    figures[:, :, 1] + split * figures[:, :, 10],
                    np.array([c for _, c in members]).reshape(len(members), -1),
                    figures[:, :, 2],
                    figures[:, :, 8] if split else None,
                )
                best = min(best, float(seconds.min()))
    return best
